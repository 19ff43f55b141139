"""The fix that the report intended: the weights of a chunk of tokens at a time, recomputed in backward."""

# N tokens, D width, F width of the result, R rank, C tokens of a chunk

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..arguments import require_at_least_one
from ..derivatives import first_derivative_only
from ..products import as_rows, sum_dtype
from .arguments import NptTensors

_PER_TOKEN = (0, 4)  # argument indices of hidden and modulation: a chunk has only its rows of them


def token_chunks_npt_linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    modulation: torch.Tensor,
    *,
    tokens_per_chunk: int = 1,
) -> torch.Tensor:
    """Equals ``hidden @ (weight + einsum("...r,dr,rf->...df", modulation, a, b))``.

    Peak above inputs and results, ``C = tokens_per_chunk`` and ``e`` the item size: ``C*D*F*e`` forward and twice as
    much in a train step. Gradients of weights are summed in float32. Only the inputs are saved for backward.
    """
    tensors = NptTensors(hidden, weight, a, b, modulation).checked()
    result: torch.Tensor = _TokenChunks.apply(require_at_least_one("tokens_per_chunk", tokens_per_chunk), *tensors)
    return result


class _TokenChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_per_chunk: int, *given: torch.Tensor) -> torch.Tensor:
        ctx.tokens_per_chunk = tokens_per_chunk
        ctx.save_for_backward(*given)
        hidden, weight_DF, *_ = given
        result = hidden.new_empty(*hidden.shape[:-1], weight_DF.shape[1])
        result_NF = as_rows(result)
        for chunk, parts in _chunks(given, tokens_per_chunk):
            torch.bmm(*_operands_of(*parts), out=result_NF[chunk].unsqueeze(1))
        return result

    @staticmethod
    @first_derivative_only("npt_linear")
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given, upstream_NF = ctx.saved_tensors, as_rows(upstream)
        is_needed = ctx.needs_input_grad[1:]
        wanted = [place for place, needed in enumerate(is_needed) if needed]
        sums = {place: _zeros_for_gradient(given[place], place) for place in wanted}
        for chunk, parts in _chunks(given, ctx.tokens_per_chunk):
            leaves = [part.detach().requires_grad_(needed) for part, needed in zip(parts, is_needed, strict=True)]
            upstream_C1F = upstream_NF[chunk].unsqueeze(1)
            # backward uses the dtypes of forward
            with torch.enable_grad(), torch.autocast(upstream.device.type, enabled=False):
                result_C1F = torch.bmm(*_operands_of(*leaves))
                found = torch.autograd.grad(result_C1F, [leaves[place] for place in wanted], upstream_C1F)
            for place, gradient in zip(wanted, found, strict=True):
                (sums[place][chunk] if place in _PER_TOKEN else sums[place]).add_(gradient)
        finished = (
            sums[place].to(given[place].dtype).view(given[place].shape) if place in sums else None for place in range(5)
        )
        return None, *finished


def _chunks(given: Sequence[torch.Tensor], tokens_per_chunk: int) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """Yield the slice of each chunk, and all tensors with the chunk's rows of hidden and modulation."""
    hidden, *weights, modulation = given
    hidden_ND, modulation_NR = as_rows(hidden), as_rows(modulation)
    for start in range(0, hidden_ND.shape[0], tokens_per_chunk):
        chunk = slice(start, start + tokens_per_chunk)
        yield chunk, [hidden_ND[chunk], *weights, modulation_NR[chunk]]


def _operands_of(
    hidden_CD: torch.Tensor,
    weight_DF: torch.Tensor,
    a_DR: torch.Tensor,
    b_RF: torch.Tensor,
    modulation_CR: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden rows of a chunk, and the weight of each token."""
    weight_CDF = (modulation_CR.unsqueeze(1) * a_DR) @ b_RF
    weight_CDF += weight_DF
    return hidden_CD.unsqueeze(1), weight_CDF


def _zeros_for_gradient(tensor: torch.Tensor, place: int) -> torch.Tensor:
    """Return zeros: rows of tokens in their dtype, or the sum for a weight, with its strides, in float32 or wider."""
    if place in _PER_TOKEN:
        return tensor.new_zeros(tensor.shape[:-1].numel(), tensor.shape[-1])
    return torch.zeros_like(tensor, dtype=sum_dtype(tensor.dtype))
