"""What a command left behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ended:
    exit_code: Any
    out: str
    err: str
