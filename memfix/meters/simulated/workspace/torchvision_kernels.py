"""Kernels of torchvision. They were not measured, so their workspace is an estimate."""

from __future__ import annotations

from .rules import Call, Estimated, Range, copies_unless_contiguous, foreign_rule, tensors_in


@foreign_rule(
    *(f"torchvision.{name}" for name in ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool")),
    *(f"torchvision._{name}_backward" for name in ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool")),
)
def _pool_regions(call: Call) -> list[int]:
    """Each kernel writes its result directly, from contiguous arguments."""
    copies = sum(copies_unless_contiguous(*tensors_in(call.args)))
    raise Estimated(f"{call.operator}: assumed to copy only what is not contiguous", Range(0, copies, copies))
