"""What CUDA kernels take and give back: the rules, on tensors that only have a shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rules_on_meta import hidden, meta

from memfix.meters.simulated.workspace import NoRule

aten = torch.ops.aten


def strided(rows: int, columns: int) -> torch.Tensor:
    """A gap after every element: neither row- nor column-major."""
    return meta(rows, 2 * columns)[:, ::2]


# ---------------------------------------------------------------- embedding, as measured on an H200
def test_embedding_backward_of_a_transposed_gradient_hides_what_an_h200_shows() -> None:
    grad = meta(2048, 32768, dtype=torch.bfloat16).t()
    ids = meta(32768, dtype=torch.int64)
    assert sum(hidden(aten.embedding_dense_backward.default, grad, ids, 50_000, -1, False)) == 431_089_264


def test_embedding_backward_of_a_batch_hides_what_an_h200_shows() -> None:
    grad = meta(2, 2048, 1024, dtype=torch.bfloat16)
    ids = meta(2, 2048, dtype=torch.int64)
    assert sum(hidden(aten.embedding_dense_backward.default, grad, ids, 32_768, -1, False)) == 18_652_376


def test_few_ids_are_added_without_sorting_them() -> None:
    grad = meta(3072, 1024)
    assert hidden(aten.embedding_dense_backward.default, grad, meta(3072, dtype=torch.int64), 50_000, -1, False) == []
    more = hidden(
        aten.embedding_dense_backward.default, meta(3073, 1024), meta(3073, dtype=torch.int64), 50_000, -1, False
    )
    assert sum(more) == 13_994_456


def test_embedding_gradients_in_float64_are_summed_in_float64() -> None:
    ids = meta(4096, dtype=torch.int64)
    narrow, wide = (
        hidden(aten.embedding_dense_backward.default, meta(4096, 64, dtype=dtype), ids, 50_000, -1, False)
        for dtype in (torch.float32, torch.float64)
    )
    assert (narrow[-1], wide[-1]) == (4505 * 64 * 4, 4505 * 64 * 8)


def test_few_ids_still_need_a_contiguous_gradient() -> None:
    grad = meta(1024, 100).t()
    ids = meta(100, dtype=torch.int64)
    assert hidden(aten.embedding_dense_backward.default, grad, ids, 50_000, -1, False) == [409_600]


# ---------------------------------------------------------------- softmax
def test_softmax_backward_makes_one_temporary_of_full_size() -> None:
    grad, output = meta(64, 1000), meta(64, 1000)
    assert hidden(aten._softmax_backward_data.default, grad, output, -1, torch.float32) == [256_000]


def test_softmax_backward_copies_a_strided_output_too() -> None:
    assert hidden(aten._softmax_backward_data.default, meta(64, 1000), strided(64, 1000), -1, torch.float32) == [
        256_000,
        256_000,
    ]


def test_log_softmax_backward_needs_no_temporary() -> None:
    grad, output = meta(64, 1000), meta(64, 1000)
    assert hidden(aten._log_softmax_backward_data.default, grad, output, -1, torch.float32) == []
    assert hidden(aten._log_softmax_backward_data.default, strided(64, 1000), output, -1, torch.float32) == [256_000]


@pytest.mark.parametrize("operator", [aten._softmax.default, aten._log_softmax.default])
def test_softmax_copies_what_is_not_contiguous(operator: Any) -> None:
    assert hidden(operator, meta(64, 1000), -1, False) == []
    assert hidden(operator, meta(1000, 64).t(), -1, False) == [256_000]


# ---------------------------------------------------------------- matrix products
def test_a_product_takes_row_and_column_major_matrices_as_they_are() -> None:
    assert hidden(aten.mm.default, meta(64, 32), meta(32, 16)) == []
    assert hidden(aten.mm.default, meta(32, 64).t(), meta(16, 32).t()) == []
    assert hidden(aten.mm.default, meta(64, 100)[:, :32], meta(32, 16)) == []


def test_a_product_copies_a_strided_matrix() -> None:
    assert hidden(aten.mm.default, strided(64, 32), meta(32, 16)) == [64 * 32 * 4]
    assert hidden(aten.mm.default, strided(64, 32), strided(32, 16)) == [64 * 32 * 4, 32 * 16 * 4]
    assert hidden(aten.mm.default, strided(2, 32), strided(32, 16).t().t()) == [2 * 32 * 4, 32 * 16 * 4]


def test_the_bias_of_a_product_is_not_copied() -> None:
    assert hidden(aten.addmm.default, strided(64, 16), meta(64, 32), meta(32, 16)) == []
    assert hidden(aten.addmm.default, meta(64, 16), meta(64, 32), strided(32, 16)) == [32 * 16 * 4]


def test_a_batched_product_copies_by_the_last_two_axes() -> None:
    assert hidden(aten.bmm.default, meta(3, 32, 64).transpose(1, 2), meta(3, 32, 16)) == []
    assert hidden(aten.bmm.default, meta(3, 64, 64)[:, :, ::2], meta(3, 32, 16)) == [3 * 64 * 32 * 4]


# ---------------------------------------------------------------- reductions
def test_a_mask_is_cast_to_int64_before_it_is_summed() -> None:
    assert hidden(aten.sum.default, meta(100, dtype=torch.bool)) == [800]


def test_int64_is_summed_as_it_is() -> None:
    assert hidden(aten.sum.default, meta(100, dtype=torch.int64)) == []


def test_a_long_sum_to_one_number_meets_in_partial_results() -> None:
    """2,048 values for each of 512 threads, 16 at the least: 128 blocks, one partial sum each, and a semaphore."""
    assert hidden(aten.sum.default, meta(1 << 20)) == [512, 4]
    assert hidden(aten.sum.default, meta(1 << 20, dtype=torch.float64)) == [1024, 4]
    assert hidden(aten.sum.default, meta(1 << 20, dtype=torch.int64)) == [1024, 4]
    assert hidden(aten.sum.default, meta(1 << 20, dtype=torch.bool)) == [8 << 20, 1024, 4]


def test_a_short_sum_needs_one_block() -> None:
    assert hidden(aten.sum.default, meta(1000)) == []
    assert hidden(aten.sum.dim_IntList, meta(4096, 64), [1]) == []


def test_a_sum_of_nothing_hides_nothing() -> None:
    assert hidden(aten.sum.default, meta(0)) == []
    assert hidden(aten.sum.default, meta()) == []


def test_the_maximum_of_two_tensors_is_no_reduction() -> None:
    long = meta(1 << 20)
    assert hidden(aten.max.other, long, long) == []
    assert hidden(aten.amax.default, long) == [512, 4]


# ---------------------------------------------------------------- the rest
@pytest.mark.parametrize(
    ("operator", "args"),
    [
        (aten.mul.Tensor, (meta(4), meta(4))),
        (aten.view.default, (meta(4), [2, 2])),
        (aten.transpose.int, (strided(4, 4), 0, 1)),
        (aten.cat.default, ([meta(4), meta(4)],)),
        (aten.index_add_.default, (meta(4, 4), 0, meta(4, dtype=torch.int64), meta(4, 4))),
        (aten.clone.default, (strided(4, 4),)),
    ],
    ids=str,
)
def test_pointwise_operators_views_and_direct_writers_hide_nothing(operator: Any, args: tuple[Any, ...]) -> None:
    assert hidden(operator, *args) == []


@pytest.mark.parametrize("operator", [aten._histogramdd_bin_edges.default, aten.quantize_per_tensor.default], ids=str)
def test_an_operator_without_a_rule_is_reported_by_name(operator: Any) -> None:
    with pytest.raises(NoRule, match=rf"^no workspace rule for {operator}$"):
        hidden(operator, meta(1000), 0)
