"""Fourier transforms and factorizations: cuFFT and cuSOLVER choose their workspace at run time, so no rule knows it."""

from __future__ import annotations

import math

import torch

from .rules import Call, NoRule, rule, size_of, unknown

_POINTER_BYTES = 8
_FEW_MATRICES, _LARGE_MATRIX = 8, 64  # at most this many matrices with at least this many rows are solved one by one


_factorization = unknown(
    "the workspace that cuSOLVER asks for in {operator}",
    *"""cholesky cholesky_solve cholesky_inverse geqrf ormqr _linalg_eigh _linalg_eigvals linalg_eig _linalg_svd
    linalg_qr linalg_householder_product linalg_inv_ex linalg_lstsq linalg_lu_factor_ex linalg_lu linalg_lu_solve
    linalg_ldl_factor_ex linalg_ldl_solve _linalg_solve_ex _linalg_det _linalg_slogdet triangular_solve lu_unpack
    linalg_matrix_exp""".split(),
)


@rule("_fft_c2c", "_fft_r2c", "_fft_c2r")
def _fourier(call: Call) -> list[int]:
    if not call["dim"]:
        return []
    raise NoRule(f"the workspace that cuFFT asks for in {call.operator}")


@rule("_linalg_check_errors")
def _checked(call: Call) -> list[int]:
    """One flag on the GPU: whether any factorization failed."""
    return [1]


@rule("linalg_solve_triangular")
def _solve_triangular(call: Call) -> list[int]:
    """Many small systems are solved in one batched call, which takes two arrays of pointers to the matrices."""
    matrix, right = call["self"], call["B"]
    if not (_is_by_column(matrix) and right.is_contiguous() and call["left"] and matrix.shape[:-2] == right.shape[:-2]):
        raise NoRule("linalg_solve_triangular in another layout than was measured")
    num_matrices = math.prod(matrix.shape[:-2])
    if num_matrices <= _FEW_MATRICES and matrix.shape[-1] >= _LARGE_MATRIX:
        return []
    return [2 * _POINTER_BYTES * num_matrices]


@rule("_cholesky_solve_helper")
def _cholesky_solve(call: Call) -> list[int]:
    """The factor is copied. For a single matrix, cuSOLVER also writes an int32 status."""
    factor = call["A"]
    if not _is_by_column(factor) or not call["self"].is_contiguous():
        raise NoRule("cholesky_solve in another layout than was measured")
    return [size_of(factor), 4 if factor.dim() == 2 else 0]


@rule("linalg_cholesky_ex")
def _cholesky(call: Call) -> list[int]:
    matrices = call["self"]
    if matrices.dim() == 2 or not matrices.is_contiguous():
        return _factorization(call)
    return [_POINTER_BYTES * math.prod(matrices.shape[:-2])]


def _is_by_column(matrix: torch.Tensor) -> bool:
    return matrix.mT.is_contiguous()
