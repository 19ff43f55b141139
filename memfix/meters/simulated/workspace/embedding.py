"""Embeddings and embedding bags: forward needs no workspace; backward sorts the ids before it adds gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..gpus import GPU
from . import cub
from .layout import flattens_without_copy
from .ordering import sort_buffers
from .rules import Call, NoRule, before_results, ceil_div, copies_unless_contiguous, rule, size_of, worst_moment

_SORTED_ABOVE = 3072  # up to this many ids, one kernel adds the gradients without sorting
_IDS_PER_PART = 10
_COUNTER = 8
_WARP, _MOST_THREADS = 32, 1024
_BLOCKS_PER_MULTIPROCESSOR = 4
_MODE_MAX = 2


@rule("embedding")
def _embedding(call: Call) -> list[int]:
    ids = call["indices"]
    return [] if flattens_without_copy(ids) else [size_of(ids)]


@rule("embedding_dense_backward")
def _embedding_backward(call: Call) -> list[int]:
    grad, ids = call["grad_output"], call["indices"]
    copies = copies_unless_contiguous(grad, ids)
    if ids.numel() <= _SORTED_ABOVE and not call["scale_grad_by_freq"]:
        return copies
    rows = _RowSums(ids, grad.dtype, grad.shape[-1], call["num_weights"], call["scale_grad_by_freq"], in_bags=False)
    return rows.buffers(call.gpu, copies)


@rule("_embedding_bag", "_embedding_bag_forward_only", "_embedding_bag_per_sample_weights_backward")
def _embedding_bag(call: Call) -> list[int]:
    """Ids and offsets of different dtypes are cast to one."""
    ids, offsets = call["indices"], call["offsets"]
    narrow = ids if ids.dtype == torch.int32 else offsets
    return [] if ids.dtype == offsets.dtype else [narrow.numel() * 8]


@rule("_embedding_bag_backward", "_embedding_bag_dense_backward")
def _embedding_bag_backward(call: Call) -> list[int]:
    grad, ids = call["grad"], call["indices"]
    if call.has("sparse") and call["sparse"]:
        raise NoRule("the sparse gradient of an embedding bag")
    if call.has("offsets") and call["offsets"].dtype != ids.dtype:
        raise NoRule("the gradient of an embedding bag whose ids and offsets are of two types")
    if call["mode"] == _MODE_MAX:
        return copies_unless_contiguous(grad)
    copies = copies_unless_contiguous(grad, ids)
    if ids.numel() == 0:
        return copies
    rows = _RowSums(ids, grad.dtype, grad.shape[-1], call["num_weights"], call["scale_grad_by_freq"], in_bags=True)
    return rows.buffers(call.gpu, copies)


@dataclass(frozen=True)
class _RowSums:
    """Sums of gradients by row. Sorted ``ids`` form a segment per row, which is cut into parts of at most ten."""

    ids: torch.Tensor
    dtype: torch.dtype
    width: int
    vocabulary: int
    by_frequency: bool
    in_bags: bool

    def buffers(self, gpu: GPU, copies: list[int]) -> list[int]:
        num_ids, index_bytes = self.ids.numel(), self.ids.element_size()
        ids_bytes = num_ids * index_bytes
        result_bytes = self.vocabulary * self.width * self.dtype.itemsize
        sorting = [*copies, *[ids_bytes] * 3, cub.radix_sort(gpu, num_ids, index_bytes, index_bytes)]
        moments = [before_results(sorting, result_bytes)]
        order = [*copies, ids_bytes, ids_bytes]
        if self.by_frequency:
            order.append(ids_bytes)
            counting = [*order, cub.scan_by_key(gpu, num_ids, index_bytes)]
            moments.append(before_results(counting, result_bytes))

        starts = [*order, ids_bytes, _COUNTER]
        moments.append([*starts, ids_bytes, cub.unique_by_key(gpu, num_ids, index_bytes)])
        num_segments = min(num_ids, self.vocabulary)
        num_partials = num_ids // _IDS_PER_PART + num_segments
        segments = [*starts, num_segments * index_bytes, num_segments * index_bytes]
        moments.append([*segments, cub.scan(gpu, num_segments, index_bytes)])
        partials = [*segments, _COUNTER, num_partials * index_bytes]
        moments.append(partials + self._sums(gpu, num_segments, num_partials))
        return worst_moment(*moments)

    def _sums(self, gpu: GPU, num_segments: int, num_partials: int) -> list[int]:
        """The buffers for the sum of each part, or for atomic additions if segments are few and long."""
        sum_bytes = 8 if self.dtype == torch.float64 else 4
        threads_per_row = ceil_div(self.width, _WARP) * _WARP
        num_blocks = ceil_div(num_segments * threads_per_row, min(threads_per_row, _MOST_THREADS))
        few_and_long = num_blocks < gpu.multiprocessors * _BLOCKS_PER_MULTIPROCESSOR and num_partials > 4 * num_blocks
        if self.in_bags or not few_and_long or torch.are_deterministic_algorithms_enabled():
            return [num_partials * self.width * sum_bytes]
        segment_of_part = num_partials * self.ids.element_size()
        if self.dtype.itemsize >= sum_bytes:
            return [segment_of_part]
        return [segment_of_part, self.vocabulary * self.width * sum_bytes]


@rule("embedding_renorm_", "embedding_renorm")
def _embedding_renorm(call: Call) -> list[int]:
    ids = call["indices"]
    if ids.dim() != 1:
        raise NoRule(f"embedding_renorm_ of {ids.dim()}-dimensional ids")
    num_ids, index_bytes = ids.numel(), ids.element_size()
    if num_ids == 0:
        return []
    ids_bytes = num_ids * index_bytes
    sorting = sort_buffers(call.gpu, ids.shape, ids.stride(), index_bytes, 0, (1,))
    return worst_moment(
        [ids_bytes, num_ids * 8, *sorting],
        [ids_bytes, ids_bytes, _COUNTER, cub.select(call.gpu, num_ids, index_bytes)],
    )
