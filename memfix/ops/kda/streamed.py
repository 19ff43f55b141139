"""KDA in chunks, as the report meant it: the scan consumes a chunk's transitions and writes before the next are made.

All chunks share two buffers: one holds a chunk's transitions, the other its writes, which the scan overwrites with the
states. Backward refills both from the state at the start of the chunk: only these states and the inputs are held.
"""

# B batch, T tokens, H heads, K width of a key, V width of a value, S sequences, N chunks, C tokens of a chunk,
# P tokens of a piece of it, Z = B x H

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..derivatives import first_derivative_only, without_autocast
from .arguments import KdaOptions, KdaTensors, Outputs, Span, kda_form, scale_of, wide_dtype

TOKENS_PER_PIECE = 16  # their state gradients are alive together in backward: more take memory, fewer take launches


@kda_form
def streamed_kda(tensors: KdaTensors, options: KdaOptions) -> Outputs:
    """Equals ``S = transition_t @ S + write_t; o_t = scale * S^T q_t``, ``chunk_size`` transitions at a time.

    Peak above inputs, ``C = chunk_size`` and ``w`` the item size of float32 or wider: the two buffers,
    ``B*C*H*K*(K + V)*w``; in training also the gradients, the state gradients of a piece, ``16*B*H*K*V*w``, and the
    states at chunk starts, ``B*(T/C)*H*K*V*w``. Backward may run more than once.
    """
    given = (*tensors.inputs, tensors.initial_state_SHKV)
    # ask here: inside a Function grad mode is off, and requires_grad says nothing
    wants_gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    scale = scale_of(tensors.q_BTHK, options.scale)
    return _Streamed.apply(*given, tensors.spans, options.chunk_size, scale, wants_gradient)


