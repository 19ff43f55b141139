"""What the claims of this report are judged by: functions from what was measured to what was found."""

from __future__ import annotations

from ...claims import Check
from . import knobs, on_a_gpu, transitions, values
from .evidence import Evidence

__all__ = ["CHECKS", "Evidence"]

CHECKS: dict[str, Check] = {**transitions.CHECKS, **knobs.CHECKS, **values.CHECKS, **on_a_gpu.CHECKS}
