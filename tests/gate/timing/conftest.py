"""Repositories of one commit, for what is compared with another, and a clock that no other work disturbs."""

from __future__ import annotations

import shutil
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


@pytest.fixture
def clock_of_calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for ``PYTHONPATH``: programs that have it there count calls where others read seconds."""
    folder = tmp_path_factory.mktemp("clock")
    shutil.copy(Path(__file__).with_name("clock_of_calls.py"), folder / "sitecustomize.py")
    return folder
