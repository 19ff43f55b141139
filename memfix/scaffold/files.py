"""Writes the files of a command, after checking that none of them exists, unless overwriting is forced."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..atomic_write import write_whole
from ..errors import UsageError


def refuse_files_that_exist(paths: list[Path], force: bool) -> None:
    there = [str(path) for path in paths if path.exists()]
    if there and not force:
        raise UsageError(f"{', '.join(there)} exists already; --force overwrites it")


def write_files(files: Mapping[Path, str]) -> None:
    for path, text in files.items():
        write_whole(path, text, "the file")
