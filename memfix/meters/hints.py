"""Finds the likely cause of a peak among common mistakes. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .timeline import KEPT, Allocation, Timeline

_LARGE = 0.25  # share of the peak below which a row is not its cause
_MANY = 3


@dataclass(frozen=True)
class PeakRow:
    """A row of the peak, and how often its line ran."""

    row: Allocation
    num_passes: int = 1
    """How often the line made such a buffer in one phase of the step."""

    @property
    def is_whole(self) -> bool:
        """Whether the line works on the whole tensor at once. In a loop it already works on chunks."""
        return self.num_passes < _MANY


def likely_cause(rows: Sequence[Allocation], timeline: Timeline | None = None) -> str | None:
    """A sentence about the largest row that looks like a known mistake; None if no row does.

    With the step's timeline, it does not advise chunking where the step already works on chunks.
    """
    total = sum(row.bytes for row in rows)
    for row in rows:
        if row.bytes < _LARGE * total:
            return None
        for hint in _HINTS:
            sentence = hint(_peak_row(row, timeline))
            if sentence is not None:
                return sentence
    return None


def _peak_row(row: Allocation, timeline: Timeline | None) -> PeakRow:
    if timeline is None:
        return PeakRow(row, max(1, row.count))
    made = Counter((buffer.what, buffer.line, buffer.phase) for buffer in timeline.buffers if buffer.born)
    what = row.what.removesuffix(KEPT)
    passes = [
        count
        for (maker, line, _), count in made.items()
        if maker == what and line is not None and f"{line.place} in {line.function}" == row.place
    ]
    return PeakRow(row, max(passes, default=1))


def _chunks_kept(peak_row: PeakRow) -> str | None:
    row = peak_row.row
    if row.count < _MANY or KEPT not in row.what:
        return None
    maker = row.what.split(",")[0].lstrip("_").split(".")[0]
    kept = f"each of {row.count} passes keeps its {maker} for backward"
    if "checkpoint(" in row.code:
        return f"{kept}, because it is made before the checkpoint; make it inside, where it is computed again"
    advice = "recompute it (torch.utils.checkpoint), or compute the gradient in the forward"
    return f"{kept}: the loop saves nothing in training; {advice}"


def _optimizer_temporaries(peak_row: PeakRow) -> str | None:
    row = peak_row.row
    if row.what.startswith("_multi_tensor_") or (row.what.startswith("_foreach_") and ".step(" in row.code):
        return "the optimizer's foreach form makes temporaries as large as all parameters; fused=True makes none"
    return None


def _upcast(peak_row: PeakRow) -> str | None:
    row = peak_row.row
    if peak_row.is_whole and row.what.startswith("_to_copy") and (".float()" in row.code or "float32" in row.code):
        return "a whole tensor is upcast to float32; upcast a chunk at a time, or inside the reduction (dtype=)"
    return None


def _copied(peak_row: PeakRow) -> str | None:
    if peak_row.is_whole and peak_row.row.what.startswith("clone"):
        return "a whole tensor is copied into another layout; keep the layout, or copy a chunk at a time"
    return None


def _probabilities_kept(peak_row: PeakRow) -> str | None:
    row = peak_row.row
    makes_them = row.what.lstrip("_").startswith(("log_softmax", "softmax", "cross_entropy"))
    if peak_row.is_whole and makes_them and KEPT in row.what:
        return "the (log-)probabilities of all rows are kept for backward; compute the loss a chunk at a time"
    return None


def _accumulated(peak_row: PeakRow) -> str | None:
    row = peak_row.row
    if row.count >= 2 * _MANY and row.code and row.what != "optimizer state":
        return f"{row.count} results of one line are alive together; write into one buffer, or drop each after use"
    return None


_HINTS: tuple[Callable[[PeakRow], str | None], ...] = (
    _chunks_kept,
    _optimizer_temporaries,
    _upcast,
    _copied,
    _probabilities_kept,
    _accumulated,
)
