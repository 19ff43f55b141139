"""What the claims of this report are judged by: functions from what was measured to what was found."""

from __future__ import annotations

from ...claims import Check, Found
from . import loss_memory, loss_values, model_memory, on_a_gpu, rope
from .evidence import Evidence

__all__ = ["CHECKS", "Evidence"]


def two_bugs_both_fixed(evidence: Evidence) -> Found:
    """LOG-57: the loss in training, positions in 16 bits, and the tables that were taken for parameters."""
    loss = loss_memory.one_chunk_at_a_time(evidence)
    positions = rope.frequencies_keep_their_dtype(evidence)
    tables = model_memory.parameters_and_tables(evidence)
    still_there = [found for found in (loss, positions, tables) if not found.holds]
    figures: dict[str, int | str] = {
        "still_there": len(still_there),
        "held": loss.figures["held"],
        "distinct": positions.figures["distinct"],
        "tables": tables.figures["tables"],
    }
    return Found(not still_there, "LOG-12, LOG-27 and LOG-29", figures)


CHECKS: dict[str, Check] = {
    **loss_memory.CHECKS,
    **loss_values.CHECKS,
    **rope.CHECKS,
    **model_memory.CHECKS,
    **on_a_gpu.CHECKS,
    two_bugs_both_fixed.__name__: two_bugs_both_fixed,
}
