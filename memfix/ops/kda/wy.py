"""The chunked WY form in pure torch: no ``K x K`` matrix per token, and all work of a chunk in matrix products.

Inside a chunk the delta rule is a triangular system. With ``A`` and ``P`` the decayed products of rows
(``pairwise_decays.py``), ``X = (I + diag(beta) A)^-1`` and the state ``S`` before the chunk::

    V' = X diag(beta) (V - (eG*K) S);    o = scale ((eG*Q) S + P V');    S <- eG_last*S + (eR*K)^T V'

where ``eG`` is the decay from the chunk's start to a row and ``eR`` from a row to the chunk's end. Only ``V'`` and
``S`` depend on earlier chunks; the rest is computed for all chunks at once. After Yang et al. 2024 (arXiv 2406.06484)
and Kimi Team 2025, "Kimi Linear" (arXiv 2510.26692). Only the inputs are held for backward, which recomputes the rest.
"""

# B batch, T tokens, H heads, K width of a key, V width of a value, S sequences, Z chunks of all sequences and heads,
# C rows of a chunk, X = S x H

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..derivatives import first_derivative_only, without_autocast
from .arguments import KdaOptions, KdaTensors, Outputs, kda_form, scale_of, wide_dtype
from .chunk_layout import Layout
from .pairwise_decays import (
    Gates,
    add_gradients_of_products,
    add_to_gates_after_row,
    decayed_products,
    gates_up_to_row,
    inverse_of_unit_lower,
)


@kda_form
def wy_kda(tensors: KdaTensors, options: KdaOptions) -> Outputs:
    """Equals ``S = (I - beta k k^T) Diag(exp(g)) S + beta k v^T; o = scale * S^T q``, a chunk of tokens at a time.

    Chunks have a power of two rows, at most 64 and at most ``chunk_size``. Memory grows like ``B*T*H*(K + V + C)`` and
    like ``B*(T/C)*H*K*V`` for the states at chunk starts; between forward and backward only the inputs are held.
    Backward may run more than once.
    """
    given = (*tensors.inputs, tensors.initial_state_SHKV)
    return _ChunkedWY.apply(*given, tensors.spans, options.chunk_size, scale_of(tensors.q_BTHK, options.scale))


