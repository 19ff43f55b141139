"""Files that are never half there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from .errors import UsageError


def write_whole(path: Path, content: str | bytes, what: str) -> None:
    """Write beside ``path``, then rename over it. ``what`` is the file's name in an error: ``the lock file``."""
    data = content.encode() if isinstance(content, str) else content
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".memfix-", delete=False) as file:
            temporary = file.name
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        raise UsageError(f"cannot write {what} {path}: {error.strerror or error}") from None
