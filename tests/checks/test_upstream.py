"""The gradient that arrives: how it lies, for which results it comes, and that it stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memfix import Contract, Dim, Form, TensorSpec
from memfix.checks.calls import drawn_calls
from memfix.checks.comparing import Unequal
from memfix.checks.equality import check_equality, compare_once
from memfix.checks.gradients import upstream_gradients
from memfix.checks.inputs import UPSTREAMS, Draw, Upstream
from memfix.contract import Case
from memfix.errors import UsageError


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


class DoubledInPlace(Doubled):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.mul_(2)


def contract_of(form: Any) -> Contract:
    return Contract(
        name="doubling",
        naive=lambda x: 2 * x,
        forms={"form": Form(form)},
        dims={"T": Dim(1, 9), "D": Dim(1, 9)},
        inputs=[TensorSpec("x", "T D", grad=True)],
        cases={"small": {"T": 4, "D": 4}},
    )


def draw_of(upstream: Upstream, seed: int = 0) -> Draw:
    return Draw(Case("drawn", {"T": 6, "D": 4}, dtype="float32"), seed=seed, upstream=upstream)


def gradients(upstream: Upstream, *shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor | None]:
    return upstream_gradients([torch.empty(shape) for shape in shapes], draw_of(upstream, seed), 0)


def gradient(upstream: Upstream, *shape: int) -> torch.Tensor:
    (only,) = gradients(upstream, shape)
    assert only is not None
    return only


def test_each_kind_lies_and_counts_as_its_name_says() -> None:
    dense, transposed = gradient("dense", 6, 4), gradient("transposed", 6, 4)
    assert dense.is_contiguous()
    assert transposed.stride() == (1, 7)
    assert transposed.storage_offset() == 1
    assert torch.equal(dense, transposed)
    expanded = gradient("expanded", 6, 4)
    assert expanded.stride() == (0, 0)
    assert len(expanded.unique()) == 1
    masked = gradient("masked", 200, 4)
    assert 0.3 < (masked == 0).all(-1).double().mean() < 0.7
    assert ((masked == 0).all(-1) == (masked == 0).any(-1)).all(), "whole rows"


@pytest.mark.parametrize("kind", UPSTREAMS)
@pytest.mark.parametrize("shape", [(), (3,), (0, 2)])
def test_scalars_vectors_and_empty_results_have_every_kind(kind: Upstream, shape: tuple[int, ...]) -> None:
    assert gradient(kind, *shape).shape == shape


def test_of_several_results_one_is_used_and_each_in_turn() -> None:
    used = [[one is not None for one in gradients("partial", (2,), (3,), seed=seed)] for seed in (0, 1)]
    assert used == [[True, False], [False, True]]
    assert gradients("partial", (2,))[0] is not None


def test_all_kinds_are_drawn_and_a_draw_is_spelled_with_its_own() -> None:
    contract = contract_of(Doubled.apply)
    calls = [call.draw for call in drawn_calls(contract, "float32", 32)]
    assert {draw.upstream for draw in calls} == {*UPSTREAMS}
    assert calls[0].upstream == "dense", "the simplest"
    for draw in calls:
        assert Draw.parsed(contract, draw.spelled()).upstream == draw.upstream
    with pytest.raises(UsageError, match="cannot read 'upstream=sparse'"):
        Draw.parsed(contract, "T=1,D=1,dtype=float32,upstream=sparse")


def test_a_form_that_leaves_it_alone_passes_and_one_that_writes_into_it_does_not() -> None:
    assert check_equality(contract_of(Doubled.apply), "form", dtype="float32", examples=20).status == "pass"
    with pytest.raises(Unequal, match="writes into the gradient that arrives for its result"):
        compare_once(contract_of(DoubledInPlace.apply), "form", draw_of("dense"))
