"""``memfix.watch()``: measure a training loop's peaks by stage, beside a prediction, and explain failed allocations."""

from __future__ import annotations

from .report import Highest, WatchReport
from .watching import Watch, watch

__all__ = ["Highest", "Watch", "WatchReport", "watch"]
