"""Finds the target in a one-hot mask of bytes: an eighth of naive's bytes, but as many elements."""

from __future__ import annotations

import functools

import torch

from memfix.ops.one_hot_loss.index import index_one_hot_loss

OP, LIKE, CAUGHT_BY = "one_hot_loss", "index", "budget"


@functools.wraps(index_one_hot_loss)
def form(logits, target, *, ignore_index=-100, reduction="mean"):
    is_target = target.unsqueeze(1) == torch.arange(logits.shape[1], device=target.device)
    column = is_target.to(torch.uint8).argmax(1).where(target != ignore_index, ignore_index)
    return index_one_hot_loss(logits, column, ignore_index=ignore_index, reduction=reduction)
