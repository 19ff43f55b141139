"""Another commit beside this one: today's forms judged under that commit's naive forms and contracts.

A change that breaks a budget can loosen the budget too. So the laws of the base commit (``naive.py`` and
``contract.py`` of each op) are laid over a copy of the working tree, and the ops whose laws differ are
examined there, in a child process. Every difference between the two laws is a row of its own.

It can also loosen what judges: how many calls are drawn, how far off is equal, how the lock is read. Where such a file
differs, today's forms of every op are laid over the base's memfix, and judged by its checks under its laws.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Self

from ..checks.finding import Finding
from ..contract import Contract
from ..errors import MemfixError, UsageError
from ..units import format_bytes
from .commit import Commit, git
from .lock import Key, read_lock

OPS = "memfix/ops"
LAW_FILES = ("naive.py", "contract.py")
JUDGED = ("memfix", "benchmarks/memory.lock")
JUDGES = (
    *(f"memfix/{name}" for name in ("checks", "gate", "meters", "contract.py", "laws.py", "formula.py", "registry.py")),
    "ci",
)


@dataclass(frozen=True)
class Base(Commit):
    """A commit of memfix itself."""

    @classmethod
    def of(cls, ref: str, package: Path) -> Self:
        """``package`` is the folder of the working tree's memfix."""
        base = super().of(ref, package)
        if package.resolve() != (base.root / "memfix").resolve():
            raise UsageError(
                f"--base compares laws of memfix itself; {package} is not the memfix of the checkout {base.root}"
            )
        return base

    def ops_with_other_laws(self) -> list[str]:
        """Ops of the working tree whose naive form or contract reads differently at the base."""
        changed = []
        for op in self.ops_here():
            for name in LAW_FILES:
                here = self.root / OPS / op / name
                if self.file(f"{OPS}/{op}/{name}") != (here.read_text(encoding="utf-8") if here.exists() else None):
                    changed.append(op)
                    break
        return changed

    def ops_gone(self) -> list[str]:
        """Ops that the base has and the working tree has not."""
        return sorted(set(self._ops_at_base()) - set(self.ops_here()))

    def is_new(self, op: str) -> bool:
        return op not in self._ops_at_base()

    @contextmanager
    def laid_over(self, ops: list[str]) -> Iterator[Path]:
        """A copy of the working tree's package with the base's laws for ``ops``."""
        with tempfile.TemporaryDirectory(prefix="memfix-base-") as folder:
            target = Path(folder)
            shutil.copytree(self.root / "memfix", target / "memfix", ignore=shutil.ignore_patterns("__pycache__"))
            for op in ops:
                for name in LAW_FILES:
                    text = self.file(f"{OPS}/{op}/{name}")
                    if text is not None:
                        (target / OPS / op / name).write_text(text, encoding="utf-8")
            yield target

    def judges_changed(self) -> list[str]:
        """Files outside of the contracts that judge a form, and differ from the base's."""
        differ = git(self.root, "diff", "--name-only", self.commit, "--", *JUDGES)
        new = git(self.root, "ls-files", "--others", "--exclude-standard", "--", *JUDGES)
        return sorted({*differ.splitlines(), *new.splitlines()})

    @contextmanager
    def with_todays_forms(self) -> Iterator[Path]:
        """The base's package, its checks and laws, with the working tree's forms of the ops that it has."""
        with tempfile.TemporaryDirectory(prefix="memfix-base-") as folder:
            target = Path(folder)
            archive = target / "base.tar"
            git(self.root, "archive", "--format=tar", f"--output={archive}", self.commit, "memfix")
            with tarfile.open(archive) as tar:
                tar.extractall(target, filter="data")
            for here in (self.root / OPS).rglob("*.py"):
                there = target / here.relative_to(self.root)
                if there.parent.is_dir() and here.name not in (*LAW_FILES, "__init__.py"):
                    shutil.copy(here, there)
            yield target

    def lock(self, path: Path) -> dict[Key, int]:
        """The base's lock file, for the rows that show raised entries."""
        try:
            relative = path.resolve().relative_to(self.root.resolve())
        except ValueError:
            return {}
        text = self.file(relative.as_posix())
        if text is None:
            return {}
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "memory.lock"
            copy.write_text(text, encoding="utf-8")
            return read_lock(copy)

    def ops_here(self) -> list[str]:
        return sorted(path.parent.name for path in (self.root / OPS).glob("*/contract.py"))

    def _ops_at_base(self) -> list[str]:
        listing = git(self.root, "ls-tree", "-r", "--name-only", self.commit, "--", OPS)
        return sorted(PurePosixPath(p).parent.name for p in listing.splitlines() if p.endswith("/contract.py"))


def examine_under(overlay: Path, ops: list[str], profile: str, meter: str) -> dict[str, Any]:
    """Run the gate on the overlaid copy in a child process; its JSON."""
    return _child(overlay, "gate", *ops, "--profile", profile, "--meter", meter, "--no-lock", "--json", "-")


def laws_under(overlay: Path, ops: list[str]) -> dict[str, dict[str, str]]:
    """The base's laws, op by op, spelled as ``Contract.laws`` does."""
    listed = _child(overlay, "list", *ops, "--json", "-")
    return {op["name"]: op["laws"] for op in listed["ops"]}


def law_changes(contract: Contract, base_laws: dict[str, str], ref: str) -> list[Finding]:
    """One row for each law that this change adds, removes or rewrites."""
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
            Finding("law", contract.name, "", "note", f"the text of naive.py or contract.py differs from {ref}")
        )
    return rows


def judge_changes(files: Sequence[str], ref: str) -> list[Finding]:
    """One row for each folder with files that judge a form otherwise than at the base."""
    by_folder: dict[str, list[str]] = {}
    for file in files:
        folder, _, name = file.rpartition("/")
        by_folder.setdefault(folder, []).append(name)
    return [
        Finding("law", "memfix", "", "note", f"what judges a form differs from {ref}: {folder}/ {', '.join(names)}")
        for folder, names in by_folder.items()
    ]


def lock_changes(before: dict[Key, int], now: dict[Key, int], ref: str) -> list[Finding]:
    """One row for each entry that this change raises or lowers, one for each form whose entries come or go."""
    rows = []
    for key in sorted(now.keys() & before.keys()):
        if now[key] != before[key]:
            op, form, case, phase = key
            word = "raised" if now[key] > before[key] else "lowered"
            message = f"lock {word}: {format_bytes(now[key])}; at {ref}: {format_bytes(before[key])}"
            figures = {"bytes": now[key], "before_bytes": before[key]}
            rows.append(Finding("law", op, form, "note", message, case, phase, figures=figures))
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
        environment.pop(variable, None)  # the parent announces
    child = subprocess.run(
        [sys.executable, "-m", "memfix", *arguments],
        cwd=overlay,
        env=environment,
        capture_output=True,
        encoding="utf-8",
    )
    try:
        return json.loads(child.stdout)
    except ValueError:
        last = (child.stderr.strip().splitlines() or ["no output"])[-1]
        raise MemfixError(f"today's forms cannot be judged under the base's laws: {last}") from None
