"""The low-rank term computed on the host, with gradients: the offload that the report intended.

The published code detaches ``b`` when it copies it to the host, so that ``b`` gets no gradient. Offload saves no memory
compared to ``factored`` either: the tensors that it moves to the host have rank R.
"""

# N tokens, D width, F width of the result, R rank, C tokens of a chunk

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..arguments import require_at_least_one
from ..derivatives import first_derivative_only
from ..products import as_rows, is_column_major, product_into, sum_dtype, weight_gradient, wide_product
from .arguments import NptTensors


def offload_npt_linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    modulation: torch.Tensor,
    *,
    tokens_per_chunk: int = 512,
) -> torch.Tensor:
    """Equals ``hidden @ weight + ((hidden @ a) * modulation) @ b``; the second term is computed on the host.

    The next chunk is copied to pinned memory while the host computes this one. Peak above inputs,
    ``C = tokens_per_chunk`` and ``e`` the item size: ``(N + C)*F*e`` forward, and in a train step the gradients and
    ``C*D*e``. Only the inputs are saved on the device.
    """
    tensors = NptTensors(hidden, weight, a, b, modulation).checked()
    result: torch.Tensor = _Offload.apply(require_at_least_one("tokens_per_chunk", tokens_per_chunk), *tensors)
    return result


class _Offload(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_per_chunk: int, *given: torch.Tensor) -> torch.Tensor:
        ctx.tokens_per_chunk = tokens_per_chunk
        ctx.save_for_backward(*given)
        hidden, weight_DF, a, b, modulation = given
        a_DR, b_RF = a.cpu(), b.cpu()
        result = hidden @ weight_DF
        result_NF = as_rows(result)
        for chunk, hidden_CD, modulation_CR in _on_host(tokens_per_chunk, hidden, modulation):
            scaled_CR = (wide_product(hidden_CD, a_DR) * modulation_CR).to(b.dtype)
            result_NF[chunk] += _to(result, scaled_CR @ b_RF)
        return result

    @staticmethod
    @first_derivative_only("npt_linear")
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.autocast(upstream.device.type, enabled=False):  # backward uses the dtypes of forward
            return None, *_gradients(ctx, upstream)


def _gradients(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients in the order of the tensors. ``hidden @ a`` is recomputed instead of saved."""
    hidden, weight_DF, a, b, modulation = ctx.saved_tensors
    _, for_hidden, for_weight, for_a, for_b, for_modulation = ctx.needs_input_grad
    a_DR, b_RF = a.cpu(), b.cpu()
    grad_hidden = upstream @ weight_DF.T if for_hidden else None
    column_major = is_column_major(weight_DF)
    grad_weight_DF = weight_gradient(as_rows(hidden), as_rows(upstream), column_major) if for_weight else None
    grad_modulation = modulation.new_empty(modulation.shape) if for_modulation else None
    grad_a_DR, grad_b_RF = (torch.zeros_like(host, dtype=sum_dtype(host.dtype)) for host in (a_DR, b_RF))
    for chunk, hidden_CD, modulation_CR, upstream_CF in _on_host(ctx.tokens_per_chunk, hidden, modulation, upstream):
        down_CR, back_CR = wide_product(hidden_CD, a_DR), wide_product(upstream_CF, b_RF.T)
        grad_down_CR = (back_CR * modulation_CR).to(b.dtype)
        if for_a:
            product_into(grad_a_DR, hidden_CD.T, grad_down_CR, add=True)
        if for_b:
            product_into(grad_b_RF, (down_CR * modulation_CR).to(b.dtype).T, upstream_CF, add=True)
        if grad_modulation is not None:
            as_rows(grad_modulation)[chunk] = _to(upstream, (back_CR * down_CR).to(b.dtype))
        if grad_hidden is not None:
            as_rows(grad_hidden)[chunk] += _to(upstream, grad_down_CR @ a_DR.T)
    return (
        grad_hidden,
        grad_weight_DF,
        grad_a_DR.to(a) if for_a else None,
        grad_b_RF.to(b) if for_b else None,
        grad_modulation,
    )


def _on_host(rows_per_chunk: int, *tensors: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield the slice of each chunk and host copies of its rows. The next chunk is copied while the caller uses one."""
    all_rows = [as_rows(tensor) for tensor in tensors]
    num_rows = all_rows[0].shape[0]
    chunks = [slice(start, start + rows_per_chunk) for start in range(0, num_rows, rows_per_chunk)]
    if not tensors[0].is_cuda:
        yield from ((chunk, *(rows[chunk] for rows in all_rows)) for chunk in chunks)
        return
    device = tensors[0].device
    copies = torch.cuda.Stream(device)
    copies.wait_stream(torch.cuda.current_stream(device))

    def begun(chunk: slice) -> tuple[list[torch.Tensor], Any]:
        with torch.cuda.stream(copies):
            parts = [rows[chunk] for rows in all_rows]
            hosts = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts]
            for host, part in zip(hosts, parts, strict=True):
                host.copy_(part, non_blocking=True)
            return hosts, copies.record_event()

    ahead = begun(chunks[0])
    for chunk, following in zip(chunks, [*chunks[1:], None], strict=True):
        hosts, is_there = ahead
        if following is not None:
            ahead = begun(following)
        is_there.synchronize()
        yield chunk, *hosts


def _to(like: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    """Copy ``host`` to the device of ``like`` without waiting for the copy."""
    return host.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else host
