"""Write files atomically, so that no reader finds half of one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from .errors import UsageError


def write_whole(path: Path, content: str | bytes | Callable[[IO[bytes]], object], what: str) -> None:
    """Write a temporary file beside ``path``, then rename it over ``path``, or over a link's target. ``what`` names the
    file in an error: ``the lock file``.

    Content that is too large to be in memory twice is given as a function that writes it to an open file.
    """
    temporary, target = None, Path(os.path.realpath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".memfix-", delete=False) as file:
            temporary = file.name
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        if not isinstance(error, OSError):
            raise
        raise UsageError(f"cannot write {what} {path}: {error.strerror or error}") from None
