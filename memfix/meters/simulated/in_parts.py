"""Operators of other packages whose results depend on values, as the parts that their CUDA kernels are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_BOXES_PER_WORD = 64


def _suppress_boxes(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """``torchvision.ops.nms``: boxes in the order of their scores, and a bit for each pair that overlaps."""
    count = dets.shape[0]
    order = scores.sort(stable=True, dim=0, descending=True)[1]
    in_order = dets.index_select(0, order).contiguous()
    num_words = count * ((count + _BOXES_PER_WORD - 1) // _BOXES_PER_WORD)
    overlaps = torch.empty(num_words, dtype=torch.int64, device=dets.device)
    is_kept = torch.empty(count, dtype=torch.bool, device=dets.device)
    kept = order.masked_select(is_kept)
    del in_order, overlaps  # they are alive until the end
    return kept


PARTS: dict[str, Callable[..., Any]] = {"torchvision.nms": _suppress_boxes}
"""The name of an operator -> a function that runs its parts."""
