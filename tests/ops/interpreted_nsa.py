"""Calls of the kernels of native sparse attention, to be made where they are interpreted, with naive's beside."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memfix.ops.nsa import naive, nsa, triton
from memfix.ops.nsa.triton import triton_nsa

SIZES: dict[str, Any] = {"compress_block": 4, "compress_stride": 2, "select_block": 6, "num_selected": 4, "window": 7}
SMALL = {"tokens": 40, "heads": 2, "width": 8, "batch": 1}
CALLS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "two tiles of channels": ({**SMALL, "width": 80, "batch": 2}, {}),
    "channels for one tile and a rest that is too small": ({**SMALL, "width": 20}, {}),
    "as many heads as a tile has rows": ({**SMALL, "tokens": 12, "heads": 17}, {}),
    "selection blocks of several tiles": ({**SMALL, "tokens": 90}, {"select_block": 40, "num_selected": 2}),
    "more compressed blocks than a tile in a selection block": (
        {**SMALL, "tokens": 90},
        {"compress_block": 40, "compress_stride": 1, "select_block": 30, "num_selected": 3},
    ),
    "no complete block": ({**SMALL, "tokens": 3}, {}),
    "one token": ({**SMALL, "tokens": 1}, {"num_selected": 1, "window": 1}),
}
MAGNITUDES = (0.0, 1.0, 8.0, 30.0)
SELECTIONS = [
    *((dtype, size) for dtype in (torch.float32, torch.bfloat16) for size in MAGNITUDES),
    (torch.float16, 1.0),
]


def inputs(
    tokens: int, heads: int, width: int, dtype: torch.dtype = torch.float32, magnitude: float = 1.0, batch: int = 1
) -> Any:
    """q of two key-value heads, k, v and gates, a quarter of them below zero: all leaves."""
    made = torch.Generator().manual_seed(0)
    q = magnitude * torch.randn(batch, tokens, 2, heads, width, generator=made)
    k = magnitude * torch.randn(batch, tokens, 2, width, generator=made)
    v = torch.randn(batch, tokens, 2, width, generator=made)
    gates = torch.rand(batch, tokens, 2, heads, 3, generator=made) - 0.25
    return [tensor.to(dtype).requires_grad_() for tensor in (q, k, v, gates)]


def everything() -> dict[str, Any]:
    """In one go: a child that interprets kernels takes seconds to start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "CHOSEN_AT_ONCE", 16)
        patch.setattr(triton, "SETTLED_AT_ONCE", 16)
        patch.setattr(triton, "FIRST_SEGMENT", 2)
        found: dict[str, Any] = {name: errors(*call) for name, call in CALLS.items()}
        found["selected"] = {call: selections(*call) for call in SELECTIONS}
        found["selected by 16 bits"] = [selected_by_16_bits(size) for size in MAGNITUDES[1:]]
        found["selected by rough scores"] = [selected_by_rough_scores(settles) for settles in (False, True)]
        found["doubtful"] = [num_doubtful(size) for size in MAGNITUDES[:2]]
        found["doubtful by the scale's sign"] = [num_doubtful(8.0, scale=scale)[0] for scale in (0.3, -0.3)]
        found["twice"] = [gradients(triton_nsa, inputs(**SMALL), {**SIZES, "queries_per_chunk": 16}) for _ in range(2)]
        found["second derivative"] = second_derivative()
        tensors = [tensor.flatten(2, 3) if tensor.dim() == 5 else tensor for tensor in inputs(**SMALL)]
        found["as users call it"] = [nsa(*tensors, **SIZES, form=form).detach() for form in ("triton", "chunked")]
    return found


def gradients(form: Any, tensors: Any, options: dict[str, Any]) -> list[torch.Tensor]:
    out = form(*tensors, **options)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, upstream)]


def errors(shape: dict[str, int], sizes: dict[str, int]) -> list[tuple[float, float]]:
    """Of the output and all gradients against naive in float64, beside naive's own."""
    options = {**SIZES, **sizes}
    tensors = inputs(**shape)
    truths = gradients(naive.naive_nsa, [tensor.detach().double().requires_grad_() for tensor in tensors], options)
    ours = gradients(triton_nsa, tensors, {**options, "queries_per_chunk": 33})
    theirs = gradients(naive.naive_nsa, tensors, options)
    return [
        tuple(float((got.double() - truth).norm() / (1 + truth.norm())) for got in both)  # type: ignore[misc]
        for truth, *both in zip(truths, ours, theirs, strict=True)
    ]


