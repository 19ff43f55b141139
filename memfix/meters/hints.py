"""The likely cause of a peak, for common mistakes. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .timeline import Allocation

_LARGE = 0.25  # share of the peak below which a row is not its cause
_MANY = 3


def likely_cause(rows: Sequence[Allocation]) -> str | None:
    """A sentence about the largest row that looks like a known mistake; None if no row does."""
    total = sum(row.bytes for row in rows)
    for row in rows:
        if row.bytes < _LARGE * total:
            return None
        for hint in _HINTS:
            sentence = hint(row)
            if sentence is not None:
                return sentence
    return None


def _chunks_kept(row: Allocation) -> str | None:
    if row.count >= _MANY and "kept for backward" in row.what:
        return (
            f"each of {row.count} passes keeps its {_maker(row)} for backward: the loop saves nothing in training; "
            "recompute it (torch.utils.checkpoint), or compute the gradient in the forward"
        )
    return None


def _optimizer_temporaries(row: Allocation) -> str | None:
    if row.what.startswith(("_foreach_", "_multi_tensor_")):
        return "the optimizer's foreach form makes temporaries as large as all parameters; fused=True makes none"
    return None


def _upcast(row: Allocation) -> str | None:
    if row.what.startswith("_to_copy") and (".float()" in row.code or "float32" in row.code):
        return "a whole tensor is upcast to float32; upcast a chunk at a time, or inside the reduction (dtype=)"
    return None


def _copied(row: Allocation) -> str | None:
    if row.what.startswith("clone"):
        return "a whole tensor is copied into another layout; keep the layout, or copy a chunk at a time"
    return None


def _probabilities_kept(row: Allocation) -> str | None:
    maker = row.what.lstrip("_").startswith(("log_softmax", "softmax", "cross_entropy"))
    if maker and "kept for backward" in row.what:
        return "the (log-)probabilities of all rows are kept for backward; compute the loss a chunk at a time"
    return None


def _accumulated(row: Allocation) -> str | None:
    if row.count >= 2 * _MANY and row.code and row.what != "optimizer state":
        return f"{row.count} results of one line are alive together; write into one buffer, or drop each after use"
    return None


_HINTS: tuple[Callable[[Allocation], str | None], ...] = (
    _chunks_kept,
    _optimizer_temporaries,
    _upcast,
    _copied,
    _probabilities_kept,
    _accumulated,
)


def _maker(row: Allocation) -> str:
    return row.what.split(",")[0].lstrip("_").split(".")[0]
