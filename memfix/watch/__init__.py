"""``memfix.watch()``: a training loop's real peaks by stage beside a prediction, and what was alive when it failed."""

from __future__ import annotations

from .report import Highest, WatchReport
from .watching import Watch, watch

__all__ = ["Highest", "Watch", "WatchReport", "watch"]
