"""Locate the line of a finding in the repository, in the form that code hosts want."""

from __future__ import annotations

import os
from pathlib import Path


def place_in_repository(source: str) -> tuple[str, int] | None:
    """Return the path from the repository's root, and the line, of ``loss.py:41``; None for a line elsewhere."""
    name, _, line = source.rpartition(":")
    root, path = repository_root(), Path(name).resolve()
    if not (name and line.isdecimal() and path.is_file() and path.is_relative_to(root)):
        return None
    return path.relative_to(root).as_posix(), int(line)


def repository_root() -> Path:
    """GitHub's workspace, or the folder with ``.git`` in or above the working directory, or else that directory."""
    here = Path.cwd().resolve()
    if workspace := os.environ.get("GITHUB_WORKSPACE"):
        return Path(workspace).resolve()
    return next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)
