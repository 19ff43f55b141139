"""Decayed products of the rows of a chunk, computed so that the decays neither overflow nor cancel.

A row ``i`` and an earlier row ``j`` have the decay ``exp(g_{j+1} + ... + g_i)``. For a matrix product it is split into
a factor of ``i`` and a factor of ``j``, each relative to a reference row. One reference for all pairs is unsafe: before
both rows, ``exp(-G_j)`` overflows; and a difference of two cumulative sums has no digits left where the sums are large.
Here the reference of every pair lies between its rows. On level ``L`` = 1, 2, 4, ... the chunk is cut into blocks of
``2L`` rows, and the rows of a block's second half are paired with those of its first half: the sums from the middle to
``i`` and from ``j`` to the middle add gates and subtract none. Every pair of rows is on exactly one level.
"""

# Z chunks of all heads, C rows of a chunk, K width of a key, L rows of half a block, N blocks of a level

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Level:
    """One level, and the decays between its rows and the middle of their block."""

    length: int
    second_half_ZNLK: torch.Tensor  # exp of the sum of gates from the middle to a row, its own included
    first_half_ZNLK: torch.Tensor  # exp of the sum of gates after a row, up to the middle

    def second(self, rows_ZCx: torch.Tensor) -> torch.Tensor:
        """Return the rows of the second halves, ``[Z, N, L, ...]``, a view."""
        return rows_ZCx.unflatten(1, (-1, 2, self.length))[:, :, 1]

    def first(self, rows_ZCx: torch.Tensor) -> torch.Tensor:
        return rows_ZCx.unflatten(1, (-1, 2, self.length))[:, :, 0]

    def pairs(self, matrix_ZCC: torch.Tensor) -> torch.Tensor:
        """Return the elements of this level's pairs, ``[Z, N, L, L]``, a view."""
        return blocks_on_the_diagonal(matrix_ZCC, 2 * self.length)[..., self.length :, : self.length]


def blocks_on_the_diagonal(matrix_ZCC: torch.Tensor, length: int) -> torch.Tensor:
    """Return the blocks as ``[Z, C / length, length, length]``, a view."""
    blocks = matrix_ZCC.unflatten(2, (-1, length)).unflatten(1, (-1, length))
    return blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1)


class Gates:
    """Sums of gates within blocks of a chunk, made level by level from shorter sums: added, never subtracted."""

    def __init__(self, g_ZCK: torch.Tensor) -> None:
        """``g_ZCK`` is overwritten."""
        self.up_to_row_ZCK = g_ZCK  # from the first row of a block to a row, its own included
        self.after_row_ZCK = torch.zeros_like(g_ZCK)  # from a row, without its own, to the last row of a block

    def levels(self) -> Iterator[Level]:
        """Yield level after level. Afterwards the whole chunk is one block, and the sums are over it."""
        length = 1
        while length < self.up_to_row_ZCK.shape[1]:
            up_to, after = (x.unflatten(1, (-1, 2, length)) for x in (self.up_to_row_ZCK, self.after_row_ZCK))
            yield Level(length, up_to[:, :, 1].exp(), after[:, :, 0].exp())
            after[:, :, 0].add_(up_to[:, :, 1, -1:])
            up_to[:, :, 1].add_(up_to[:, :, 0, -1:])
            length *= 2


