"""Matrix products by cuBLAS, which accepts row- and column-major matrices; other layouts are copied first.

The workspaces of cuBLAS and cuBLASLt are allocated once per thread and stream and kept, so they are not counted for a
call. This holds for torch 2.11 to 2.13; later versions allocate them for every call.
"""

from __future__ import annotations

import torch

from .layout import is_column_major, is_dense, is_row_major
from .rules import Call, none_needed, rule, size_of, unknown

none_needed("dot vdot addr addr_")


@rule("mm", "_int_mm")
def _mm(call: Call) -> list[int]:
    return _matrix_copies(_result_of(call), call["self"], call["mat2"])


@rule("addmm", "addmm_", "_addmm_activation")
def _addmm(call: Call) -> list[int]:
    """Either cuBLASLt adds the bias, or torch copies the bias to the result; the bias needs no other copy."""
    return _matrix_copies(_result_of(call), call["mat1"], call["mat2"])


@rule("addbmm", "addbmm_")
def _addbmm(call: Call) -> list[int]:
    """The matrices of the batch are multiplied one after the other."""
    batch1, batch2 = call["batch1"], call["batch2"]
    if batch1.shape[0] == 0:
        return []
    return _matrix_copies(_result_of(call), batch1.select(0, 0), batch2.select(0, 0))


@rule("bmm", "baddbmm", "baddbmm_")
def _bmm(call: Call) -> list[int]:
    batch1, batch2 = (call["self"], call["mat2"]) if call.has("mat2") else (call["batch1"], call["batch2"])
    if 0 in (batch1.numel(), batch2.numel()):
        return []
    result = _result_of(call)
    # a contiguous result with one column counts as column-major
    transposed = batch2.shape[2] != 1
    copy = []
    if result is not None:
        columns_fit = result.shape[2] == 1 or is_column_major(result)
        rows_fit = result.shape[1] == 1 or is_row_major(result)
        if result.stride(1) == 1 and columns_fit:
            transposed = False
        elif result.stride(2) == 1 and rows_fit:
            transposed = True
        else:
            transposed, copy = False, [size_of(result)]
    return [*copy, _batch_copy(batch2, transposed), _batch_copy(batch1, transposed)]


@rule("addmv", "addmv_")
def _addmv(call: Call) -> list[int]:
    matrix, vector = call["mat"], call["vec"]
    if matrix.numel() == 0:
        return []
    repeated = vector.stride(0) == 0 and vector.numel() > 1
    fits = is_row_major(matrix) or is_column_major(matrix) or matrix.is_contiguous()
    return [size_of(vector) if repeated else 0, 0 if fits else size_of(matrix)]


_by_cutlass = unknown(
    "the workspace of the kernel that torch picks for {operator}",
    *"_scaled_mm _scaled_mm_v2 _scaled_grouped_mm _scaled_grouped_mm_v2 _foreach_mm".split(),
)


@rule("_grouped_mm")
def _grouped(call: Call) -> list[int]:
    """In float32, torch multiplies one group after the other into the result."""
    return [] if call["self"].dtype == torch.float32 else _by_cutlass(call)


# ---------------------------------------------------------------- copies
def _result_of(call: Call) -> torch.Tensor | None:
    """The existing tensor that the call writes to; None if the result is new, and so contiguous."""
    if call.has("out"):
        return call["out"]
    return call["self"] if call.operator.overloadpacket.__name__.endswith("_") else None


def _matrix_copies(result: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor) -> list[int]:
    if 0 in (left.numel(), right.numel()):
        return []
    copy, transposed = 0, True
    if result is not None:
        if is_dense(result.shape, result.stride()):
            transposed = result.is_contiguous()
        elif is_column_major(result):
            transposed = False
        elif not is_row_major(result):
            copy = size_of(result)
    return [copy, _matrix_copy(left, transposed), _matrix_copy(right, transposed)]


def _matrix_copy(matrix: torch.Tensor, result_transposed: bool) -> int:
    """The bytes of a matrix's copy. A conjugate view is copied unless it is transposed relative to the result."""
    if is_dense(matrix.shape, matrix.stride()):
        row_major = matrix.is_contiguous()
    elif is_column_major(matrix):
        row_major = False
    elif is_row_major(matrix):
        row_major = True
    else:
        return size_of(matrix)
    return size_of(matrix) if matrix.is_conj() and row_major == result_transposed else 0


def _batch_copy(batch: torch.Tensor, result_transposed: bool) -> int:
    as_the_result, the_other_way = (
        (is_row_major, is_column_major) if result_transposed else (is_column_major, is_row_major)
    )
    if as_the_result(batch):
        return size_of(batch) if batch.is_conj() else 0
    if the_other_way(batch):
        return 0
    if batch.is_contiguous() and 0 not in batch.stride()[1:]:
        return size_of(batch) if batch.is_conj() and result_transposed else 0
    return size_of(batch)
