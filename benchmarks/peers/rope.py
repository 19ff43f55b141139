"""Rope compared with Liger's kernel, torch.compile and the usual formula; the floor is a copy of the same bytes.

Liger rotates queries and keys in one call, and in place: it overwrites its input and the upstream gradient. Here it
gets the input as queries and one head of keys, 1/H more bytes than the others.
"""

# B sequences, T positions, H heads, D width of a head

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from memfix.contract import Form
from memfix.meters.simulated.patches import applied
from memfix.ops.rope import triton
from memfix.ops.rope.contract import contract
from memfix.ops.rope.floor import one_copy

from . import Comparison, Entry, Peer, Table


@functools.lru_cache(maxsize=4)
def _cached(
    length: int, width: int, base: float, offset: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines ``[1, T, D]`` as models cache them: of float32 angles, rounded to the model's dtype."""
    frequencies_P = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    angles_TP = torch.arange(offset, offset + length, dtype=torch.float32, device=device)[:, None] * frequencies_P
    angles_1TD = torch.cat([angles_TP, angles_TP], dim=-1)[None]
    return angles_1TD.cos().to(dtype), angles_1TD.sin().to(dtype)


def _cos_sin(x: Tensor, base: float, offset: int) -> tuple[Tensor, Tensor]:
    return _cached(x.shape[1], x.shape[3], base, offset, x.dtype, x.device)


def _formula(x: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos_T1D + torch.cat([-second, first], dim=-1) * sin_T1D


def _by_formula(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the usual formula, computed by ``function`` from cached cosines and sines."""

    def turned(x: Tensor, *, base: float, offset: int) -> Tensor:
        cos, sin = _cos_sin(x, base, offset)
        return function(x, cos.unsqueeze(2), sin.unsqueeze(2))

    return turned


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for every shape of a table, with a raised limit of recompilations: beyond it torch runs eagerly."""
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(function, dynamic=False)


def _liger() -> Callable[..., Any]:
    from liger_kernel.ops.rope import LigerRopeFunction

    keys: dict[tuple[object, ...], Tensor] = {}

    def turned(x: Tensor, *, base: float, offset: int) -> Tensor:
        num_sequences, length, _, width = x.shape
        key = (num_sequences, length, width, x.dtype, x.device)
        if key not in keys:
            keys[key] = torch.zeros(num_sequences, length, 1, width, dtype=x.dtype, device=x.device)
        cos, sin = _cos_sin(x, base, offset)
        queries, _ = LigerRopeFunction.apply(x.transpose(1, 2), keys[key].transpose(1, 2), cos, sin)
        return queries.transpose(1, 2)  # type: ignore[no-any-return]

    return turned


def _cut(**tiles: int) -> Callable[..., Tensor]:
    """Return form ``triton`` with other tile sizes in its forward."""
    cut = replace(triton.TILES, **tiles)

    def turned(x: Tensor, *, base: float, offset: int) -> Tensor:
        with applied([(triton, "TILES", cut)]):
            return triton.triton_rope(x, base=base, offset=offset)

    return turned


VARIANTS = {
    "triton_1024_pairs": {"pairs": 1024},
    "triton_4096_pairs": {"pairs": 4096},
    "triton_4096_pairs_8_warps": {"pairs": 4096, "num_warps": 8},
}
"""Other tile sizes of the same kernel, timed beside the default."""
_FORMS = ("naive", "shared_table", "triton")
_QUERIES_AND_KEYS = {
    "queries": "B=4 T=8192 H=32 D=128",
    "keys": "B=4 T=8192 H=8 D=128",
    "long keys": "B=1 T=65536 H=8 D=128",
}

COMPARISON = Comparison(
    peers={
        "liger": Peer("liger-kernel", _liger, ("liger_kernel", "triton")),
        "formula": Peer("torch", lambda: _by_formula(_formula)),
        "compiled": Peer("torch", lambda: _by_formula(_compiled(_formula)), ("triton",)),
        "compiled_naive": Peer("torch", lambda: _compiled(contract.naive), ("triton",)),
    },
    tables={
        "shapes": Table(
            [Entry(name, settings, _FORMS) for name, settings in ({"incident": ""} | _QUERIES_AND_KEYS).items()],
            ("train", "forward"),
        ),
        # like layers of a model: the host runs ahead of the GPU, and the calls share one backward
        "layers": Table(
            [
                Entry(name, settings, forms=("shared_table", "triton"), peers=("liger", "formula", "compiled"))
                for name, settings in _QUERIES_AND_KEYS.items()
            ],
            ("train", "forward"),
            calls=8,
        ),
        "cuts": Table(
            [
                Entry(name, _QUERIES_AND_KEYS.get(name, ""), ("triton", *VARIANTS), ())
                for name in ("incident", "queries", "keys")
            ],
            ("forward",),
        ),
    },
    forms={name: Form(_cut(**tiles), has_kernels=True) for name, tiles in VARIANTS.items()},
    floors={"forward": one_copy},
    error_at={"B": 1, "T": 512},
)
