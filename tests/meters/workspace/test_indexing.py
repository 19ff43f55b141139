"""What reading and writing by index takes and gives back, on tensors that only have a shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rules_on_meta import hidden, meta

from memfix.meters.simulated.gpus import H200
from memfix.meters.simulated.workspace import Call, NoRule, cub, hidden_buffers
from memfix.meters.simulated.workspace.rules import Estimated, Range

aten = torch.ops.aten
BF16, I32, I64 = torch.bfloat16, torch.int32, torch.int64


def ids(*shape: int, dtype: torch.dtype = I64) -> torch.Tensor:
    return meta(*shape, dtype=dtype)


# ---------------------------------------------------------------- as measured on an H200, torch 2.11
def test_an_addition_by_index_hides_what_an_h200_shows() -> None:
    values = meta(1, 2048, dtype=BF16).expand(32_768, 2048)
    buffers = hidden(aten.index_put.default, meta(65_536, 2048, dtype=BF16), [ids(32_768)], values, True)
    assert buffers == [134_217_728, *[262_144] * 4, 537_087]


def test_an_embedding_gradient_hides_what_an_h200_shows() -> None:
    grad = meta(2048, 32_768, dtype=BF16).t()
    buffers = hidden(aten.embedding_dense_backward.default, grad, ids(32_768), 50_000, -1, False)
    assert sum(buffers) == 431_089_264
    assert buffers[-1] == 295_272_448
    assert cub.radix_sort(H200, 32_768, 8, 8) == 549_375


def test_picking_by_a_mask_is_undone_as_by_its_places() -> None:
    mask, grad = meta(6, 7, dtype=torch.bool), meta(20, 8)
    added = hidden(aten.index_put.default, meta(6, 7, 8), [ids(20), ids(20)], grad, True)
    with pytest.raises(Estimated, match=r"^an addition by a mask") as estimated:
        hidden(aten._index_put_impl_.default, meta(6, 7, 8), [mask], grad, True, True)
    assert estimated.value.bytes == Range(sum(added), sum(added), sum(added) + 2 * 20 * 8)
    with pytest.raises(NoRule, match=r"^indexing by a mask, whose buffers depend on the values$"):
        hidden(aten._index_put_impl_.default, meta(6, 7, 8), [mask], grad, True, False)
    with pytest.raises(NoRule, match=r"^an addition of \[8\] by a mask$"):
        hidden(aten._index_put_impl_.default, meta(6, 7), [mask[0]], meta(8), True, True)


# ---------------------------------------------------------------- x[i, j]
def test_indices_that_lie_alike_are_read_as_they_are() -> None:
    assert hidden(aten.index.Tensor, meta(50, 60), [ids(7, 8)]) == []
    assert hidden(aten.index.Tensor, meta(50, 60), [ids(7, 8), ids(7, 8)]) == []
    assert hidden(aten.index.Tensor, meta(50, 60), [ids(8, 7).t(), ids(8, 7).t()]) == []


def test_indices_that_lie_apart_are_copied_where_not_contiguous() -> None:
    assert hidden(aten.index.Tensor, meta(50, 60), [ids(7, 1), ids(1, 8)]) == [448, 448]
    assert hidden(aten.index.Tensor, meta(50, 60), [ids(7, 8), ids(8, 7).t()]) == [448]


def test_int32_indices_are_cast() -> None:
    assert hidden(aten.index.Tensor, meta(50, 60), [None, ids(9, dtype=I32)]) == [72]
    with pytest.raises(NoRule, match=r"^broadcast or strided indices that are not int64$"):
        hidden(aten.index.Tensor, meta(50, 60), [ids(7, 1, dtype=I32), ids(1, 8)])


def test_masks_depend_on_their_values() -> None:
    for operator, rest in ((aten.index.Tensor, ()), (aten.index_put_.default, (meta(),))):
        with pytest.raises(NoRule, match=r"^indexing by a mask, whose buffers depend on the values$"):
            hidden(operator, meta(50), [meta(50, dtype=torch.bool)], *rest)


def test_a_write_by_index_hides_no_more_than_a_read() -> None:
    assert hidden(aten.index_put_.default, meta(50, 60), [ids(9)], meta(9, 60)) == []
    assert hidden(aten.index_put_.default, meta(50, 60), [ids(7, 1), ids(1, 8)], meta(7, 8)) == [448, 448]


# ---------------------------------------------------------------- x[i, j] += y
def added(tensor: torch.Tensor, indices: list[torch.Tensor | None], values: torch.Tensor) -> list[int]:
    return hidden(aten._index_put_impl_.default, tensor, indices, values, True)


def test_few_indices_are_sorted_in_shared_memory() -> None:
    assert added(meta(50, 60), [ids(2304)], meta(2304, 60)) == [2304 * 8] * 4 + [1]
    assert added(meta(50, 60), [ids(2305)], meta(2305, 60))[-1] > 1


def test_256_rows_are_sorted_in_one_pass() -> None:
    assert added(meta(256, 60), [ids(5000)], meta(5000, 60))[-1] < 5000 * 8
    assert added(meta(257, 60), [ids(5000)], meta(5000, 60))[-1] > 2 * 5000 * 8


def test_values_are_made_as_many_as_there_are_places() -> None:
    assert added(meta(50, 60), [ids(9)], meta(60))[0] == 9 * 60 * 4
    assert added(meta(50, 60), [None, ids(9)], meta(9))[0] == 50 * 9 * 4


def test_rows_that_do_not_lie_in_order_are_copied() -> None:
    assert added(meta(60, 50).t(), [ids(9)], meta(9, 60))[0] == 12_000
    assert added(meta(50, 60, 70), [ids(9), None, ids(9)], meta(9, 60))[0] == 840_000
    assert added(meta(50, 60, 70), [ids(9), ids(9), None], meta(9, 70))[0] == 72


# ---------------------------------------------------------------- by axis, by mask
@pytest.mark.parametrize("operator", [aten.index_add_.default, aten.index_copy.default], ids=str)
def test_rows_are_written_directly(operator: Any) -> None:
    assert hidden(operator, meta(50, 60), 0, ids(9), meta(9, 60)) == []


def test_deterministic_writes_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(NoRule, match=r"^scatter_add with deterministic algorithms, which is another kernel$"):
        hidden(aten.scatter_add.default, meta(50, 60), 0, ids(50, 60), meta(50, 60))


def test_a_mean_by_index_counts() -> None:
    tensor, source = meta(50, 60), meta(90, 60)
    assert hidden(aten.index_reduce.default, tensor, 0, ids(90), source, "mean") == [12_000, 21_600]
    assert hidden(aten.index_reduce.default, tensor, 0, ids(90), source, "amax") == []
    places = ids(90, 60)
    assert hidden(aten.scatter_reduce.two, tensor, 0, places, source, "mean") == [12_000, 21_600, 3000]
    without = aten.scatter_reduce.two, (tensor, 0, places, source, "mean"), {"include_self": False}
    assert hidden_buffers(Call(H200, *without, None)) == [12_000, 21_600, 3000]
    assert hidden(aten.scatter_reduce.two, tensor, 0, places, source, "sum") == []


def test_a_masked_scatter_numbers_every_place() -> None:
    tensor, mask = meta(50, 60), meta(50, 60, dtype=torch.bool)
    assert hidden(aten.masked_scatter_.default, tensor, mask, meta(3000)) == [24_000, 1279]
    assert hidden(aten.masked_scatter_.default, tensor, mask[:1], meta(3000)) == [24_000, 3000, 1279]
    assert hidden(aten.masked_scatter_.default, tensor, mask, meta(60, 50).t()) == [24_000, 12_000]


def test_repeats_are_turned_into_ends() -> None:
    repeated = meta(4000, dtype=I64)
    assert hidden(aten.repeat_interleave.Tensor, ids(1000), outputs=repeated) == [8000]
    few = meta(10, dtype=I64)
    assert hidden(aten.repeat_interleave.Tensor, ids(1000), outputs=few) == [8000 + 1279 - 80]
    with pytest.raises(NoRule, match=r"^repeat_interleave, whose result depends on the values$"):
        hidden(aten.repeat_interleave.Tensor, ids(1000))


# ---------------------------------------------------------------- embeddings
def embedding_gradient(num_ids: int, width: int, vocabulary: int, dtype: torch.dtype = BF16) -> int:
    grad = meta(num_ids, width, dtype=dtype)
    return sum(hidden(aten.embedding_dense_backward.default, grad, ids(num_ids), vocabulary, -1, False))


def test_narrow_rows_take_the_most_while_their_ids_are_sorted() -> None:
    sorting = 3 * 32_768 + cub.radix_sort(H200, 4096, 8, 8)
    assert embedding_gradient(4096, 1, 140) == sorting - 140 * 2


def test_a_large_result_outweighs_the_sorting() -> None:
    finding = 4 * 32_768 + 8 + cub.unique_by_key(H200, 4096, 8)
    assert embedding_gradient(4096, 1, 50_000) > finding
    assert embedding_gradient(4096, 8, 3000) == 3 * 32_768 + 2 * 24_000 + 16 + 3409 * 8 + 3409 * 8 * 4


def test_few_long_segments_are_added_by_atomic_operations() -> None:
    num_ids, vocabulary, width = 40_000, 100, 256
    common = 3 * 320_000 + 2 * 800 + 16 + 4100 * 8
    assert embedding_gradient(num_ids, width, vocabulary, torch.float32) == max(
        common + 4100 * 8, 3 * 320_000 + cub.radix_sort(H200, num_ids, 8, 8) - vocabulary * width * 4
    )
    assert embedding_gradient(num_ids, 4096, vocabulary) == common + 4100 * 8 + vocabulary * 4096 * 4
    # a block has at most 1024 threads, and 800 blocks are enough for 132 multiprocessors
    assert embedding_gradient(num_ids, 8192, vocabulary) == common + 4100 * 8192 * 4


def test_ids_counted_by_frequency_are_sorted_however_few() -> None:
    few = meta(100, 9), ids(100), 50, -1
    assert hidden(aten.embedding_dense_backward.default, *few, False) == []
    assert (
        sum(hidden(aten.embedding_dense_backward.default, *few, True)) == 4 * 800 + 2 * 400 + 16 + 60 * 8 + 60 * 9 * 4
    )


def test_transposed_ids_are_made_a_row() -> None:
    assert hidden(aten.embedding.default, meta(50, 60), ids(9, 8)) == []
    assert hidden(aten.embedding.default, meta(50, 60), ids(9, 8).t()) == [576]


def test_bags_of_embeddings() -> None:
    assert hidden(aten._embedding_bag.default, meta(50, 60), ids(90), ids(9)) == []
    assert hidden(aten._embedding_bag.default, meta(50, 60), ids(90, dtype=I32), ids(9)) == [720]
    bag = meta(9, 60).t().contiguous().t(), ids(90), ids(90), ids(9), meta(9, 60), 50, False
    assert hidden(aten._embedding_bag_dense_backward.default, *bag, 2, None) == [2160]
    summed = hidden(aten._embedding_bag_dense_backward.default, *bag, 0, None)
    assert summed == [2160, 720, 720, 720, 8, 400, 400, 8, 59 * 8, 59 * 60 * 4]


def test_masked_select_as_an_operator_is_not_known() -> None:
    with pytest.raises(NoRule, match=r"whose buffers depend on the values$"):
        hidden(aten.masked_select.default, meta(1000), meta(1000, dtype=torch.bool))


@pytest.mark.parametrize(
    ("tensor", "picked", "hides"),
    [
        (meta(100), (0, 1), 1027),
        (meta(5000), (0, 1), 21_507),
        (meta(30, 70, dtype=torch.bool), (588, 2), 1027),
        (meta(30, 70, dtype=torch.bool).t(), (646, 2), 3127),
        (meta(4, 5, 600, dtype=torch.bool).transpose(0, 1), (3657, 3), 13_027),
        (meta(300_007), (0, 1), 21_507),
        (meta(300_007), (150_237, 1), 1539),
        (meta(5_000_011), (5_000_011, 1), 10_243),
        (meta(0), (0, 1), 0),
    ],
)
def test_nonzero_hides_what_an_h200_shows(tensor: torch.Tensor, picked: tuple[int, int], hides: int) -> None:
    call = Call(H200, aten.nonzero.default, (tensor,), {}, ids(*picked))
    assert sum(hidden_buffers(call)) == hides