def decayed_products(gates: Gates, qk_ZC2K: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``P_ij = sum_d q_i k_j decay`` for ``i >= j`` and ``A_ij = sum_d k_i k_j decay`` for ``i > j``, else 0."""
    q_ZCK, k_ZCK = qk_ZC2K.unbind(2)
    num_chunks, rows, _ = q_ZCK.shape
    p_ZCC, a_ZCC = (q_ZCK.new_zeros(num_chunks, rows, rows) for _ in range(2))
    for level in gates.levels():
        found_ZNLL2 = _row_side(level, qk_ZC2K) @ _column_side(level, k_ZCK).mT
        for matrix_ZCC, found in zip((p_ZCC, a_ZCC), found_ZNLL2.unflatten(2, (-1, 2)).unbind(3), strict=True):
            level.pairs(matrix_ZCC).copy_(found)
    p_ZCC.diagonal(dim1=1, dim2=2).copy_((q_ZCK * k_ZCK).sum(-1))
    return p_ZCC, a_ZCC


def add_gradients_of_products(
    gates: Gates,
    qk_ZC2K: torch.Tensor,
    grad_p_ZCC: torch.Tensor,
    grad_a_ZCC: torch.Tensor,
    grad_qk_ZC2K: torch.Tensor,
    grad_g_ZCK: torch.Tensor,
) -> None:
    """Add the gradients of q, k and g. The gradient of a decay goes to every gate in its sum."""
    k_ZCK, grad_k_ZCK = qk_ZC2K[:, :, 1], grad_qk_ZC2K[:, :, 1]
    for level in gates.levels():
        pairs = torch.stack([level.pairs(grad_p_ZCC), level.pairs(grad_a_ZCC)], dim=3).flatten(2, 3)
        row_side, column_side = _row_side(level, qk_ZC2K), _column_side(level, k_ZCK)
        grad_rows_ZNL2K = (pairs @ column_side).unflatten(2, (-1, 2)).mul_(level.second_half_ZNLK.unsqueeze(3))
        grad_columns_ZNLK = (pairs.mT @ row_side).mul_(level.first_half_ZNLK)
        level.second(grad_qk_ZC2K).add_(grad_rows_ZNL2K)
        level.first(grad_k_ZCK).add_(grad_columns_ZNLK)
        grad_sums_ZNLK = grad_rows_ZNL2K.mul_(level.second(qk_ZC2K)).sum(3)
        level.second(grad_g_ZCK).add_(gates_up_to_row(grad_sums_ZNLK))
        add_to_gates_after_row(level.first(grad_g_ZCK), grad_columns_ZNLK.mul_(level.first(k_ZCK)))
    diagonal_ZC1 = grad_p_ZCC.diagonal(dim1=1, dim2=2).unsqueeze(2)
    for grad_ZCK, other_ZCK in zip(grad_qk_ZC2K.unbind(2), reversed(qk_ZC2K.unbind(2)), strict=True):
        grad_ZCK.addcmul_(other_ZCK, diagonal_ZC1)


def gates_up_to_row(grad_sum: torch.Tensor) -> torch.Tensor:
    """Return gradients of gates from those of sums up to each row: gate ``m`` is in the sums of row ``m`` and later."""
    return grad_sum.flip(-2).cumsum(-2).flip(-2)


def add_to_gates_after_row(grad_g: torch.Tensor, grad_sum: torch.Tensor) -> None:
    """Add gradients of gates from those of sums after each row: gate ``m`` is in the sums of all rows before ``m``."""
    grad_g[..., 1:, :].add_(grad_sum[..., :-1, :].cumsum(-2))


def inverse_of_unit_lower(strictly_lower_ZCC: torch.Tensor) -> torch.Tensor:
    """Return ``(I + M)^-1`` for a strictly lower ``M``, by inverting diagonal blocks of doubling size.

    Each level is a few batched matrix products, where a solver goes row by row.
    """
    rows = strictly_lower_ZCC.shape[-1]
    eye_CC = torch.eye(rows, dtype=strictly_lower_ZCC.dtype, device=strictly_lower_ZCC.device)
    inverse_ZCC = eye_CC.expand_as(strictly_lower_ZCC).contiguous()
    length = 1
    while length < rows:
        first, second = blocks_on_the_diagonal(inverse_ZCC, length).unflatten(1, (-1, 2)).unbind(2)
        below = blocks_on_the_diagonal(strictly_lower_ZCC, 2 * length)[..., length:, :length]
        found = second @ below @ first
        blocks_on_the_diagonal(inverse_ZCC, 2 * length)[..., length:, :length].copy_(found.neg_())
        length *= 2
    return inverse_ZCC


def _row_side(level: Level, qk_ZC2K: torch.Tensor) -> torch.Tensor:
    """Return ``[Z, N, 2 L, K]``: the decayed query and the decayed key of every row of the second halves."""
    return (level.second(qk_ZC2K) * level.second_half_ZNLK.unsqueeze(3)).flatten(2, 3)


def _column_side(level: Level, k_ZCK: torch.Tensor) -> torch.Tensor:
    return level.first(k_ZCK) * level.first_half_ZNLK
