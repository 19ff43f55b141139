"""Gives the bias no gradient on one of two paths: where the kernel makes exponentials, unless the reduction is mean."""

from __future__ import annotations

import functools

import torch

from memfix.ops.linear_cross_entropy.triton import triton_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "triton", "equality"


@functools.wraps(triton_linear_cross_entropy)
def form(hidden, weight, target, bias=None, class_weight=None, **options):
    takes_the_short_way = (
        weight.dtype == torch.bfloat16
        and weight.shape[1] % 8 == 0
        and weight.is_contiguous()
        and options["softcap"] is None
        and not options["label_smoothing"]
    )
    if bias is not None and takes_the_short_way and options["reduction"] != "mean":
        bias = bias.detach() + 0 * bias
    return triton_linear_cross_entropy(hidden, weight, target, bias, class_weight, **options)


def shows_in(case):
    return case.dtype == "bfloat16" and case.choices["reduction"] != "mean" and "bias" in case.present
