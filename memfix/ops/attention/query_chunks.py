"""Attention a chunk of queries at a time: forward frees the weights of each chunk, and backward recomputes them."""

# B batch, G key-value heads, R query heads of each, Q queries, C queries of a chunk, K keys, V width of a value

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ..call import takes
from ..derivatives import first_derivative_only, without_autocast
from ..products import sum_dtype
from .arguments import AttentionTensors, ChunkOptions
from .query_chunk import attend, chunks, rows_of

_FOLDED = ("k", "v")  # every chunk reads all of both, with their heads folded


@takes(AttentionTensors, ChunkOptions)
def query_chunks_attention(
    tensors: AttentionTensors, options: ChunkOptions
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Equals ``softmax(q @ k.mT * scale) @ v``.

    Only the inputs are held for backward, and with dropout the state of the random generator. The largest temporaries
    are ``B*G*R*C*K*e`` bytes, ``C = queries_per_chunk``: two of them in forward, five in a train step. Gradients of
    keys and values are summed in float32.
    """
    out_BGRQV, map_BGRQK = _QueryChunks.apply(options.fitting(tensors), *tensors)
    return (out_BGRQV, map_BGRQK) if options.keep_map else out_BGRQV


class _QueryChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: ChunkOptions, *given: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        tensors = AttentionTensors(*given)
        ctx.options = replace(options, keep_map=False)  # backward needs no map
        ctx.random_state = _random_state(tensors.q.device) if options.dropout else None
        ctx.save_for_backward(*given)
        ctx.set_materialize_grads(False)
        q, k, v = given[:3]
        out_BGRQV = q.new_empty(*q.shape[:4], v.shape[3])
        map_BGRQK = q.new_empty(*q.shape[:4], k.shape[2], dtype=tensors.map_dtype) if options.keep_map else None
        with without_autocast(q):  # the tensors already have autocast's dtype
            for rows, chunk in chunks(tensors, options):
                out_BGRCV, weights_BGRCK = attend(chunk, rows, options)
                out_BGRQV[..., rows, :] = out_BGRCV
                if map_BGRQK is not None:
                    map_BGRQK[..., rows, :] = weights_BGRCK
        if map_BGRQK is not None:
            ctx.mark_non_differentiable(map_BGRQK)
        return out_BGRQV, map_BGRQK

    @staticmethod
    @first_derivative_only("attention")
    def backward(ctx: Any, upstream_BGRQV: torch.Tensor, upstream_of_map: None) -> tuple[torch.Tensor | None, ...]:
        tensors = AttentionTensors(*ctx.saved_tensors)
        needed = dict(zip(AttentionTensors._fields, ctx.needs_input_grad[1:], strict=True))
        wanted = [name for name, is_needed in needed.items() if is_needed]
        sums = {name: _zeros_for_gradient(getattr(tensors, name), name) for name in wanted}
        device = upstream_BGRQV.device
        with _random_state_again(ctx.random_state, device), without_autocast(upstream_BGRQV):
            for rows, chunk in chunks(tensors, ctx.options):
                leaves = chunk._replace(**{name: getattr(chunk, name).detach().requires_grad_() for name in wanted})
                with torch.enable_grad():
                    out_BGRCV, _ = attend(leaves, rows, ctx.options)
                found = torch.autograd.grad(
                    out_BGRCV, [getattr(leaves, name) for name in wanted], upstream_BGRQV[..., rows, :]
                )
                for name, gradient in zip(wanted, found, strict=True):
                    (sums[name] if name in _FOLDED else rows_of(sums[name], rows)).add_(gradient)
        finished = (
            sums[name].to(tensor.dtype).view(tensor.shape) if name in sums else None
            for name, tensor in tensors._asdict().items()
        )
        return None, *finished


def _zeros_for_gradient(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return zeros for a gradient, in float32 or wider if chunks are summed; a row of a query is in one chunk alone."""
    if name in _FOLDED:
        return tensor.new_zeros(tensor.shape[:2].numel(), *tensor.shape[2:], dtype=sum_dtype(tensor.dtype))
    is_in_one_chunk = tensor.shape[-2] > 1
    return tensor.new_zeros(tensor.shape, dtype=None if is_in_one_chunk else sum_dtype(tensor.dtype))


# ---------------------------------------------------------------- dropout
def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextlib.contextmanager
def _random_state_again(state: torch.Tensor | None, device: torch.device) -> Iterator[None]:
    """Let the generator repeat its draws from ``state`` on, and restore the caller's state afterwards."""
    if state is None:
        yield
        return
    is_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if is_cuda else []):
        torch.cuda.set_rng_state(state, device) if is_cuda else torch.set_rng_state(state)
        yield
