"""A commit of the git checkout that holds a package: the base that a change is compared with."""

from __future__ import annotations

import os
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ..errors import MeasurementError, MemfixError, UsageError

_NAMED = 3
_SHORT = 12


class NoBase(UsageError):
    """The package's checkout has no such commit."""


class NotInGit(NoBase):
    """The package is in no git checkout: it was installed."""


@dataclass(frozen=True)
class Commit:
    """One commit of the checkout ``root``. ``ref`` is the user's name for it."""

    root: Path
    commit: str
    ref: str

    @classmethod
    def of(cls, ref: str, package: Path, *, option: str = "--base", may_be_empty: bool = False) -> Self:
        """``package`` is the folder, or the only file, of the working tree's package. Errors name the ``option``.

        ``may_be_empty``: the HEAD of a repository without any commit stands for no files.
        """
        name = package.stem
        try:
            root = Path(git(package.parent, "rev-parse", "--show-toplevel").strip())
        except UsageError as error:
            raise NotInGit(f"{option} needs a git checkout of {name}, and {package.parent} is none: {error}") from None
        if not git(root, "ls-files", "--", str(package.resolve())):
            raise NotInGit(f"{option} needs a git checkout of {name}; the checkout {root} does not track {package}")
        try:
            commit = git(root, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}").strip()
        except UsageError:
            if may_be_empty and ref == "HEAD":
                return cls(root, git(root, "hash-object", "-t", "tree", "-w", os.devnull).strip(), ref)
            if git(root, "rev-parse", "--is-shallow-repository").strip() == "true":
                raise MemfixError(
                    f"{option}: {root} is a shallow clone without the commit {ref!r}; "
                    "run git fetch --unshallow, or check out with fetch-depth: 0"
                ) from None
            raise NoBase(f"{option}: no commit {ref!r} in {root}; fetch it, or name another") from None
        return cls(root, commit, ref[:_SHORT] if ref == commit else ref)

    def notes(self, *judged: str) -> list[str]:
        """Return a note about uncommitted changes to the ``judged`` paths, except bytecode, if there are any."""
        changed = git(self.root, "status", "--porcelain", "--", *judged, ":(exclude)*__pycache__*").splitlines()
        if not changed:
            return []
        names = ", ".join(line[3:] for line in changed[:_NAMED]) + (", ..." if len(changed) > _NAMED else "")
        return [f"the working tree has uncommitted changes, and they are judged too: {names}"]

    def changed_files(self) -> dict[Path, str]:
        """Return, by path, the names from the root of files that differ in the working tree or are untracked."""
        differ = git(self.root, "diff", "--name-only", "--no-renames", "-z", self.commit, "--")
        new = git(self.root, "ls-files", "--others", "--exclude-standard", "-z")
        return {(self.root / name).resolve(): name for name in f"{differ}{new}".split("\0") if name}

    def file(self, path: str) -> str | None:
        """Return the text of a file at this commit; None where it has no such file."""
        try:
            return git(self.root, "show", f"{self.commit}:{path}")
        except UsageError:
            return None


def is_tracked(root: Path, path: Path | None) -> bool:
    """Whether a package is part of the checkout ``root``, and not only installed there, as in ``.venv``."""
    inside = path is not None and path.is_relative_to(root.resolve())
    return inside and bool(git(root, "ls-files", "--", str(path)))


def export_package(root: Path, commit: str, package: Path, folder: Path) -> Path:
    """Write ``package`` as it was at a commit of the checkout ``root`` into ``folder``; return its path there."""
    path, archive = package.resolve().relative_to(root.resolve()).as_posix(), folder / "package.tar"
    try:
        git(root, "archive", "--format=tar", f"--output={archive}", commit, path)
    except UsageError as error:
        raise MeasurementError(f"commit {commit[:8]} has no package {package.stem}: {error}") from None
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    archive.unlink()
    return folder / path


def git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, encoding="utf-8", check=True)
    except FileNotFoundError:
        raise MemfixError("--base and --changed need git, and there is none on the PATH; install git") from None
    except subprocess.CalledProcessError as error:
        raise UsageError(f"git {' '.join(arguments[:2])}: {error.stderr.strip() or 'failed'}") from None
    return done.stdout
