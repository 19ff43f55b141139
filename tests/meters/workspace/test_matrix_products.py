"""What products copy before cuBLAS sees them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rules_on_meta import hidden, meta

from memfix.meters.simulated.gpus import H200
from memfix.meters.simulated.workspace import Call, NoRule, hidden_buffers

aten = torch.ops.aten
c64 = torch.complex64


# ---------------------------------------------------------------- as measured on an H200
def test_a_repeated_gradient_is_copied() -> None:
    one = meta(1, 1).expand(8192, 8192)
    assert hidden(aten.mm.default, one, meta(8192, 8192).t()) == [268_435_456]


def test_a_repeated_batch_is_copied() -> None:
    one = meta(1, 1, 1, dtype=torch.bfloat16).expand(32, 4096, 64)
    weights = meta(32, 4096, 4096, dtype=torch.bfloat16).transpose(1, 2)
    assert hidden(aten.bmm.default, weights, one) == [16_777_216]


# ---------------------------------------------------------------- layouts
def test_rows_repeated_are_copied_and_one_repeated_row_is_not() -> None:
    assert hidden(aten.mm.default, meta(32).expand(64, 32), meta(32, 16)) == [64 * 32 * 4]
    assert hidden(aten.mm.default, meta(32).expand(1, 32), meta(32, 16)) == []


def test_a_slice_of_columns_is_taken_as_it_is() -> None:
    assert hidden(aten.mm.default, meta(64, 100)[:, 3:35], meta(100, 32).t()[:, :16].t().t()[:, :16]) == []
    assert hidden(aten.bmm.default, meta(3, 64, 100)[:, :, :32], meta(3, 32, 16)) == []


def test_a_repeated_batch_axis_is_no_reason_to_copy() -> None:
    assert hidden(aten.bmm.default, meta(64, 32).expand(3, 64, 32), meta(3, 32, 16)) == []


def test_a_contiguous_batch_with_a_zero_stride_is_copied() -> None:
    row = torch.empty_strided((3, 1, 32), (32, 0, 1), device="meta")
    assert hidden(aten.bmm.default, row, meta(3, 32, 16)) == [3 * 32 * 4]


def test_the_result_of_an_update_in_place_is_staged_where_cublas_cannot_write() -> None:
    gapped = meta(64, 32)[:, ::2]
    assert hidden(aten.addmm_.default, gapped, meta(64, 8), meta(8, 16)) == [64 * 16 * 4]
    assert hidden(aten.addmm_.default, meta(64, 100)[:, :16], meta(64, 8), meta(8, 16)) == []
    assert hidden(aten.baddbmm_.default, meta(3, 64, 32)[:, :, ::2], meta(3, 64, 8), meta(3, 8, 16)) == [
        3 * 64 * 16 * 4
    ]


def test_an_empty_product_copies_nothing() -> None:
    assert hidden(aten.mm.default, meta(64, 0), meta(0, 16)) == []
    assert hidden(aten.bmm.default, meta(3, 64, 0), meta(3, 0, 16)) == []


def test_a_batch_is_added_up_matrix_by_matrix() -> None:
    assert hidden(aten.addbmm.default, meta(64, 16), meta(3, 64, 16)[:, :, ::2], meta(3, 8, 16)) == [64 * 8 * 4]


def test_a_repeated_vector_is_copied() -> None:
    assert hidden(aten.addmv.default, meta(64), meta(64, 32), meta(1).expand(32)) == [128]
    assert hidden(aten.addmv.default, meta(64), meta(64, 64)[:, ::2], meta(64)[::2]) == [64 * 32 * 4]


# ---------------------------------------------------------------- conjugates
def test_a_conjugate_is_resolved_unless_cublas_transposes_it_too() -> None:
    matrix = meta(64, 32, dtype=c64)
    assert hidden(aten.mm.default, matrix.conj(), meta(32, 16, dtype=c64)) == [64 * 32 * 8]
    assert hidden(aten.mm.default, meta(32, 64, dtype=c64).mH, meta(32, 16, dtype=c64)) == []
    assert hidden(aten.bmm.default, meta(3, 32, 64, dtype=c64).mH, meta(3, 32, 16, dtype=c64)) == []
    assert hidden(aten.bmm.default, meta(3, 64, 32, dtype=c64).conj(), meta(3, 32, 16, dtype=c64)) == [3 * 64 * 32 * 8]


# ---------------------------------------------------------------- not known
def test_the_kernel_of_a_scaled_product_is_not_known() -> None:
    with pytest.raises(NoRule, match=r"^the workspace of the kernel that torch picks for aten\._grouped_mm\.default$"):
        hidden(aten._grouped_mm.default, *(meta(4, 64, 64, dtype=torch.bfloat16) for _ in range(2)))


@pytest.mark.parametrize("operator", [aten.dot.default, aten.vdot.default], ids=str)
def test_a_scalar_product_hides_nothing(operator: Any) -> None:
    assert hidden(operator, meta(64)[::2], meta(32)) == []


# ---------------------------------------------------------------- factorisations, as measured on an H200
@pytest.mark.parametrize(
    ("operator", "arguments", "hides"),
    [
        (aten.linalg_solve_triangular.default, (meta(50, 50).mT, meta(50, 33)), 16),
        (aten.linalg_solve_triangular.default, (meta(300, 300).mT, meta(300, 1)), 0),
        (aten.linalg_solve_triangular.default, (meta(4, 60, 60).mT, meta(4, 60, 33)), 64),
        (aten.linalg_solve_triangular.default, (meta(3, 700, 700).mT, meta(3, 700, 33)), 0),
        (aten._cholesky_solve_helper.default, (meta(300, 33), meta(300, 300).mT, False), 360_004),
        (aten._cholesky_solve_helper.default, (meta(4, 60, 33), meta(4, 60, 60).mT, False), 57_600),
        (aten.linalg_cholesky_ex.default, (meta(4, 60, 60),), 32),
        (aten._grouped_mm.default, (meta(64, 128), meta(4, 128, 256), meta(4, dtype=torch.int32)), 0),
    ],
    ids=str,
)
def test_factorisations_hide_what_an_h200_shows(operator: Any, arguments: tuple[Any, ...], hides: int) -> None:
    options = {"upper": False} if operator is aten.linalg_solve_triangular.default else {}
    assert sum(hidden_buffers(Call(H200, operator, arguments, options, arguments[0]))) == hides


def test_factorisations_in_another_layout_are_not_known() -> None:
    for operator, arguments in (
        (aten.linalg_solve_triangular.default, (meta(50, 50), meta(50, 33))),
        (aten._cholesky_solve_helper.default, (meta(50, 33), meta(50, 50), False)),
    ):
        with pytest.raises(NoRule, match=r"in another layout than was measured$"):
            hidden_buffers(Call(H200, operator, arguments, {"upper": False}, arguments[0]))
    with pytest.raises(NoRule, match=r"^the workspace that cuSOLVER asks for in aten.linalg_cholesky_ex"):
        hidden_buffers(Call(H200, aten.linalg_cholesky_ex.default, (meta(50, 50),), {}, meta(50, 50)))
