"""What a compiler says of a kernel that it does not take."""

from __future__ import annotations

from ..meters.timeline import Line


class Refused(Exception):
    """``said`` in the compiler's own words, and the ``line`` where it names one."""

    def __init__(self, said: str, line: Line | None = None) -> None:
        super().__init__(said)
        self.said, self.line = said, line
