"""Read and write the lock: exact bytes of the last accepted commit, one entry on each line, so that diffs are readable.

An empty line separates entries, so that git can merge two branches that change neighbouring ones. Every entry ends in
the word ``bytes``, so that a file cut off within a number is noticed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ..atomic_write import write_whole
from ..errors import LockConflict, LockError

Key = tuple[str, str, str, str]
"""Op, form, case or variant, phase."""

HEADER = (
    "# memfix lock 1: requested bytes above the inputs, meter simulated, GPU H200. Change it with memfix gate --update."
)
_PHASES = ("forward", "held", "saved", "results", "train", "kept")
"""The order of the entries of one case."""
_CONFLICT = ("<<<<<<<", "=======", ">>>>>>>", "|||||||")
_LINE = re.compile(rf"(\w+)/(\w+) \[([\w-]+(?:=.+)?), ({'|'.join(_PHASES)})\] (0|[1-9][0-9]*) bytes")


def spelled(key: Key) -> str:
    op, form, case, phase = key
    return f"{op}/{form} [{case}, {phase}]"


def read_lock(path: Path) -> dict[Key, int]:
    """Return the entries of a lock file. A missing file is an empty lock."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise LockError(f"{path}: the lock file cannot be read: {error}") from None
    return parse_lock(text, str(path))


def parse_lock(text: str, path: str) -> dict[Key, int]:
    """Return the entries in the text of a lock file; errors name its ``path``."""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith(_CONFLICT):
            raise LockConflict(
                f"{path}:{number}: the lock file has a merge conflict; run memfix gate --update for all ops, which "
                "writes today's bytes, or take one side (git checkout --ours or --theirs) and then run it"
            )
    if not text.startswith("# memfix lock 1:"):
        raise LockError(f"{path}:1: not a memfix lock file of version 1; restore it from git")
    if not text.endswith("\n"):
        raise LockError(f"{path}: the lock file is cut short: its last line has no end; restore it from git")
    entries: dict[Key, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line or line.startswith("# "):
            continue
        match = _LINE.fullmatch(line)
        if not match:
            raise LockError(f"{path}:{number}: cannot read {line[:80]!r}; restore the file from git")
        key = (match[1], match[2], match[3], match[4])
        if key in entries:
            raise LockError(f"{path}:{number}: {spelled(key)} is there twice; delete one")
        entries[key] = int(match[5])
    return entries


def write_lock(path: Path, entries: Mapping[Key, int]) -> None:
    """Replace the lock file atomically."""
    ordered = sorted(entries, key=lambda key: (*key[:3], _PHASES.index(key[3])))
    text = "\n\n".join([HEADER, *(f"{spelled(key)} {entries[key]} bytes" for key in ordered)]) + "\n"
    write_whole(path, text, "the lock file")
