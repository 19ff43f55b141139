"""Collectives, and the kernels with which FSDP2 packs their data. NCCL's buffers are outside torch's allocator."""

from __future__ import annotations

import math

import torch

from .layout import is_dense
from .rules import NO_KERNEL, Call, ceil_div, rule

# collectives on lists of tensors are left out: ProcessGroupNCCL first joins the lists, and there is no rule for that
_COLLECTIVES = {
    "c10d": """_allgather_base_ _reduce_scatter_base_ allreduce_ allreduce_coalesced_ allgather_into_tensor_coalesced_
    reduce_scatter_tensor_coalesced_ alltoall_base_ broadcast_ reduce_ send recv_ recv_any_source_ barrier""",
    "_c10d_functional": """all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_ all_gather_into_tensor
    all_gather_into_tensor_out all_gather_into_tensor_coalesced reduce_scatter_tensor reduce_scatter_tensor_coalesced
    all_to_all_single broadcast broadcast_ wait_tensor""",
}
for _namespace, _names in _COLLECTIVES.items():
    _operators = getattr(torch.ops, _namespace)
    NO_KERNEL.update(getattr(_operators, _name) for _name in _names.split() if hasattr(_operators, _name))

# ---------------------------------------------------------------- packing
# one kernel copies all parts; a table on the GPU says which block copies which part
_BLOCK_THREADS, _THREAD_BYTES = 128, 16
_BLOCK_BYTES = _BLOCK_THREADS * _THREAD_BYTES
_WORD = 8


@rule("split_with_sizes_copy")
def _split(call: Call) -> list[int]:
    if not call.has("out"):  # a kernel for each part
        return []
    tensor, out, dim = call["self"], call["out"], call["dim"] % call["self"].dim()
    if any(not is_dense(t.shape, t.stride()) or t.dtype != tensor.dtype for t in (tensor, *out)):
        return []
    num_rows = math.prod(tensor.shape[:dim])
    parts = [size * tensor.stride(dim) * tensor.element_size() for size in call["split_sizes"]]
    most_blocks = 2 * (call.gpu.multiprocessors * call.gpu.threads_per_multiprocessor // _BLOCK_THREADS)
    rounds = ceil_div(num_rows * sum(ceil_div(part, _BLOCK_BYTES) for part in parts), most_blocks)
    rows_per_block = min(math.ceil(math.sqrt(rounds)), num_rows)
    num_blocks = sum(ceil_div(part, _BLOCK_BYTES * ceil_div(rounds, rows_per_block)) for part in parts)
    return [_WORD * (4 * len(parts) + 1 + num_blocks)]


@rule("_chunk_cat")
def _chunk_cat(call: Call) -> list[int]:
    tensors, num_chunks, dim = call["tensors"], call["num_chunks"], call["dim"] % call["tensors"][0].dim()
    out = call["out"] if call.has("out") else None
    dtype = tensors[0].dtype if out is None else out.dtype
    is_cast = dtype != tensors[0].dtype and (tensors[0].dtype, dtype) != (torch.bfloat16, torch.float32)
    if is_cast or any(not is_dense(t.shape, t.stride()) for t in (*tensors, *([] if out is None else [out]))):
        return []
    parts = [
        ceil_div(tensor.shape[dim], num_chunks) * math.prod(tensor.shape[dim + 1 :]) * dtype.itemsize
        for tensor in tensors
    ]
    return [_WORD * (6 * len(parts) + 2 + sum(ceil_div(part, _BLOCK_BYTES) for part in parts))]
