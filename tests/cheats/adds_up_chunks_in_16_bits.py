"""Lets autograd sum the chunks' gradients of the weight in 16 bits, so that every chunk rounds the whole sum."""

from __future__ import annotations

import functools

import torch

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "equality"


@functools.wraps(recompute_linear_cross_entropy)
def form(hidden, weight, target, bias=None, class_weight=None, **options):
    rows_per_chunk, reduction = max(1, options.pop("rows_per_chunk") // 8), options.pop("reduction")
    losses = [
        recompute_linear_cross_entropy(rows, weight, targets, bias, class_weight, reduction="none", **options)
        for rows, targets in zip(hidden.split(rows_per_chunk), target.split(rows_per_chunk), strict=True)
    ]
    loss = torch.cat(losses)
    if reduction == "none":
        return loss
    wide = torch.promote_types(loss.dtype, torch.float32)
    if reduction == "sum":
        return loss.sum(dtype=wide).to(loss.dtype)
    counts = target != options["ignore_index"]
    if class_weight is not None and options["z_loss"]:  # two means with two divisors: stay honest here
        return recompute_linear_cross_entropy(hidden, weight, target, bias, class_weight, **options)
    shares = counts if class_weight is None else class_weight[target.where(counts, 0)].where(counts, 0)
    return (loss.sum(dtype=wide) / shares.sum(dtype=wide)).to(loss.dtype)


def shows_in(case):
    return "float16" in case.dtype
