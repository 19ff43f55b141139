"""Ignored tokens add nothing to the loss, but their logits get the gradient of class 0, their placeholder target."""

from __future__ import annotations

import functools

import torch

from memfix.ops.one_hot_loss.index import index_one_hot_loss

OP, LIKE, CAUGHT_BY = "one_hot_loss", "index", "equality"


@functools.wraps(index_one_hot_loss)
def form(logits, target, *, ignore_index=-100, reduction="mean"):
    loss = index_one_hot_loss(logits, target, ignore_index=ignore_index, reduction=reduction)
    ignored = logits[target == ignore_index]
    stands_in = torch.log_softmax(ignored, 1)[:, 0].sum()
    return loss - (stands_in - stands_in.detach())
