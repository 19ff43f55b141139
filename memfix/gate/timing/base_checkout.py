"""Export the packages that declare ops as they were at the base commit, each to a folder, under another name."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ...checks.finding import Finding
from ...contract import Contract
from ...errors import MeasurementError
from ...registry import source_of
from ..base import Base
from ..commit import Commit, NoBase, export_package
from ..module_graph import package_of

AT_BASE = "_at_base"


@dataclass
class BaseCheckouts:
    """The base's copy of each package that the base has; empty without a base."""

    ref: str = ""
    folders: dict[str, Path] = field(default_factory=dict)
    """By op: a folder from which ``import PACKAGE_at_base`` imports the copy of its package."""
    commits: dict[Path, Commit] = field(default_factory=dict)
    """By package."""
    notes: list[str] = field(default_factory=list)

    def gone_ops(self) -> list[Finding]:
        """Return a note for each op of memfix itself that is gone. The former ops of other packages are unknown."""
        own = self.commits.get(Path(__file__).resolve().parents[2])
        return Base(own.root, own.commit, own.ref).gone_ops("time") if own else []


@contextmanager
def check_out_base(
    ref: str, contracts: Sequence[Contract], *, otherwise: str = "held against naive only"
) -> Iterator[BaseCheckouts]:
    """Export the packages of ``contracts`` at the commit ``ref``.

    An installed package, and one in a checkout without that commit, has no base: a note says what is done
    ``otherwise``, and it is an error if no package has a base. A package that did not exist yet is noted too.
    """
    by_package: dict[Path, list[str]] = {}
    for contract in contracts:
        package = package_of(source_of(contract.name).module)
        assert package is not None
        by_package.setdefault(package, []).append(contract.name)
    found, refused = BaseCheckouts(), []
    with ExitStack() as folders:
        for package, ops in by_package.items():
            try:
                commit = Commit.of(ref, package)
            except NoBase as error:
                refused.append(error)
                found.notes.append(f"{', '.join(ops)}: {otherwise}: {error}")
                continue
            found.ref = commit.ref
            found.commits[package] = commit
            found.notes += commit.notes(str(package))
            try:
                found.folders |= dict.fromkeys(ops, folders.enter_context(_exported(commit, package)))
            except MeasurementError as error:
                found.notes.append(f"{', '.join(ops)}: {otherwise}: {error}")
        if refused and not found.commits:
            raise refused[0]
        yield found


@contextmanager
def _exported(commit: Commit, package: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="memfix-time-") as folder:
        exported = export_package(commit.root, commit.commit, package, Path(folder))
        exported.rename(Path(folder) / f"{package.stem}{AT_BASE}{package.suffix}")
        yield Path(folder)
