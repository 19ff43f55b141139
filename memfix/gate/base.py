"""Judge today's forms by the laws of another commit, the base.

A change that breaks a budget can loosen the budget too. So the base's laws (``naive.py`` and the contracts of each
folder of ops) are copied over a copy of the working tree, and a child process examines there the ops whose laws differ.
Each difference between the two laws is a finding of its own.

A change can also loosen the checks: how many calls are drawn, which error counts as equal, how the lock is read. Where
such a file differs, today's forms of every op are copied over the base's memfix and judged by its checks and laws.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, Self

from ..checks.finding import Finding
from ..checks.measured import Bytes
from ..contract import Contract
from ..errors import MemfixError, UsageError
from ..orphans import end_with
from ..registry import op_declared_in
from ..units import format_bytes
from .commit import Commit, export_package, git
from .lock import Key, parse_lock

OPS = "memfix/ops"
NAIVE_FILE = "naive.py"
JUDGED = ("memfix", "benchmarks/memory.lock")
JUDGES = (
    *(f"memfix/{name}" for name in ("checks", "gate", "meters", "contract", "laws.py", "formula.py", "registry.py")),
    "ci",
)


@dataclass(frozen=True)
class Base(Commit):
    """A commit of memfix itself, which has laws to judge by."""

    @classmethod
    def of(cls, ref: str, package: Path, *, option: str = "--base", may_be_empty: bool = False) -> Self:
        """The commit ``ref`` of the checkout with ``package``, the folder of the working tree's memfix."""
        base = super().of(ref, package, option=option, may_be_empty=may_be_empty)
        if package.resolve() != (base.root / "memfix").resolve():
            raise UsageError(
                f"--base compares laws of memfix itself; {package} is not the memfix of the checkout {base.root}"
            )
        return base

    def ops_with_other_laws(self) -> list[str]:
        """Return the working tree's ops whose naive form or contract has another text at the base, or another place."""
        return [
            op
            for op, contract in self._contracts_here().items()
            if self.has_moved(op) or any(self._differs(law) for law in (contract, contract.with_name(NAIVE_FILE)))
        ]

    def gone_ops(self, check: str) -> list[Finding]:
        """Return a note of ``check`` for each op that only the base has."""
        gone = sorted(self._contracts_at_base().keys() - self._contracts_here().keys())
        return [Finding(check, op, "", "note", f"the op is there at {self.ref} and gone now") for op in gone]

    def is_new(self, op: str) -> bool:
        return op not in self._contracts_at_base()

    def has_moved(self, op: str) -> bool:
        """Whether the base declares ``op`` in another file."""
        there = self._contracts_at_base()
        return op in there and there[op] != self._contracts_here()[op]

    @contextmanager
    def laid_over(self, ops: list[str]) -> Iterator[Path]:
        """Copy the working tree's package, with the base's laws for ``ops`` and for the other ops of the same folders:
        their contracts import each other.
        """
        here, there = self._contracts_here(), self._contracts_at_base()
        folders = {here[op].parent for op in ops}
        together = [op for op, contract in here.items() if contract.parent in folders and op in there]
        folders |= {there[op].parent for op in together}
        with tempfile.TemporaryDirectory(prefix="memfix-base-") as folder:
            target = Path(folder)
            shutil.copytree(self.root / "memfix", target / "memfix", ignore=shutil.ignore_patterns("__pycache__"))
            for op in together:
                if self.has_moved(op):
                    (target / here[op]).unlink()
            for law in self._files_at_base():
                text = self.file(law.as_posix()) if law.parent in folders and _is_law(law) else None
                if text is not None:
                    (target / law).parent.mkdir(exist_ok=True)
                    (target / law).write_text(text, encoding="utf-8")
            yield target

    def judges_changed(self) -> list[str]:
        """Return files other than contracts that judge forms and differ from the base's."""
        differ = git(self.root, "diff", "--name-only", self.commit, "--", *JUDGES)
        new = git(self.root, "ls-files", "--others", "--exclude-standard", "--", *JUDGES)
        return sorted({*differ.splitlines(), *new.splitlines()})

    @contextmanager
    def with_todays_forms(self) -> Iterator[Path]:
        """Copy the base's package, checks and laws included, with the working tree's forms of its ops."""
        with tempfile.TemporaryDirectory(prefix="memfix-base-") as folder:
            target = Path(folder)
            export_package(self.root, self.commit, self.root / "memfix", target)
            for here in (self.root / OPS).rglob("*.py"):
                there = target / here.relative_to(self.root)
                if there.parent.is_dir() and not _is_law(here) and here.name != "__init__.py":
                    shutil.copy(here, there)
            yield target

    def ops_here(self) -> list[str]:
        return sorted(self._contracts_here())

    def _contracts_here(self) -> dict[str, PurePosixPath]:
        return _contracts_among(path.relative_to(self.root) for path in (self.root / OPS).glob("*/*.py"))

    def _contracts_at_base(self) -> dict[str, PurePosixPath]:
        return _contracts_among(self._files_at_base())

    def _files_at_base(self) -> list[PurePosixPath]:
        listing = git(self.root, "ls-tree", "-r", "--name-only", self.commit, "--", OPS)
        return [PurePosixPath(path) for path in listing.splitlines()]

    def _differs(self, law: PurePosixPath) -> bool:
        here = self.root / law
        return self.file(law.as_posix()) != (here.read_text(encoding="utf-8") if here.exists() else None)


