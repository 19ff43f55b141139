"""Fourier transforms and factorizations: cuFFT and cuSOLVER choose their workspace at run time, so no rule knows it."""

from __future__ import annotations

from .rules import Call, NoRule, rule


@rule("_fft_c2c", "_fft_r2c", "_fft_c2r")
def _fourier(call: Call) -> list[int]:
    if not call["dim"]:
        return []
    raise NoRule(f"the workspace that cuFFT asks for in {call.operator}")


@rule(
    *"""cholesky cholesky_solve _cholesky_solve_helper cholesky_inverse geqrf ormqr linalg_cholesky_ex _linalg_eigh
    _linalg_eigvals linalg_eig _linalg_svd linalg_qr linalg_householder_product linalg_inv_ex linalg_lstsq
    linalg_lu_factor_ex linalg_lu linalg_lu_solve linalg_ldl_factor_ex linalg_ldl_solve _linalg_solve_ex _linalg_det
    _linalg_slogdet linalg_solve_triangular triangular_solve lu_unpack linalg_matrix_exp""".split()
)
def _factorization(call: Call) -> list[int]:
    raise NoRule(f"the workspace that cuSOLVER asks for in {call.operator}")