class _ChunkedWY(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Outputs:
        *tensors, spans, chunk_size, scale = given
        q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, initial_state_SHKV = tensors
        ctx.save_for_backward(*tensors)
        ctx.options = (spans, chunk_size, scale)
        with without_autocast(q_BTHK):
            layout = Layout.of(q_BTHK, spans, chunk_size)
            rows = _Rows.of(layout, q_BTHK, k_BTHK, v_BTHV, beta_BTH)
            chunks, p_ZCC, w_ZCK = _Chunks.of(layout, rows, g_BTHK)
            walk = _Walk.of(layout, rows, chunks, w_ZCK, initial_state_SHKV)
            del w_ZCK
            o_ZCV = torch.bmm(chunks.from_start_ZCK.mul_(rows.q_ZCK), walk.starts_ZKV)
            o_ZCV.baddbmm_(p_ZCC, walk.new_v_ZCV).mul_(scale)
            return layout.joined(o_ZCV, q_BTHK.dtype), layout.in_place_again(walk.state_XKV)

    @staticmethod
    @first_derivative_only("kda")
    def backward(ctx: Any, grad_o_BTHV: torch.Tensor, grad_state_SHKV: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, initial_state_SHKV = ctx.saved_tensors
        spans, chunk_size, scale = ctx.options
        with without_autocast(grad_o_BTHV):
            layout = Layout.of(q_BTHK, spans, chunk_size)
            rows = _Rows.of(layout, q_BTHK, k_BTHK, v_BTHV, beta_BTH)
            grad_state_XKV, found = _gradients(
                layout, rows, g_BTHK, initial_state_SHKV, grad_o_BTHV, grad_state_SHKV, scale
            )
            inputs = (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH)
            gradients = [
                layout.joined(rows_ZCx, tensor.dtype).view(tensor.shape) if needed else None
                for rows_ZCx, tensor, needed in zip(found, inputs, ctx.needs_input_grad, strict=False)
            ]
            grad_initial = layout.in_place_again(grad_state_XKV) if ctx.needs_input_grad[5] else None
        return *gradients, grad_initial, None, None, None


@dataclass(frozen=True)
class _Rows:
    """Queries, keys, values and strengths as the rows of chunks, upcast."""

    qk_ZC2K: torch.Tensor
    v_ZCV: torch.Tensor
    beta_ZC1: torch.Tensor

    @staticmethod
    def of(
        layout: Layout, q_BTHK: torch.Tensor, k_BTHK: torch.Tensor, v_BTHV: torch.Tensor, beta_BTH: torch.Tensor
    ) -> _Rows:
        size = (layout.num_chunks * layout.num_heads, layout.rows)
        wide = wide_dtype(q_BTHK.dtype)
        qk_ZC2K = q_BTHK.new_empty((*size, 2, q_BTHK.shape[-1]), dtype=wide)
        v_ZCV = q_BTHK.new_empty((*size, v_BTHV.shape[-1]), dtype=wide)
        beta_ZC1 = q_BTHK.new_empty((*size, 1), dtype=wide)
        for part, whole in (
            (qk_ZC2K[:, :, 0], q_BTHK),
            (qk_ZC2K[:, :, 1], k_BTHK),
            (v_ZCV, v_BTHV),
            (beta_ZC1, beta_BTH.unsqueeze(-1)),
        ):
            layout.cut(whole, out=part)
        return _Rows(qk_ZC2K, v_ZCV, beta_ZC1)

    @property
    def q_ZCK(self) -> torch.Tensor:
        return self.qk_ZC2K[:, :, 0]

    @property
    def k_ZCK(self) -> torch.Tensor:
        return self.qk_ZC2K[:, :, 1]

    def cut(self, layout: Layout, x_BTHx: torch.Tensor) -> torch.Tensor:
        rows_ZCx = self.v_ZCV.new_empty((*self.v_ZCV.shape[:2], x_BTHx.shape[-1]))
        layout.cut(x_BTHx, out=rows_ZCx)
        return rows_ZCx


def _gates(layout: Layout, rows: _Rows, g_BTHK: torch.Tensor) -> tuple[Gates, torch.Tensor]:
    """Return the gates without NaN, and a mask of the rows at or behind a NaN in their chunk, ``[Z, C, 1]``."""
    g_ZCK = rows.cut(layout, g_BTHK)
    is_nan_ZC1 = g_ZCK.isnan().any(-1, keepdim=True)
    # -inf, a reset, becomes the lowest finite number, whose exponential is 0 too
    return Gates(g_ZCK.nan_to_num_(nan=0.0, posinf=torch.inf)), is_nan_ZC1.cumsum(1) > 0


@dataclass(frozen=True)
class _Chunks:
    """The matrices and decays of chunks, which do not depend on the state before them."""

    a_ZCC: torch.Tensor
    x_ZCC: torch.Tensor
    from_start_ZCK: torch.Tensor  # decay from the start of the chunk to a row
    to_end_ZCK: torch.Tensor  # decay from a row to the end of the chunk

    @staticmethod
    def of(layout: Layout, rows: _Rows, g_BTHK: torch.Tensor) -> tuple[_Chunks, torch.Tensor, torch.Tensor]:
        """Return the chunks, and beside them ``P`` and ``W = X diag(beta) (eG*K)``, which callers free earlier."""
        gates, is_nan_ZC1 = _gates(layout, rows, g_BTHK)
        p_ZCC, a_ZCC = decayed_products(gates, rows.qk_ZC2K)
        x_ZCC = inverse_of_unit_lower(rows.beta_ZC1 * a_ZCC)
        from_start_ZCK, to_end_ZCK = gates.up_to_row_ZCK.exp_(), gates.after_row_ZCK.exp_()
        w_ZCK = torch.bmm(x_ZCC, (from_start_ZCK * rows.k_ZCK).mul_(rows.beta_ZC1))
        # NaN is put back only here, from where it reaches the outputs at and behind its row, the state, and every
        # gradient of its chunk
        from_start_ZCK.masked_fill_(is_nan_ZC1, torch.nan)
        to_end_ZCK.masked_fill_(is_nan_ZC1[:, -1:], torch.nan)
        return _Chunks(a_ZCC, x_ZCC, from_start_ZCK, to_end_ZCK), p_ZCC, w_ZCK

    @property
    def decay_ZK1(self) -> torch.Tensor:
        """The decay of a state over the whole chunk."""
        return self.from_start_ZCK[:, -1].unsqueeze(-1)


@dataclass(frozen=True)
class _Walk:
    """The results of the scan from chunk to chunk: ``V'``, and the states."""

    new_v_ZCV: torch.Tensor
    starts_ZKV: torch.Tensor  # the state before every chunk
    state_XKV: torch.Tensor  # the final states

    @staticmethod
    def of(
        layout: Layout, rows: _Rows, chunks: _Chunks, w_ZCK: torch.Tensor, initial_state_SHKV: torch.Tensor | None
    ) -> _Walk:
        new_v_ZCV = torch.bmm(chunks.x_ZCC, rows.beta_ZC1 * rows.v_ZCV)
        decayed_k_ZCK = chunks.to_end_ZCK * rows.k_ZCK
        size = (w_ZCK.shape[-1], new_v_ZCV.shape[-1])
        starts_ZKV = w_ZCK.new_empty(w_ZCK.shape[0], *size)
        if initial_state_SHKV is None:
            state_XKV = w_ZCK.new_zeros(layout.num_sequences * layout.num_heads, *size)
        else:
            state_XKV = layout.ordered(initial_state_SHKV)
        for step in layout.steps:
            now_XKV = state_XKV[: step.stop - step.start]
            starts_ZKV[step].copy_(now_XKV)
            new_v_ZCV[step].baddbmm_(w_ZCK[step], now_XKV, alpha=-1)
            now_XKV.mul_(chunks.decay_ZK1[step]).baddbmm_(decayed_k_ZCK[step].mT, new_v_ZCV[step])
        return _Walk(new_v_ZCV, starts_ZKV, state_XKV)


@dataclass(frozen=True)
class _WalkBack:
    """The results of the backward scan: the gradients of ``V'``, and of the states."""

    grad_new_v_ZCV: torch.Tensor
    grad_ends_ZKV: torch.Tensor  # gradient of the state after every chunk
    grad_state_XKV: torch.Tensor  # gradient of the initial states

    @staticmethod
    def of(
        layout: Layout,
        rows: _Rows,
        chunks: _Chunks,
        p_ZCC: torch.Tensor,
        w_ZCK: torch.Tensor,
        grad_o_ZCV: torch.Tensor,
        grad_state_SHKV: torch.Tensor,
    ) -> _WalkBack:
        grad_new_v_ZCV = torch.bmm(p_ZCC.mT, grad_o_ZCV)
        decayed_q_ZCK = chunks.from_start_ZCK * rows.q_ZCK
        decayed_k_ZCK = chunks.to_end_ZCK * rows.k_ZCK
        grad_ends_ZKV = w_ZCK.new_empty(w_ZCK.shape[0], w_ZCK.shape[-1], grad_o_ZCV.shape[-1])
        grad_state_XKV = layout.ordered(grad_state_SHKV)
        for step in reversed(layout.steps):
            now_XKV = grad_state_XKV[: step.stop - step.start]
            grad_ends_ZKV[step].copy_(now_XKV)
            grad_new_v_ZCV[step].baddbmm_(decayed_k_ZCK[step], now_XKV)
            now_XKV.mul_(chunks.decay_ZK1[step]).baddbmm_(decayed_q_ZCK[step].mT, grad_o_ZCV[step])
            now_XKV.baddbmm_(w_ZCK[step].mT, grad_new_v_ZCV[step], alpha=-1)
        return _WalkBack(grad_new_v_ZCV, grad_ends_ZKV, grad_state_XKV)


def _gradients(
    layout: Layout,
    rows: _Rows,
    g_BTHK: torch.Tensor,
    initial_state_SHKV: torch.Tensor | None,
    grad_o_BTHV: torch.Tensor,
    grad_state_SHKV: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return the gradient of the initial state; and those of q, k, v, g and beta, as rows."""
    chunks, p_ZCC, w_ZCK = _Chunks.of(layout, rows, g_BTHK)
    walk = _Walk.of(layout, rows, chunks, w_ZCK, initial_state_SHKV)
    grad_o_ZCV = rows.cut(layout, grad_o_BTHV).mul_(scale)
    back = _WalkBack.of(layout, rows, chunks, p_ZCC, w_ZCK, grad_o_ZCV, grad_state_SHKV)
    del p_ZCC, w_ZCK
    # gradient of diag(beta) (V - (eG*K) S), the right side of the triangular system
    grad_right_ZCV = torch.bmm(chunks.x_ZCC.mT, back.grad_new_v_ZCV)
    # gradients of diag(beta) A, and of P
    grad_a_ZCC = torch.bmm(grad_right_ZCV, walk.new_v_ZCV.mT).neg_().tril_(-1)
    grad_p_ZCC = torch.bmm(grad_o_ZCV, walk.new_v_ZCV.mT).tril_()
    grad_qk_ZC2K, grad_g_ZCK, grad_beta_ZC1 = _gradients_through_states(
        rows, chunks, walk, back, grad_o_ZCV, grad_right_ZCV
    )
    grad_beta_ZC1 += (grad_right_ZCV * rows.v_ZCV).sum(-1, keepdim=True)
    grad_beta_ZC1 += (grad_a_ZCC * chunks.a_ZCC).sum(-1, keepdim=True)
    grad_state_XKV = back.grad_state_XKV
    del chunks, walk, back, grad_o_ZCV
    gates, _ = _gates(layout, rows, g_BTHK)
    grad_a_ZCC.mul_(rows.beta_ZC1)
    add_gradients_of_products(gates, rows.qk_ZC2K, grad_p_ZCC, grad_a_ZCC, grad_qk_ZC2K, grad_g_ZCK)
    grad_v_ZCV = grad_right_ZCV.mul_(rows.beta_ZC1)
    return grad_state_XKV, (*grad_qk_ZC2K.unbind(2), grad_v_ZCV, grad_g_ZCK, grad_beta_ZC1)


def _gradients_through_states(
    rows: _Rows,
    chunks: _Chunks,
    walk: _Walk,
    back: _WalkBack,
    grad_o_ZCV: torch.Tensor,
    grad_right_ZCV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries and keys, gates and strengths through the states: a chunk reads the state before
    it and writes the state after it."""
    q_ZCK, k_ZCK = rows.q_ZCK, rows.k_ZCK
    grad_qk_ZC2K = torch.empty_like(rows.qk_ZC2K)
    grad_q_ZCK, grad_k_ZCK = grad_qk_ZC2K.unbind(2)
    grad_q_ZCK.copy_(torch.bmm(grad_o_ZCV, walk.starts_ZKV.mT).mul_(chunks.from_start_ZCK))
    read_ZCK = torch.bmm(grad_right_ZCV, walk.starts_ZKV.mT).neg_().mul_(chunks.from_start_ZCK)
    grad_beta_ZC1 = (read_ZCK * k_ZCK).sum(-1, keepdim=True)
    read_ZCK.mul_(rows.beta_ZC1)
    written_ZCK = torch.bmm(walk.new_v_ZCV, back.grad_ends_ZKV.mT).mul_(chunks.to_end_ZCK)
    torch.add(read_ZCK, written_ZCK, out=grad_k_ZCK)

    grad_sum_ZCK = read_ZCK.mul_(k_ZCK).addcmul_(grad_q_ZCK, q_ZCK)
    grad_decay_ZK = (walk.starts_ZKV * back.grad_ends_ZKV).sum(-1)
    grad_sum_ZCK[:, -1].addcmul_(grad_decay_ZK, chunks.from_start_ZCK[:, -1])
    grad_g_ZCK = gates_up_to_row(grad_sum_ZCK)
    add_to_gates_after_row(grad_g_ZCK, written_ZCK.mul_(k_ZCK))
    return grad_qk_ZC2K, grad_g_ZCK, grad_beta_ZC1
