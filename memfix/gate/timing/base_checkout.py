"""The packages that declare ops, as they were at another commit: each laid into a folder, under another name."""

from __future__ import annotations

import importlib
import io
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ...contract import Contract
from ...errors import MeasurementError
from ...registry import Source, source_of
from ..base import Base
from ..commit import Commit, NotInGit

AT_BASE = "_at_base"


@dataclass
class Copies:
    """Without any of them nothing is compared."""

    ref: str = ""
    folders: dict[str, Path] = field(default_factory=dict)
    """By op: a folder in which ``import PACKAGE_at_base`` finds the copy of its package."""
    commits: dict[Path, Commit] = field(default_factory=dict)
    """By package."""
    notes: list[str] = field(default_factory=list)

    def ops_gone(self) -> list[str]:
        """Ops of memfix itself that the commit has; what else a package had declared, only its lock may know."""
        own = self.commits.get(Path(__file__).resolve().parents[2])
        return Base(own.root, own.commit, own.ref).ops_gone() if own else []


@contextmanager
def copies_at(ref: str, contracts: Sequence[Contract]) -> Iterator[Copies]:
    """What is installed and in no checkout has no other commit. That is noted, unless there is nothing else."""
    by_package: dict[Path, list[str]] = {}
    for contract in contracts:
        by_package.setdefault(_package_of(source_of(contract.name)), []).append(contract.name)
    found, refused = Copies(), []
    with ExitStack() as folders:
        for package, ops in by_package.items():
            try:
                commit = Commit.of(ref, package)
            except NotInGit as error:
                refused.append(error)
                found.notes.append(f"{', '.join(ops)}: held against naive only: {error}")
                continue
            found.ref = commit.ref
            found.commits[package] = commit
            found.notes += commit.notes(str(package))
            found.folders |= dict.fromkeys(ops, folders.enter_context(_exported(commit, package)))
        if refused and not found.commits:
            raise refused[0]
        yield found


def _package_of(source: Source) -> Path:
    """The folder of the package that declares a contract, or its file where it is a single module."""
    package = importlib.import_module(source.module.partition(".")[0])
    if folders := list(getattr(package, "__path__", ())):
        return Path(folders[0]).resolve()
    assert package.__file__ is not None
    return Path(package.__file__).resolve()


@contextmanager
def _exported(commit: Commit, package: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="memfix-time-") as folder:
        taken = take_package(commit.root, commit.commit, package, Path(folder))
        taken.rename(Path(folder) / f"{package.stem}{AT_BASE}{package.suffix}")
        yield Path(folder)


def take_package(root: Path, commit: str, package: Path, folder: Path) -> Path:
    """What a commit of the checkout ``root`` has in the place of ``package``, laid into ``folder``."""
    path = package.relative_to(root.resolve()).as_posix()
    archive = subprocess.run(["git", "-C", str(root), "archive", "--format=tar", commit, path], capture_output=True)
    if archive.returncode != 0:
        why = archive.stderr.decode().strip().removeprefix("fatal: ")
        raise MeasurementError(f"commit {commit[:8]} has no package {package.stem}: {why}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return folder / path
