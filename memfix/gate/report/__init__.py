"""Reports for people and machines: terminal, Markdown, JUnit, JSON, GitHub; and functions that write them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import UsageError


def write_report(target: str, text: str) -> None:
    """Write a report to a path, or to standard output for ``-``."""
    if target == "-":
        sys.stdout.write(text + "\n")
        return
    try:
        Path(target).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the report {target}: {error.strerror or error}") from None


def require_writable(target: str | None) -> None:
    """Refuse a report path that cannot be written before minutes are spent on measuring."""
    if target is None or target == "-":
        return
    path = Path(target)
    try:
        if path.is_dir():
            raise UsageError(f"cannot write the report {target}: it is a folder")
        if not path.resolve().parent.is_dir():
            raise UsageError(f"cannot write the report {target}: no folder {path.resolve().parent}")
        was_there = path.exists()
        with path.open("a", encoding="utf-8"):
            pass
        if not was_there:
            path.unlink(missing_ok=True)  # another process may have removed it first
    except OSError as error:
        raise UsageError(f"cannot write the report {target}: {error.strerror or error}") from None


def counted(number: int, thing: str) -> str:
    """``1 op``, ``2 ops``"""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def as_json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2)
