"""Repositories of one commit, for what is compared with another."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def commit_all() -> Callable[[Path], None]:
    """Makes a folder a repository whose branch main is what lies there now."""

    def commit_all(folder: Path) -> None:
        identity = ["-c", "user.name=memfix", "-c", "user.email=memfix@example.org", "-c", "commit.gpgsign=false"]
        for arguments in (
            ["init", "--quiet", "--initial-branch=main"],
            ["add", "--all"],
            ["commit", "--quiet", "--message", "base"],
        ):
            subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)

    return commit_all
