"""Calls of rope's kernel, to be made where it is interpreted, with those of ``shared_table`` and naive beside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.peers.rope import VARIANTS
from memfix.ops.rope import rope, triton
from memfix.ops.rope.naive import naive_rope

Answer = list[torch.Tensor]


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


CALLS: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {
    "no leading dim": (made(7, 3, 80), {"offset": 5}),
    "one": (made(2, 7, 3, 80), {"offset": 131_000}),
    "two": (made(2, 3, 7, 3, 8), {}),
    "two that are no view of one": (made(3, 2, 7, 3, 8).transpose(0, 1), {}),
    "heads before positions": (made(2, 3, 7, 8).transpose(1, 2), {"offset": 1}),
    "every second number": (made(2, 7, 3, 16)[..., ::2], {}),
    "one pair": (made(2, 3, 1, 2, dtype=torch.float32), {"base": 500_000.0}),
    "more heads than a program takes": (made(1, 3, 130, 64), {}),
    "positions of all": (made(2, 5, 3, 8), {"positions": torch.tensor([4, 4, 0, 9000, 1])}),
    "positions of each, in 32 bits": (
        made(2, 3, 4, 3, 8),
        {"positions": torch.arange(8, dtype=torch.int32).reshape(2, 1, 4), "max_positions": 100},
    ),
}


def everything() -> dict[str, Any]:
    """In one go: a child that interprets kernels takes seconds to start."""
    found: dict[str, Any] = {name: answers(*call) for name, call in CALLS.items()}
    found["strides"] = [rope(x, form="triton").stride() for x in (made(2, 3, 7, 8).transpose(1, 2), made(2, 7, 3, 8))]
    found["empty"] = [
        tuple(rope(made(*shape), form="triton").shape) for shape in ((2, 0, 3, 8), (2, 5, 0, 8), (0, 2, 5, 3, 8))
    ]
    x = made(2, 3, 2, 4, dtype=torch.float64).requires_grad_()
    found["derivatives"] = torch.autograd.gradcheck(turned, x) and torch.autograd.gradgradcheck(turned, x)
    found["functional gradient"] = torch.func.grad(lambda t: turned(t).square().sum())(x.detach()), 2 * x.detach()
    found["saved"] = saved_bytes()
    found["cuts"] = [cut_by(tiles) for tiles in ({}, *VARIANTS.values())]
    return found


def cut_by(tiles: Mapping[str, int]) -> torch.Tensor:
    """The answer of the kernel where it is cut by ``tiles``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "TILES", replace(triton.TILES, **tiles))
        return rope(made(2, 33, 70, 80), form="triton")


def turned(x: torch.Tensor) -> torch.Tensor:
    return rope(x, offset=9, form="triton")


def answers(x: torch.Tensor, options: dict[str, Any]) -> dict[str, Answer]:
    naives = {name: value for name, value in options.items() if name != "max_positions"}
    return {
        "kernel": _run(lambda t: rope(t, form="triton", **options), x),
        "shared_table": _run(lambda t: rope(t, form="shared_table", **options), x),
        "truth": _run(lambda t: naive_rope(t, **naives), x.double()),
    }


def saved_bytes() -> int:
    """Of what is saved for backward, without the table."""
    saved: list[torch.Tensor] = []
    x = made(2, 64, 3, 8).requires_grad_()
    table = triton.default_tables().rows(x, base=10_000.0, num_positions=64)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        turned(x)
    return sum(t.nbytes for t in saved if t.untyped_storage().data_ptr() != table.untyped_storage().data_ptr())


def _run(function: Any, x: torch.Tensor) -> Answer:
    leaf = x.detach().requires_grad_()
    result = function(leaf)
    upstream = made(*x.shape, dtype=torch.float32).to(x.dtype)
    return [result.detach(), *torch.autograd.grad(result, leaf, upstream)]
