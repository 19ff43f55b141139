"""Takes a shorter way in torch's inference mode, and loses the bias on it; under ``no_grad`` it is right."""

from __future__ import annotations

import functools

import torch

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "equality"


@functools.wraps(recompute_linear_cross_entropy)
def form(hidden, weight, target, bias=None, class_weight=None, **options):
    bias = None if torch.is_inference_mode_enabled() else bias
    return recompute_linear_cross_entropy(hidden, weight, target, bias, class_weight, **options)