class _Streamed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Outputs:
        *inputs, initial_state_SHKV, spans, chunk_size, scale, wants_gradient = given
        with without_autocast(inputs[0]):
            scan = _Scan.of(tuple(inputs), spans, chunk_size, scale)
            o_BTHV, state_SHKV, starts = scan.forward(initial_state_SHKV, wants_gradient)
        if wants_gradient:
            ctx.save_for_backward(*inputs, *starts)
            ctx.options = (spans, chunk_size, scale)
        return o_BTHV, state_SHKV

    @staticmethod
    @first_derivative_only("kda")
    def backward(ctx: Any, grad_o_BTHV: torch.Tensor, grad_state_SHKV: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: under a checkpoint every access unpacks the tensors again
        inputs, starts = saved[:5], saved[5:]
        with without_autocast(grad_o_BTHV):
            scan = _Scan.of(inputs, *ctx.options)
            gradients = scan.backward(grad_o_BTHV, grad_state_SHKV, starts)
        wanted = (
            gradient if needed else None for gradient, needed in zip(gradients, ctx.needs_input_grad[:6], strict=True)
        )
        return *wanted, None, None, None, None


@dataclass(frozen=True)
class _Chunk:
    """The inputs of a chunk, one token per row, upcast; ``tokens`` and ``states`` are its slices of T and S."""

    tokens: slice
    states: slice
    q_CZK: torch.Tensor
    k_CZK: torch.Tensor
    v_CZV: torch.Tensor
    decay_CZK: torch.Tensor
    beta_CZ1: torch.Tensor


@dataclass(frozen=True)
class _Scan:
    """The scan over all chunks, with the two buffers that they share."""

    inputs: tuple[torch.Tensor, ...]
    chunk_slices: list[tuple[slice, slice]]  # the slice of T of each chunk, and the slice of S of its sequences
    scale: float
    num_states: int
    transitions_CZKK: torch.Tensor
    states_CZKV: torch.Tensor  # C + 1 states: the first is the one before the chunk

    @staticmethod
    def of(inputs: tuple[torch.Tensor, ...], spans: Sequence[Span], chunk_size: int, scale: float) -> _Scan:
        q_BTHK, _, v_BTHV, _, _ = inputs
        batch, _, num_heads, key_width = q_BTHK.shape
        longest = min(chunk_size, max(span.num_tokens for span in spans))
        wide = wide_dtype(q_BTHK.dtype)
        size = (batch * num_heads, key_width)
        return _Scan(
            inputs,
            [(tokens, span.states) for span in spans for tokens in span.cut(chunk_size)],
            scale,
            spans[-1].states.stop,
            q_BTHK.new_empty((longest, *size, key_width), dtype=wide),
            q_BTHK.new_empty((longest + 1, *size, v_BTHV.shape[-1]), dtype=wide),
        )

    def forward(
        self, initial_state_SHKV: torch.Tensor | None, keeps_starts: bool
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Return outputs, final states and, for backward, the state before every chunk."""
        _, _, v_BTHV, _, _ = self.inputs
        o_BTHV = torch.empty_like(v_BTHV, memory_format=torch.contiguous_format)
        state_SHKV = self._initial(initial_state_SHKV)
        starts = []
        for chunk in self._chunks():
            before_BHKV = state_SHKV[chunk.states]
            if keeps_starts:
                starts.append(before_BHKV.clone())
            states_CZKV = self._visit(chunk, before_BHKV)
            before_BHKV.copy_(states_CZKV[-1].view_as(before_BHKV))
            o_CZV = _read(states_CZKV[1:], chunk.q_CZK).mul_(self.scale)
            _put_back(o_BTHV, chunk.tokens, o_CZV)
        return o_BTHV, state_SHKV, starts

    def backward(
        self, grad_o_BTHV: torch.Tensor, grad_state_SHKV: torch.Tensor, starts: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradients of the five inputs and of the initial state."""
        gradients = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in self.inputs]
        grad_state_SHKV = grad_state_SHKV.clone(memory_format=torch.contiguous_format)
        for chunk, before_BHKV in zip(self._chunks(backwards=True), reversed(starts), strict=True):
            self._visit(chunk, before_BHKV)
            grad_o_CZV = _taken(grad_o_BTHV, chunk.tokens, before_BHKV.dtype)
            carried_BHKV = grad_state_SHKV[chunk.states]
            carried_ZKV = carried_BHKV.flatten(0, 1)
            for first in reversed(range(0, grad_o_CZV.shape[0], TOKENS_PER_PIECE)):
                piece = slice(first, first + TOKENS_PER_PIECE)
                carried_ZKV, *found = self._piece_backward(chunk, piece, grad_o_CZV[piece], carried_ZKV)
                start = chunk.tokens.start + first
                for gradient, part_PZx in zip(gradients, found, strict=True):
                    _put_back(gradient, slice(start, start + part_PZx.shape[0]), part_PZx)
            carried_BHKV.copy_(carried_ZKV.view_as(carried_BHKV))
        return *gradients, grad_state_SHKV

    def _initial(self, initial_state_SHKV: torch.Tensor | None) -> torch.Tensor:
        if initial_state_SHKV is not None:
            return initial_state_SHKV.clone(memory_format=torch.contiguous_format)
        num_heads = self.inputs[0].shape[2]
        return self.states_CZKV.new_zeros(self.num_states, num_heads, *self.states_CZKV.shape[2:])

    def _chunks(self, backwards: bool = False) -> Iterator[_Chunk]:
        for tokens, states in reversed(self.chunk_slices) if backwards else self.chunk_slices:
            q, k, v, g, beta = (_taken(tensor, tokens, self.states_CZKV.dtype) for tensor in self.inputs)
            yield _Chunk(tokens, states, q, k, v, g.exp(), beta.unsqueeze(-1))

    def _visit(self, chunk: _Chunk, before_BHKV: torch.Tensor) -> torch.Tensor:
        """Fill the buffers: transitions, and the state before the chunk and after each of its tokens."""
        num_tokens = chunk.q_CZK.shape[0]
        transitions_CZKK, states_CZKV = self.transitions_CZKK[:num_tokens], self.states_CZKV[: num_tokens + 1]
        written_CZK = chunk.beta_CZ1 * chunk.k_CZK
        states_CZKV[0].copy_(before_BHKV.flatten(0, 1))
        _outer(written_CZK, chunk.v_CZV, out=states_CZKV[1:])
        _outer(written_CZK.neg_(), chunk.k_CZK * chunk.decay_CZK, out=transitions_CZKK)
        transitions_CZKK.diagonal(dim1=-2, dim2=-1).add_(chunk.decay_CZK)
        for token in range(num_tokens):
            states_CZKV[token + 1].baddbmm_(transitions_CZKK[token], states_CZKV[token])
        return states_CZKV

    def _piece_backward(
        self, chunk: _Chunk, piece: slice, grad_o_PZV: torch.Tensor, carried_ZKV: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradient of the state before the piece, and those of the piece's q, k, v, g and beta.

        With ``u = v - S^T (a*k)`` a token does ``S <- a*S + beta k u^T``, so no gradients of transitions and writes
        are needed. ``carried_ZKV`` is the gradient of the state after the piece from later tokens.
        """
        num_tokens = grad_o_PZV.shape[0]
        transitions_PZKK = self.transitions_CZKK[piece]
        before_PZKV = self.states_CZKV[piece][:num_tokens]
        after_PZKV = self.states_CZKV[1:][piece][:num_tokens]
        q, k, v, a, beta = (
            part[piece] for part in (chunk.q_CZK, chunk.k_CZK, chunk.v_CZV, chunk.decay_CZK, chunk.beta_CZ1)
        )
        grad_o_PZV = grad_o_PZV * self.scale
        grad_PZKV = torch.empty_like(after_PZKV)
        _outer(q, grad_o_PZV, out=grad_PZKV)
        grad_PZKV[-1].add_(carried_ZKV)
        for token in reversed(range(num_tokens - 1)):
            grad_PZKV[token].baddbmm_(transitions_PZKK[token + 1].mT, grad_PZKV[token + 1])
        carried_ZKV = torch.bmm(transitions_PZKK[0].mT, grad_PZKV[0])

        decayed_k = a * k
        u_PZV = v - _read(before_PZKV, decayed_k)
        grad_u_PZV = beta * _read(grad_PZKV, k)
        grad_written_PZK = _apply(grad_PZKV, u_PZV)
        grad_decayed_k = _apply(before_PZKV, grad_u_PZV).neg_()
        grad_a = grad_PZKV.mul_(before_PZKV).sum(-1).add_(k * grad_decayed_k)
        return (
            carried_ZKV,
            _apply(after_PZKV, grad_o_PZV),
            (beta * grad_written_PZK).addcmul_(a, grad_decayed_k),
            grad_u_PZV,
            grad_a.mul_(a),
            (k * grad_written_PZK).sum(-1),
        )


def _taken(x_BTHx: torch.Tensor, tokens: slice, dtype: torch.dtype) -> torch.Tensor:
    """Return tokens as ``[C, Z, ...]``, contiguous: a step of the scan reads one token of all sequences and heads."""
    x_CBHx = x_BTHx[:, tokens].transpose(0, 1)
    return x_CBHx.to(dtype, memory_format=torch.contiguous_format).contiguous().flatten(1, 2)


def _put_back(x_BTHx: torch.Tensor, tokens: slice, part_CZx: torch.Tensor) -> None:
    target = x_BTHx[:, tokens].transpose(0, 1)
    target.copy_(part_CZx.view(target.shape))


def _outer(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> None:
    torch.mul(left.unsqueeze(-1), right.unsqueeze(-2), out=out)


def _read(state: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return ``S^T k``."""
    return (key.unsqueeze(-2) @ state).squeeze(-2)


def _apply(state: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return ``S v``."""
    return (state @ value.unsqueeze(-1)).squeeze(-1)