def _contracts_among(files: Iterable[PurePath]) -> dict[str, PurePosixPath]:
    """Return the file that declares each op, by op, in alphabetical order."""
    found = {op: PurePosixPath(file.as_posix()) for file in files if (op := op_declared_in(file)) is not None}
    return dict(sorted(found.items()))


def _is_law(file: PurePath) -> bool:
    return file.name == NAIVE_FILE or op_declared_in(file) is not None


def examine_under(overlay: Path, ops: list[str], profile: str, meter: str) -> dict[str, Any]:
    """Run the gate in ``overlay`` in a child process; return its JSON report."""
    return _child(overlay, "gate", *ops, "--profile", profile, "--meter", meter, "--no-lock", "--json", "-")


def laws_under(overlay: Path, ops: list[str]) -> dict[str, dict[str, str]]:
    """Return the base's laws by op, as ``Contract.laws`` spells them."""
    listed = _child(overlay, "list", *ops, "--json", "-")
    return {op["name"]: op["laws"] for op in listed["ops"]}


def law_changes(contract: Contract, base_laws: dict[str, str], ref: str) -> list[Finding]:
    """Return a note for each law that this change adds, removes or rewrites."""
    here = contract.laws()
    rows = []
    for key in dict.fromkeys([*base_laws, *here]):
        was, now = base_laws.get(key), here.get(key)
        if was != now:
            if now is None:
                change = f"removed; at {ref}: {was}"
            elif was is None:
                change = f"added: {now}"
            else:
                change = f"changed: {now}; at {ref}: {was}"
            rows.append(Finding("law", contract.name, "", "note", f"{key} {change}"))
    if not rows:
        rows.append(
            Finding("law", contract.name, "", "note", f"the text of its naive form or contract differs from {ref}")
        )
    return rows


def judge_changes(files: Sequence[str], ref: str) -> list[Finding]:
    """Return a note for each folder with files that judge forms and differ from the base's."""
    by_folder: dict[str, list[str]] = {}
    for file in files:
        folder, _, name = file.rpartition("/")
        by_folder.setdefault(folder, []).append(name)
    return [
        Finding("law", "memfix", "", "note", f"what judges a form differs from {ref}: {folder}/ {', '.join(names)}")
        for folder, names in by_folder.items()
    ]


def lock_at(commit: Commit, path: Path) -> dict[Key, int]:
    """Return the entries of the lock file at a commit; none where ``path`` is not in its checkout."""
    try:
        relative = path.resolve().relative_to(commit.root.resolve())
    except ValueError:
        return {}
    text = commit.file(relative.as_posix())
    return {} if text is None else parse_lock(text, f"{commit.ref}:{relative.as_posix()}")


def lock_changes(before: dict[Key, int], now: dict[Key, int], ref: str) -> list[Finding]:
    """Return a note for each entry that this change raises or lowers, and for each form with new or removed entries."""
    rows = []
    for key in sorted(now.keys() & before.keys()):
        if now[key] != before[key]:
            op, form, case, phase = key
            word = "raised" if now[key] > before[key] else "lowered"
            message = f"lock {word}: {format_bytes(now[key])}; at {ref}: {format_bytes(before[key])}"
            measured = Bytes(now[key], before[key], "base")
            rows.append(Finding("law", op, form, "note", message, case, phase, measured=measured))
    for keys, message in (
        (before.keys() - now.keys(), f"gone from the lock; at {ref} it has"),
        (now.keys() - before.keys(), f"new in the lock since {ref}:"),
    ):
        for (op, form), number in sorted(Counter(key[:2] for key in keys).items()):
            entries = f"{number} entr{'y' if number == 1 else 'ies'}"
            rows.append(Finding("law", op, form, "note", f"{message} {entries}"))
    return rows


def _child(overlay: Path, *arguments: str) -> dict[str, Any]:
    environment = {
        **os.environ,
        "PYTHONIOENCODING": "utf-8",
        "PYTHONPATH": os.pathsep.join([str(overlay), os.environ.get("PYTHONPATH", "")]),
    }
    for variable in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        environment.pop(variable, None)  # the parent writes the annotations
    child = subprocess.run(
        [sys.executable, "-m", "memfix", *arguments],
        cwd=overlay,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        preexec_fn=partial(end_with, os.getpid()),
    )
    try:
        return json.loads(child.stdout)
    except ValueError:
        last = (child.stderr.strip().splitlines() or ["no output"])[-1]
        raise MemfixError(f"today's forms cannot be judged under the base's laws: {last}") from None
