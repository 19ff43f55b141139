"""Keep compiled kernels in the user's cache, so that a new process need not compile them again."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from ..atomic_write import write_whole
from ..errors import UsageError


def path_of(kind: str, suffix: str, *made_of: str) -> Path:
    """The path of a binary in the cache, by a hash of what it is ``made_of``: sources, compiler and options."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memfix"
    return cache / f"{kind}-{hashlib.sha256(chr(0).join(made_of).encode()).hexdigest()[:32]}{suffix}"


def keep(path: Path, binary: bytes) -> None:
    """Write a binary into the cache. If the cache is not writable, do nothing."""
    with contextlib.suppress(UsageError):
        write_whole(path, binary, "the compiled kernel")
