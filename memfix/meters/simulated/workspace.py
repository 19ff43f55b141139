"""Kernel workspace: the bytes that a CUDA kernel takes and gives back, which no dispatcher shows.

Each rule states how torch's own kernel allocates. An operator that has neither a rule nor a reason to
need none is reported by name, and the reading says that it is an estimate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .gpus import GPU
from .reductions import needs_64bit_indexing, partial_result_buffers

aten = torch.ops.aten

Rule = Callable[..., list[int]]
"""``rule(gpu, args, kwargs)`` -> buffer sizes in bytes. Raises ``NoRule`` where it does not know."""


class NoRule(Exception):
    """The bytes that this call hides are not known; the message says of what."""


_RULES: dict[torch._ops.OpOverloadPacket, Rule] = {}


def _rule(*packets: torch._ops.OpOverloadPacket) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(packets, rule))
        return rule

    return register


# kernels that write their result directly; pointwise operators and views need no entry
_NONE_NEEDED = frozenset(
    getattr(aten, name)
    for name in """empty empty_like empty_strided empty_permuted new_empty new_empty_strided zeros zeros_like
    new_zeros ones ones_like new_ones full full_like new_full scalar_tensor arange linspace eye fill_ zero_ rand
    rand_like randn randn_like randint uniform_ normal_ bernoulli_ random_ copy_ _to_copy clone detach lift_fresh cat
    stack index_select gather scatter scatter_ scatter_add scatter_add_ index_add_ index_copy_ index_fill_
    embedding nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward triu tril _unsafe_view
    _reshape_alias set_ resize_ native_dropout native_dropout_backward is_pinned repeat split_with_sizes_copy
    constant_pad_nd flip roll _local_scalar_dense masked_fill_""".split()
    if hasattr(aten, name)
)


def hidden_buffers(
    gpu: GPU, operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[int]:
    """What the CUDA kernel behind ``operator`` takes besides its outputs. Raises ``NoRule`` where unknown."""
    packet = operator.overloadpacket
    rule = _RULES.get(packet)
    if rule is not None:
        return [size for size in rule(gpu, args, kwargs) if size]
    if operator.is_view or torch.Tag.pointwise in operator.tags or packet in _NONE_NEEDED:
        return []
    raise NoRule(f"no workspace rule for {operator}")


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copy_unless_contiguous(*tensors: torch.Tensor) -> list[int]:
    return [_bytes(tensor) for tensor in tensors if not tensor.is_contiguous()]


# ---------------------------------------------------------------- matrix products
@_rule(aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.addmm_, aten.baddbmm_)
def _gemm(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """cuBLAS takes row- and column-major matrices; anything else is copied first."""
    matrices = [a for a in args if isinstance(a, torch.Tensor)][-2:]
    return [_bytes(matrix) for matrix in matrices if not _fits_cublas(matrix)]


def _fits_cublas(matrix: torch.Tensor) -> bool:
    if matrix.numel() == 0:
        return True
    rows, columns = matrix.shape[-2:]
    row_stride, column_stride = matrix.stride()[-2:]
    if column_stride == 1 and row_stride >= max(1, columns):
        return True
    if row_stride == 1 and column_stride >= max(1, rows):
        return True
    return matrix.is_contiguous() and (matrix.dim() == 2 or 1 in (rows, columns))


# ---------------------------------------------------------------- reductions
def _dims_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int] | None:
    given: Any = args[1] if len(args) > 1 else kwargs.get("dim")
    if type(given) is int:
        return [given]
    return list(given) if isinstance(given, (list, tuple)) and given else None


def _reduction(gpu: GPU, tensor: torch.Tensor, dims: list[int] | None, accumulator_bytes: int) -> list[int]:
    if needs_64bit_indexing(tensor):
        raise NoRule(f"a reduction over {tensor.numel():,} elements, which torch cuts in pieces")
    return partial_result_buffers(gpu, tensor, dims, accumulator_bytes)


@_rule(aten.sum, aten.mean)
def _sum(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    tensor, wanted = args[0], kwargs.get("dtype")
    if tensor.dtype.is_floating_point:
        if wanted is not None and wanted != tensor.dtype and wanted != torch.float32:
            raise NoRule(f"sum of {tensor.dtype} as {wanted}")
        return _reduction(gpu, tensor, _dims_of(args, kwargs), 8 if tensor.dtype == torch.float64 else 4)
    # integers and masks are first cast to the int64 they are summed in
    if tensor.dtype == torch.int64:
        return _reduction(gpu, tensor, _dims_of(args, kwargs), 8)
    cast = torch.empty_like(tensor, dtype=torch.int64, device="meta")
    return [_bytes(cast), *_reduction(gpu, cast, _dims_of(args, kwargs), 8)]


@_rule(aten.amax, aten.amin, aten.max, aten.min, aten.any, aten.all)
def _extremum(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    tensor = args[0]
    if len(args) > 1 and isinstance(args[1], torch.Tensor):
        return []  # of two tensors, element by element
    return _reduction(gpu, tensor, _dims_of(args, kwargs), tensor.element_size())


# ---------------------------------------------------------------- softmax
@_rule(aten._softmax, aten._log_softmax)
def _softmax(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    return _copy_unless_contiguous(args[0])


@_rule(aten._log_softmax_backward_data)
def _log_softmax_backward(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    return _copy_unless_contiguous(*args[:2])


@_rule(aten._softmax_backward_data)
def _softmax_backward(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """The product of gradient and output is made first, then reduced."""
    grad, output = args[:2]
    return [_bytes(grad), *_copy_unless_contiguous(output)]


# ---------------------------------------------------------------- embedding
_SORTED_ABOVE = 3072  # fewer ids than this are added by one kernel, without sorting
_ROWS_PER_SEGMENT = 10


@_rule(aten.embedding_dense_backward)
def _embedding_backward(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Ids are sorted and cut into segments of at most ten rows, each summed in float32 or wider."""
    grad, ids, vocabulary = args[:3]
    num_ids, index_bytes = ids.numel(), ids.element_size()
    copies = _copy_unless_contiguous(grad, ids)
    if num_ids <= _SORTED_ABOVE:
        return copies
    num_segments = min(num_ids, vocabulary)
    num_partials = num_ids // _ROWS_PER_SEGMENT + num_segments
    partial_sums = num_partials * grad.shape[-1] * (8 if grad.dtype == torch.float64 else 4)
    indices = [num_ids * index_bytes] * 3 + [num_segments * index_bytes] * 2 + [num_partials * index_bytes]
    if partial_sums < 2 * num_ids * index_bytes:
        raise NoRule("embedding backward of narrow rows, where sorting the ids may take the most")
    return [*copies, *indices, 8, 8, partial_sums]
