"""Compiled kernels, kept in the user's cache: every process would compile them anew."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from ..atomic_write import write_whole
from ..errors import UsageError


def path_of(kind: str, suffix: str, *made_of: str) -> Path:
    """Where the binary is kept that is made of these: sources, compiler and options."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memfix"
    return cache / f"{kind}-{hashlib.sha256(chr(0).join(made_of).encode()).hexdigest()[:32]}{suffix}"


def keep(path: Path, binary: bytes) -> None:
    """Nothing is kept in a home that cannot be written to."""
    with contextlib.suppress(UsageError):
        write_whole(path, binary, "the compiled kernel")
