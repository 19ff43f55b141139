"""A commit of the checkout that a package lies in: what is compared with."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ..errors import MemfixError, UsageError

_NAMED = 3
_SHORT = 12


class NotInGit(UsageError):
    """A package that no checkout has: it was installed."""


@dataclass(frozen=True)
class Commit:
    """``ref`` is what the user called it."""

    root: Path
    commit: str
    ref: str

    @classmethod
    def of(cls, ref: str, package: Path) -> Self:
        """``package`` is the folder, or the only file, of the working tree's package."""
        name = package.stem
        try:
            root = Path(git(package.parent, "rev-parse", "--show-toplevel").strip())
        except UsageError as error:
            raise NotInGit(f"--base needs a git checkout of {name}, and {package.parent} is none: {error}") from None
        if not git(root, "ls-files", "--", str(package.resolve())):
            raise NotInGit(f"--base needs a git checkout of {name}; the checkout {root} does not track {package}")
        try:
            commit = git(root, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}").strip()
        except UsageError:
            if git(root, "rev-parse", "--is-shallow-repository").strip() == "true":
                raise MemfixError(
                    f"--base: {root} is a shallow clone without the commit {ref!r}; "
                    "run git fetch --unshallow, or check out with fetch-depth: 0"
                ) from None
            raise UsageError(f"--base: no commit {ref!r} in {root}; fetch it, or name another") from None
        return cls(root, commit, ref[:_SHORT] if ref == commit else ref)

    def notes(self, *judged: str) -> list[str]:
        """What a reader must know of the tree that is judged: these paths of it, without their bytecode."""
        changed = git(self.root, "status", "--porcelain", "--", *judged, ":(exclude)*__pycache__*").splitlines()
        if not changed:
            return []
        names = ", ".join(line[3:] for line in changed[:_NAMED]) + (", ..." if len(changed) > _NAMED else "")
        return [f"the working tree has uncommitted changes, and they are judged too: {names}"]

    def file(self, path: str) -> str | None:
        try:
            return git(self.root, "show", f"{self.commit}:{path}")
        except UsageError:
            return None


def git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, encoding="utf-8", check=True)
    except FileNotFoundError:
        raise MemfixError("--base needs git, and there is none on the PATH; install git") from None
    except subprocess.CalledProcessError as error:
        raise UsageError(f"git {' '.join(arguments[:2])}: {error.stderr.strip() or 'failed'}") from None
    return done.stdout
