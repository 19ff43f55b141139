"""What operators on lists of tensors take and give back."""

from __future__ import annotations

import pytest
import torch
from rules_on_meta import hidden, meta

aten = torch.ops.aten
bf16 = torch.bfloat16


# ---------------------------------------------------------------- as measured on an H200
def test_norms_of_gradients_hide_what_an_h200_shows() -> None:
    assert hidden(aten._foreach_norm.Scalar, [meta(4096, 4096)] * 8, 2) == [8192]
    of_a_gpt = [meta(32_768, 1024, dtype=bf16), *[meta(1024, dtype=bf16)] * 62]
    assert hidden(aten._foreach_norm.Scalar, of_a_gpt, 2.0) == [129_024]


# ---------------------------------------------------------------- chunks
def test_one_element_more_is_one_chunk_more_for_every_tensor() -> None:
    assert hidden(aten._foreach_norm.Scalar, [meta(65_536), meta(3)], 1) == [8]
    assert hidden(aten._foreach_norm.Scalar, [meta(65_537), meta(3)], 1) == [16]
    assert hidden(aten._foreach_max.default, [meta(65_537, dtype=bf16), meta(3, dtype=bf16)]) == [8]


def test_norms_are_summed_in_the_dtype_they_are_asked_for() -> None:
    assert hidden(aten._foreach_norm.Scalar, [meta(10)], 2, torch.float64) == [8]


def test_the_norm_of_an_empty_tensor_is_made_twice() -> None:
    assert hidden(aten._foreach_norm.Scalar, [meta(10), meta(0)], 2) == [8, 4]


# ---------------------------------------------------------------- lists that are not alike
@pytest.mark.parametrize("order", [0, 3])
def test_other_norms_are_taken_one_by_one(order: int) -> None:
    """The first of two takes 516 bytes while the second result, four bytes, is still to come."""
    assert hidden(aten._foreach_norm.Scalar, [meta(1 << 20), meta(10)], order) == [512]
    assert hidden(aten._foreach_norm.Scalar, [meta(10), meta(1 << 20)], order) == [516]


def test_tensors_of_two_dtypes_or_with_gaps_are_reduced_one_by_one() -> None:
    assert hidden(aten._foreach_norm.Scalar, [meta(10), meta(10, dtype=bf16)], 2) == []
    assert hidden(aten._foreach_max.default, [meta(10, 4)[:, ::2], meta(3)]) == [76]


# ---------------------------------------------------------------- elementwise
def test_elementwise_lists_and_fused_optimizers_hide_nothing() -> None:
    alike, mixed = [meta(10), meta(20)], [meta(10), meta(20, dtype=bf16)]
    for tensors in (alike, mixed):
        assert hidden(aten._foreach_add.List, tensors, tensors) == []
        assert hidden(aten._foreach_mul_.Tensor, tensors, meta()) == []
    assert hidden(aten._fused_adamw_.default, alike, alike, alike, alike, [], alike) == []
    assert hidden(aten._amp_foreach_non_finite_check_and_unscale_.default, alike, meta(1), meta(1)) == []
