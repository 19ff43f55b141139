"""What reductions take and give back: the partial results of blocks, casts, and pieces of what is too large."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rules_on_meta import hidden, meta

from memfix.meters.simulated.workspace import NoRule

aten = torch.ops.aten
bf16, f16, f64 = torch.bfloat16, torch.float16, torch.float64
TALL = (65_536, 8192)


# ---------------------------------------------------------------- as measured on an H200
@pytest.mark.parametrize(
    ("operator", "args", "measured"),
    [
        (aten.sum.dim_IntList, (meta(*TALL, dtype=bf16), [0]), 268_435_712),
        (aten.sum.default, (meta(*TALL, dtype=bf16),), 16_388),
        (aten.mean.dim, (meta(65_536, 4096), [0]), 138_412_160),
        (aten.sum.dim_IntList, (meta(4_194_304, 64, dtype=bf16), [0]), 34_603_012),
        (aten.sum.dim_IntList, (meta(2048, 4, 3072, dtype=bf16), [0, 1], True), 138_412_128),
        (aten.sum.dim_IntList, (meta(dtype=bf16).expand(16_384, 2048), [0], True), 2_359_552),
        (aten.sum.dim_IntList, (meta(dtype=bf16).expand(8192, 1024), [0], True), 2_228_352),
        (aten.sum.dim_IntList, (meta(16_384, 8192, dtype=f16), [0], True), 138_412_288),
        (aten.sum.default, (meta(2, 4096, 16, 64, dtype=bf16).transpose(1, 2),), 2116),
        (aten.sum.default, (meta(1, 2048, 8, 128, 128),), 8196),
        (aten.sum.default, (meta(16_384, 64, dtype=bf16),), 516),
        (aten.mean.default, (meta(8192, 4096),), 2116),
        (aten.argmax.default, (meta(*TALL, dtype=bf16), 0), 1_073_742_080),
        (aten.argmax.default, (meta(*TALL, dtype=bf16),), 65_540),
        (aten.var.correction, (meta(*TALL, dtype=bf16), [0]), 1_073_742_080),
        (aten.linalg_vector_norm.default, (meta(*TALL, dtype=bf16),), 16_388),
        (aten.sum.default, (meta(*TALL, dtype=torch.bool),), 4_294_983_684),
    ],
    ids=str,
)
def test_a_reduction_hides_what_an_h200_shows(operator: Any, args: tuple[Any, ...], measured: int) -> None:
    assert sum(hidden(operator, *args)) == measured


@pytest.mark.parametrize("operator", [aten.sum.IntList_out, aten.mean.out, aten.nansum.out])
def test_a_sum_into_another_dtype_is_cast_first(operator: Any) -> None:
    """Measured on an H200 for sum: 3,920,000 bytes."""
    assert sum(hidden(operator, meta(700, 700), [0], out=meta(700, dtype=f64))) == 700 * 700 * 8


# ---------------------------------------------------------------- what partial results are kept in
@pytest.mark.parametrize(
    ("operator", "dtype", "bytes_each"),
    [
        (aten.sum.default, f16, 4),
        (aten.sum.default, f64, 8),
        (aten.sum.default, torch.complex64, 8),
        (aten.prod.default, bf16, 4),
        (aten.nansum.default, f16, 4),
        (aten.linalg_vector_norm.default, torch.complex64, 4),
        (aten.linalg_vector_norm.default, f16, 4),
        (aten.var.correction, torch.float32, 16),
        (aten.std_mean.correction, bf16, 16),
        (aten.var.correction, f64, 32),
        (aten.amax.default, bf16, 2),
        (aten.max.default, f64, 8),
        (aten.aminmax.default, f16, 4),
        (aten.argmin.default, torch.int8, 16),
        (aten.any.default, torch.int32, 4),
        (aten.all.default, torch.bool, 1),
    ],
    ids=str,
)
def test_each_block_keeps_one_accumulator(operator: Any, dtype: torch.dtype, bytes_each: int) -> None:
    """2^20 values: 128 blocks."""
    assert hidden(operator, meta(1 << 20, dtype=dtype)) == [128 * bytes_each, 4]


def test_complex128_runs_in_smaller_blocks() -> None:
    """256 threads, so twice the values for each, and 1,056 blocks would fit the GPU."""
    assert hidden(aten.sum.default, meta(1 << 20, dtype=torch.complex128)) == [256 * 16, 4]


def test_the_maximum_along_an_axis_keeps_its_index() -> None:
    assert hidden(aten.max.dim, meta(1 << 20), 0) == [128 * 16, 4]
    assert hidden(aten.amax.default, meta(1 << 20), [0]) == [128 * 4, 4]


def test_rows_that_start_off_the_vector_are_read_one_by_one() -> None:
    """1,022 outputs would be read two at a time, but every row of 1,023 starts on an odd element for half of them."""
    even, odd = meta(65_536, 1024)[:, :1022], meta(65_536, 1023)[:, :1022]
    assert hidden(aten.sum.dim_IntList, even, [0]) != hidden(aten.sum.dim_IntList, odd, [0])
    assert hidden(aten.sum.dim_IntList, even, [0])[0] % (4 * 1022 * 32 * 2) == 0


# ---------------------------------------------------------------- casts and copies before the reduction
def test_a_sum_in_a_wider_dtype_casts_first() -> None:
    assert hidden(aten.sum.default, meta(100), dtype=f64) == [800]
    assert hidden(aten.sum.default, meta(100, dtype=bf16), dtype=f64) == [800]
    assert hidden(aten.sum.default, meta(100, dtype=torch.int32), dtype=torch.int32) == []


def test_half_precision_is_summed_to_float32_without_a_cast() -> None:
    assert hidden(aten.sum.default, meta(100, dtype=bf16), dtype=torch.float32) == []
    assert hidden(aten.linalg_vector_norm.default, meta(100, dtype=f16), 2, dtype=torch.float32) == []


def test_the_largest_of_all_is_looked_for_in_a_contiguous_copy() -> None:
    assert hidden(aten.max.default, meta(30, 20).t()) == [2400]
    assert hidden(aten.amax.default, meta(30, 20).t()) == []


def test_the_index_of_the_largest_of_all_needs_one_axis() -> None:
    assert hidden(aten.argmax.default, meta(30, 20)) == []
    assert hidden(aten.argmax.default, meta(30, 20).t()) == [2400]
    assert hidden(aten.argmax.default, meta(30, 40)[:, ::2]) == []  # one stride goes through
    assert hidden(aten.argmax.default, meta(1, 30), 0) == []


def test_counting_makes_a_mask_and_casts_it() -> None:
    assert hidden(aten.count_nonzero.dim_IntList, meta(100), [0]) == [100, 800]
    assert hidden(aten.count_nonzero.dim_IntList, meta(100, dtype=torch.bool), [0]) == [800]


def test_a_trace_sums_the_diagonal() -> None:
    assert hidden(aten.trace.default, meta(100, 100)) == []
    assert hidden(aten.trace.default, meta(100, 100, dtype=torch.int32)) == [800]


def test_a_norm_over_axes_of_one_is_an_absolute_value() -> None:
    assert hidden(aten.linalg_vector_norm.default, meta(100, 1), 2, [1]) == []
    assert hidden(aten.linalg_vector_norm.default, meta(100, 1, dtype=f16), 2, [1], False, dtype=f64) == [800]
    assert hidden(aten.linalg_vector_norm.default, meta(100, 1, dtype=torch.complex64), 2, [1]) == [800]


def test_one_number_is_true_or_not_by_a_cast() -> None:
    assert hidden(aten.any.default, meta(1)) == [1]
    assert hidden(aten.any.default, meta(1, dtype=torch.bool)) == []


def test_equality_is_a_mask() -> None:
    assert hidden(aten.equal.default, meta(30, 20), meta(30, 20)) == [600, 1]
    assert hidden(aten.equal.default, meta(30, 20), meta(20, 30)) == []


def test_renorm_keeps_norms_and_in_half_precision_factors() -> None:
    assert hidden(aten.renorm.default, meta(10, 100), 2, 0, 1.0) == [40]
    assert hidden(aten.renorm.default, meta(10, 100, dtype=f16), 2, 0, 1.0) == [40, 20]


def test_the_variance_of_complex_numbers_is_taken_of_both_parts() -> None:
    complex_ = meta(1024, 16, dtype=torch.complex64)
    assert hidden(aten.var.correction, complex_, [0]) == [64, 64]
    assert hidden(aten.var_mean.correction, complex_, [0]) == [64] * 4


# ---------------------------------------------------------------- membership
def test_few_test_elements_are_compared_with_all_at_once() -> None:
    ids, stops = meta(4, 100, dtype=torch.int64), meta(3, dtype=torch.int64)
    assert hidden(aten.isin.Tensor_Tensor, ids, stops) == [4 * 100 * 3, 4 * 100]
    assert hidden(aten.isin.Tensor_Tensor, ids, meta(0, dtype=torch.int64)) == []


def test_many_test_elements_are_sorted_which_is_not_known() -> None:
    with pytest.raises(NoRule, match=r"^isin of 100 test elements, which are sorted$"):
        hidden(aten.isin.Tensor_Tensor, meta(400), meta(100))


# ---------------------------------------------------------------- pieces
def test_what_exceeds_32_bits_is_reduced_in_pieces() -> None:
    """2^31 values of two bytes: halves of 2^30, each 1,024 threads' worth of 8,192 blocks, and the sum so far."""
    assert hidden(aten.sum.default, meta(1 << 31, dtype=bf16)) == [4, 8192 * 4, 4]
    # float32 accumulates in the result itself
    assert hidden(aten.sum.default, meta(1 << 31)) == [4096 * 4, 4]
    assert hidden(aten.sum.default, meta(1 << 31, dtype=bf16), dtype=torch.float32) == [8192 * 4, 4]


def test_one_element_less_is_one_piece() -> None:
    assert hidden(aten.sum.default, meta((1 << 30) - 1, dtype=bf16)) == [8192 * 4, 4]
    assert hidden(aten.sum.default, meta(1 << 30, dtype=bf16)) == [8192 * 4, 4]  # 1 + 2 (2^30 - 1) bytes still fit
    assert hidden(aten.sum.default, meta((1 << 30) + 1, dtype=bf16))[0] == 4


def test_pieces_of_an_argmax_hand_over_values_and_indices() -> None:
    assert hidden(aten.argmax.default, meta(1 << 20, 4096, dtype=bf16), 1) == [(1 << 20) * 16]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_norm_of_complex32_is_not_known() -> None:
    with pytest.raises(NoRule, match=r"^a norm of complex32$"):
        hidden(aten.linalg_vector_norm.default, meta(100, dtype=torch.complex32))
