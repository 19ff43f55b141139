"""One innocent ``.float()`` on the way in."""

from __future__ import annotations

import torch

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "budget"


def form(hidden, weight, target, *, ignore_index=-100, reduction="mean", rows_per_chunk=4096):
    wide = torch.promote_types(hidden.dtype, torch.float32)
    loss = recompute_linear_cross_entropy(
        hidden.to(wide),
        weight.to(wide),
        target,
        ignore_index=ignore_index,
        reduction=reduction,
        rows_per_chunk=rows_per_chunk,
    )
    return loss.to(hidden.dtype)
