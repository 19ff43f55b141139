"""Progress messages: a long computation calls ``say`` with what it does now."""

from __future__ import annotations

from collections.abc import Callable

Say = Callable[[str], None]


def silent(doing: str) -> None:
    """Ignore a progress message."""
