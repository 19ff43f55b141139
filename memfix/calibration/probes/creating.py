"""Operators that create, move, select and draw, some of which need unexpected temporaries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .registry import Step, bf16, c64, f32, f64, probe

_ROWS, _COLUMNS = 3001, 1000


def _laid_out(device: str, layout: str, dtype: torch.dtype = f32) -> torch.Tensor:
    if layout == "transposed":
        return torch.ones(_COLUMNS, _ROWS, dtype=dtype, device=device).t()
    if layout == "gapped":
        return torch.ones(_ROWS, 2 * _COLUMNS, dtype=dtype, device=device)[:, ::2]
    if layout == "repeated":
        return torch.ones(_COLUMNS, dtype=dtype, device=device).expand(_ROWS, _COLUMNS)
    return torch.ones(_ROWS, _COLUMNS, dtype=dtype, device=device)


probe("to_host", layout=("contiguous", "transposed", "gapped"), dtype=(f32, bf16), non_blocking=(False, True))(
    lambda device, layout, dtype, non_blocking: partial(
        _laid_out(device, layout).to, "cpu", dtype, non_blocking=non_blocking
    )
)
probe("from_host", layout=("contiguous", "gapped"), dtype=(f32, bf16), non_blocking=(False, True))(
    lambda device, layout, dtype, non_blocking: partial(
        _laid_out(device, layout).copy_, torch.ones(_ROWS, _COLUMNS, dtype=dtype), non_blocking=non_blocking
    )
)
probe("on_the_gpu", layout=("contiguous", "transposed", "gapped", "repeated"))(
    lambda device, layout: partial(
        lambda x, to: (to.copy_(x), x.to(f64), x.clone(), x.contiguous()),
        _laid_out(device, layout),
        _laid_out(device, "gapped", bf16),
    )
)


@probe(left=(f32, bf16), right=(f32, f64))
def _where(device: str, left: torch.dtype, right: torch.dtype) -> Step:
    mask, a, b = (_laid_out(device, "contiguous", dtype) for dtype in (torch.bool, left, right))
    return lambda: (torch.where(mask, a, b), torch.where(mask, a, 0.0), torch.where(mask, a, torch.ones(())))


probe("roll", axes=((0,), (1,), (0, 1), ()), layout=("contiguous", "transposed"))(
    lambda device, axes, layout: partial(torch.roll, _laid_out(device, layout), (3,) * max(1, len(axes)), axes)
)
probe("unfold", step=(3, 5), size=(5,))(
    lambda device, step, size: partial(
        lambda x: x.unfold(1, size, step).sum().backward(), _laid_out(device, "contiguous").requires_grad_()
    )
)
_MAKERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "cat_of_two_dtypes": lambda x: torch.cat([x, x.to(bf16)]),
    "cat_of_many": lambda x: torch.cat([x] * 200),
    "stack": lambda x: torch.stack([x, x], 1),
    "flip": lambda x: torch.flip(x, (0, 1)),
    "repeat": lambda x: x.repeat(2, 3),
    "tril": lambda x: (torch.tril(x), torch.triu(x)),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1.0),
    "clamp": lambda x: (x.clamp(0, 1), x.nan_to_num(), x.lerp(x, 0.5), x.addcmul(x, x)),
    "pad": lambda x: torch.nn.functional.pad(x, (1, 2, 3, 4)),
    "ranges": lambda x: [make(0, 9, 1000, device=x.device) for make in (torch.linspace, torch.logspace)],
    "channel_shuffle": lambda x: torch.channel_shuffle(torch.cat([x, x]).view(1, 4, -1, 1), 2),
    "diag_embed": lambda x: torch.diag_embed(x[:10]),
    "mixed": lambda x: (x + x.to(bf16), x * x.to(f64), x > 1),
}


probe("made", of=tuple(_MAKERS))(lambda device, of: partial(_MAKERS[of], _laid_out(device, "transposed")))
probe("complex", layout=("contiguous", "transposed"))(
    lambda device, layout: partial(
        lambda z: (z.abs(), z.angle(), z.conj().resolve_conj(), torch.polar(z.real, z.imag), z * z),
        _laid_out(device, layout, c64),
    )
)
_DRAWN: dict[str, Callable[[torch.Tensor], Any]] = {
    "bernoulli": torch.bernoulli,
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.5),
    "normal_of_means": lambda x: torch.normal(x, 1.0),
    "normal_of_deviations": lambda x: torch.normal(0.0, x),
    "normal_of_both": lambda x: torch.normal(x, x),
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "poisson": torch.poisson,
    "binomial": lambda x: torch.binomial(x.float(), torch.full_like(x, 0.3, dtype=f32)),
    "gamma": torch._standard_gamma,
    "dirichlet": torch._sample_dirichlet,
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5),
}


probe("drawn", of=tuple(_DRAWN), dtype=(f32, bf16))(
    lambda device, of, dtype: partial(_DRAWN[of], _laid_out(device, "contiguous", dtype))
)
