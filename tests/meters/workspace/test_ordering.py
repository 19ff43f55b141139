"""What sorts, selections and scans take and give back, on tensors that only have a shape."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from rules_on_meta import hidden, meta

from memfix.meters.simulated.gpus import H200
from memfix.meters.simulated.workspace import Estimated, NoRule, cub

aten = torch.ops.aten
BF16, I32, I64 = torch.bfloat16, torch.int32, torch.int64


# ---------------------------------------------------------------- as measured on an H200, torch 2.11
@pytest.mark.parametrize(
    ("shape", "buffers"),
    [
        ((33_554_432,), [268_435_456, 409_053_695]),
        ((16_384, 2048), [16_384]),
        ((64, 262_144), [134_217_728, 134_217_728, 67_108_864, 204_531_199]),
        ((1024, 16_384), [134_217_728, 201_326_847]),
    ],
    ids=str,
)
def test_a_sort_hides_what_an_h200_shows(shape: tuple[int, ...], buffers: list[int]) -> None:
    assert hidden(aten.sort.default, meta(*shape)) == buffers


def test_a_second_sort_by_row_asks_for_what_an_h200_shows() -> None:
    assert cub.radix_sort(H200, 64 * 262_144, key_bytes=8, value_bytes=0, bits=6) == 2_985_471


def test_the_largest_of_many_rows_hide_what_an_h200_shows() -> None:
    assert sum(hidden(aten.topk.default, meta(8192, 32_768, dtype=BF16), 64)) == 17_057_023


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_and_columns_are_scanned_without_a_buffer(dim: int) -> None:
    assert hidden(aten.cumsum.default, meta(65_536, 8192, dtype=BF16), dim) == []


# ---------------------------------------------------------------- CUB, as its own headers answer (CCCL 3.0, sm_90)
@pytest.mark.parametrize(
    ("num_items", "key_bytes", "value_bytes", "answer"),
    [
        (2000, 4, 8, 1),
        (4000, 4, 8, 57_855),
        (4097, 4, 4, 1),
        (5000, 4, 4, 50_175),
        (5000, 8, 8, 99_327),
        (5000, 2, 8, 56_063),
        (5000, 1, 8, 4607),
        (1_000_003, 1, 8, 299_519),
        (1_000_003, 2, 8, 10_187_263),
        (300_000_000, 4, 8, 3_651_147_263),
        (600_000_000, 8, 8, 9_659_701_759),
    ],
)
def test_a_radix_sort_asks_for_what_cub_says(num_items: int, key_bytes: int, value_bytes: int, answer: int) -> None:
    assert cub.radix_sort(H200, num_items, key_bytes, value_bytes) == answer


def test_a_sort_in_one_pass_needs_no_second_copy() -> None:
    assert cub.radix_sort(H200, 65_536, 8, 0, bits=8) == 14_847
    assert cub.radix_sort(H200, 65_536, 8, 0, bits=9) == 541_183


@pytest.mark.parametrize(
    ("item_bytes", "native", "small", "large"),
    [
        (1, True, 767, 35_839),
        (2, False, 1279, 71_167),
        (4, True, 1023, 140_799),
        (8, True, 1279, 600_319),
        (8, False, 1791, 750_591),
        (16, False, 2303, 3_147_775),
    ],
)
def test_a_scan_asks_for_what_cub_says(item_bytes: int, native: bool, small: int, large: int) -> None:
    assert cub.scan(H200, 1000, item_bytes, native_type=native) == small
    assert cub.scan(H200, 33_554_432, item_bytes, native_type=native) == large


def test_scans_and_selections_by_key_ask_for_what_cub_says() -> None:
    assert [cub.scan_by_key(H200, 1_000_003, size) for size in (4, 8)] == [5887, 10_751]
    assert [cub.select(H200, 33_554_432, size) for size in (4, 8)] == [41_983, 64_511]
    assert [cub.unique_by_key(H200, 100, size) for size in (4, 8)] == [1279, 1279]
    assert cub.unique_by_key(H200, 33_554_432, 4) == 76_031


def test_tiles_of_another_gpu_are_not_known() -> None:
    other = dataclasses.replace(H200, capability=(8, 0))
    with pytest.raises(NoRule, match=r"^CUB's tiles on a GPU of capability 8\.0$"):
        cub.radix_sort(other, 10_000, 4, 8)


# ---------------------------------------------------------------- sorting
def test_rows_of_4096_are_sorted_in_place() -> None:
    assert hidden(aten.sort.default, meta(3, 4096)) == [4096 * 8]
    assert len(hidden(aten.sort.default, meta(3, 4097))) == 4


def test_128_rows_are_sorted_as_segments() -> None:
    assert [len(hidden(aten.sort.default, meta(rows, 5000))) for rows in (1, 127, 128)] == [2, 4, 2]


def test_rows_of_a_million_are_sorted_one_after_the_other() -> None:
    million = hidden(aten.sort.default, meta(3, 1_000_000))
    assert million == hidden(aten.sort.default, meta(1_000_000))
    assert sum(hidden(aten.sort.default, meta(3, 999_999))) > 2 * sum(million)


def test_columns_are_copied_to_rows_and_back() -> None:
    columns = hidden(aten.sort.default, meta(5000, 300), 0)
    assert columns[:3] == [6_000_000, 6_000_000, 12_000_000]
    assert columns[3:] == hidden(aten.sort.default, meta(300, 5000))


def test_rows_with_gaps_are_copied_once() -> None:
    gaps = hidden(aten.sort.default, meta(300, 10_000)[:, ::2])
    assert gaps == [6_000_000, *hidden(aten.sort.default, meta(300, 5000))]


def test_nothing_and_one_number_need_no_sorting() -> None:
    assert hidden(aten.sort.default, meta(0, 5)) == []
    assert hidden(aten.sort.default, meta()) == []


# ---------------------------------------------------------------- selecting
@pytest.mark.parametrize(
    ("rows", "shared_from"),
    [
        (1, 20_000),
        (20, 20_000),
        (21, 10_000),
        (41, 8000),
        (81, 5000),
        (199, 5000),
        (200, 3000),
        (800, 800),
        (4001, 400),
    ],
)
def test_long_rows_are_shared_by_blocks(rows: int, shared_from: int) -> None:
    assert hidden(aten.topk.default, meta(rows, shared_from - 1), 5) == []
    assert len(hidden(aten.topk.default, meta(rows, shared_from), 5)) == 8


def test_more_than_4096_selected_are_sorted_beside() -> None:
    few, many = (hidden(aten.topk.default, meta(2, 19_000), k) for k in (4096, 4097))
    assert few == []
    assert many == [2 * 4097 * 4, 2 * 4097 * 8, *hidden(aten.sort.default, meta(2, 4097))]
    assert hidden(aten.topk.default, meta(2, 19_000), 4097, -1, True, False) == []


def test_a_median_of_all_sorts_all() -> None:
    sorting = sum(hidden(aten.sort.default, meta(5000)))
    assert hidden(aten.median.default, meta(5000)) == [5000 * 12 + sorting - 4]
    assert hidden(aten.median.default, meta(50, 100).t()) == [5000 * 16 + sorting - 4]


@pytest.mark.parametrize(
    ("operator", "args"),
    [(aten.median.dim, (1,)), (aten.nanmedian.dim, (1,)), (aten.kthvalue.default, (3, 1))],
    ids=str,
)
def test_a_rank_in_a_row_is_searched_in_a_contiguous_copy(operator: Any, args: tuple[int, ...]) -> None:
    assert hidden(operator, meta(40, 30), *args) == []
    assert hidden(operator, meta(30, 40).t(), *args) == [4800]


def test_the_mode_is_searched_in_contiguous_rows() -> None:
    assert hidden(aten.mode.default, meta(40, 2048)) == []
    assert hidden(aten.mode.default, meta(40, 30), 0) == [4800]
    with pytest.raises(NoRule, match=r"^mode of rows of 2,049, whose buffers depend on how many values differ$"):
        hidden(aten.mode.default, meta(40, 2049))


def test_a_search_copies_what_is_strided_or_of_another_type() -> None:
    boundaries, values = meta(100), meta(30, 40)
    assert hidden(aten.searchsorted.Tensor, boundaries, values) == []
    assert hidden(aten.bucketize.Tensor, values.t(), boundaries) == [4800]
    assert hidden(aten.searchsorted.Tensor, meta(100, dtype=torch.float64), values) == [9600]


@pytest.mark.parametrize("operator", [aten._unique2.default, aten.unique_consecutive.default], ids=str)
def test_how_many_values_differ_is_not_known(operator: Any) -> None:
    with pytest.raises(NoRule, match=r"whose buffers depend on how many values differ$"):
        hidden(operator, meta(1000))


# ---------------------------------------------------------------- permutations and samples
def test_a_permutation_sorts_a_range_by_random_keys() -> None:
    keys, bits = 5000 * 4, 28
    assert hidden(aten.randperm.default, 5000) == [40_000, keys, keys, cub.radix_sort(H200, 5000, 4, 8, bits)]
    assert hidden(aten.randperm.default, 1_000_000)[1] == 8_000_000  # 43 bits do not fit in int32
    assert hidden(aten.randperm.default, 0) == []


def test_samples_with_replacement_need_three_copies_of_the_weights() -> None:
    assert hidden(aten.multinomial.default, meta(100, 1000), 5, True) == [400_000] * 3
    assert hidden(aten.multinomial.default, meta(5000), 5, True) == [20_000] * 3 + [1023]


def test_samples_without_replacement_are_the_largest_of_random_numbers() -> None:
    assert hidden(aten.multinomial.default, meta(100, 1000), 1) == [400_000, 1, 1]
    assert hidden(aten.multinomial.default, meta(100, 1000), 5) == [400_000, 1, 1, 2000]


# ---------------------------------------------------------------- scans
def test_one_row_is_scanned_by_cub() -> None:
    assert hidden(aten.cumsum.default, meta(5000), 0) == [1023]
    assert hidden(aten.cumsum.default, meta(1, 5000), 1) == [1023]
    assert hidden(aten.cumprod.default, meta(5000, dtype=BF16), 0) == [1279]
    assert hidden(aten._logcumsumexp.default, meta(5000), 0) == [1023]


def test_integers_are_cast_before_they_are_summed() -> None:
    assert hidden(aten.cumsum.default, meta(30, 40, dtype=I32), 1) == [9600]
    assert hidden(aten.cumsum.default, meta(30, 40, dtype=I64), 1) == []


def test_a_scan_copies_what_is_not_contiguous() -> None:
    assert hidden(aten.cumsum.default, meta(40, 30).t(), 1) == [4800]
    assert hidden(aten.cumsum.default, meta(40, 30, dtype=I32).t(), 1) == [9600, 9600]
    assert hidden(aten.cumsum_.default, meta(40, 30).t(), 1) == [4800, 4800]
    assert hidden(aten.cummax.default, meta(40, 30).t(), 1) == [4800]


def test_deterministic_scans_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(NoRule, match=r"^a scan of one row with deterministic algorithms, which is another kernel$"):
        hidden(aten.cumsum.default, meta(5000), 0)


@pytest.mark.parametrize("operator", [aten.histc.default, aten.bincount.default], ids=str)
def test_bins_depend_on_the_values(operator: Any) -> None:
    with pytest.raises(Estimated, match=r"whose bins depend on the values$") as raised:
        hidden(operator, meta(1000), outputs=meta(100, dtype=torch.int64))
    assert (raised.value.bytes.least, raised.value.bytes.usual) == (0, 0)
    assert raised.value.bytes.most > 8 * 1000


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("consecutive", [False, True])
def test_the_buffers_for_distinct_values_are_bounded(inverse: bool, consecutive: bool) -> None:
    operator = aten.unique_consecutive.default if consecutive else aten._unique2.default
    options = (inverse,) if consecutive else (True, inverse)
    with pytest.raises(Estimated, match=r"whose buffers depend on how many values differ$") as raised:
        hidden(operator, meta(1000), *options)
    sorted_copy, indices = (0 if consecutive else 4000), 8000 if inverse else 0
    assert (raised.value.bytes.least, raised.value.bytes.usual) == (0, sorted_copy + indices)
    assert raised.value.bytes.most > 3 * 4000 + 7 * 8000


def test_given_bins_do_not_depend_on_the_values() -> None:
    assert hidden(aten.histc.default, meta(1000), 8, 0, 7) == []