def selections(dtype: torch.dtype, magnitude: float, tokens: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks of the blocks that the kernels select and that naive selects."""
    masks: list[torch.Tensor] = []
    honest = naive._selected
    tensors = inputs(tokens, 3, 8, dtype, magnitude)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(naive, "_selected", lambda *arguments: masks.append(honest(*arguments)) or masks[-1])
        naive.naive_nsa(*tensors, **SIZES)
    out = selecting(tensors)
    assert out.grad_fn is not None
    selected = out.grad_fn.saved_tensors[-1].long()  # type: ignore[attr-defined]
    mask = torch.zeros(*selected.shape[:2], masks[0].shape[-1] + 1, dtype=torch.bool)
    mask.scatter_(-1, selected.where(selected >= 0, masks[0].shape[-1]), True)
    return mask[..., :-1], masks[0].flatten(0, 1)


def selecting(tensors: Any, **options: float) -> torch.Tensor:
    """A forward in one chunk, of which only the selection is looked at: the branches that it does not need are left
    out."""
    with pytest.MonkeyPatch.context() as patch:
        for branch in ("window", "selected"):
            patch.setattr(triton._Rows, branch, lambda *_: None)
        return triton_nsa(*tensors, **SIZES, **options, queries_per_chunk=tensors[0].shape[1])


def selected_by_16_bits(magnitude: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, by compressed keys in one piece of bfloat16 and never in float64."""
    honest = triton._Selection._score

    def quick(self: Any, *arguments: Any, exact: bool) -> None:
        if exact:
            self.num_doubtful_N.zero_()
        else:
            with pytest.MonkeyPatch.context() as in_one_piece:
                in_one_piece.setattr(self.compressed, "low_NMD", None)
                in_one_piece.setattr(self.compressed, "pieces", 1)
                honest(self, *arguments, exact=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton._Selection, "_score", quick)
        return selections(torch.bfloat16, magnitude)


def selected_by_rough_scores(settles: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, by quick scores that are off by up to one in fifty and say so, and never scored again altogether: of
    all queries, or of those that are no longer doubtful when the blocks near the last have been compared."""
    honest = triton._Selection._score
    is_sure: list[torch.Tensor] = []

    def rough(self: Any, *arguments: Any, exact: bool) -> None:
        if exact:
            is_sure.append(self.is_doubtful_NC == 0 if settles else torch.ones_like(self.is_doubtful_NC, dtype=bool))
            self.num_doubtful_N.zero_()
        else:
            honest(self, *arguments, exact=False)
            made = torch.Generator().manual_seed(2)
            self.scores_NCS.mul_(1 + 0.019 * (2 * torch.rand(self.scores_NCS.shape, generator=made) - 1))
            self.doubt_NC.fill_(0.02)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton._Selection, "_score", rough)
        if not settles:
            patch.setattr(triton._Selection, "_settle", lambda *_: None)
        ours, theirs = selections(torch.bfloat16, 1.0, tokens=100)
    return ours[is_sure[0]], theirs[is_sure[0]]


def num_doubtful(magnitude: float, **options: float) -> tuple[int, int]:
    """Queries whose blocks near the last were compared in float64, and those that were scored again altogether."""
    counted: dict[str, int] = {}

    def counting(name: str) -> Any:
        honest = getattr(triton._Selection, name)

        def noted(self: Any, *arguments: Any, exact: bool = True) -> None:
            if exact:
                counted[name] = int(self.num_doubtful_N.sum())
            honest(self, *arguments, **({"exact": exact} if name == "_score" else {}))

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_settle", "_score"):
            patch.setattr(triton._Selection, name, counting(name))
        selecting(inputs(100, 3, 8, torch.bfloat16, magnitude), **options)
    return counted["_settle"], counted["_score"]


def second_derivative() -> str:
    tensors = inputs(9, 1, 8)
    try:
        out = triton_nsa(*tensors, **SIZES, queries_per_chunk=9)
        torch.autograd.grad(out.sum(), tensors[0], create_graph=True)
    except RuntimeError as error:
        return str(error)
    return ""
