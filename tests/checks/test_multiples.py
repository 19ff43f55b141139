"""Dims of which only multiples are sizes: drawn, stated and searched as such."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memfix
from memfix import Contract, Dim, TensorSpec
from memfix.checks.bad_inputs import check_bad_input
from memfix.checks.draws import drawn, equality_draws, memory_draws, smallest_failure
from memfix.contract import BadInput
from memfix.errors import ContractError, UsageError
from memfix.meters.base import Reading


def halves(x: torch.Tensor, *, blocks: int = 4) -> torch.Tensor:
    if x.shape[0] == 0:
        raise ValueError("no rows")
    first, second = x.chunk(2, dim=1)
    return first * second


def contract(**more: Any) -> Contract:
    parts: dict[str, Any] = {
        "dims": {"N": Dim(1, 9), "D": Dim(2, 10, multiple_of=2), "blocks": Dim(4, 16, multiple_of=4)},
        "cases": {"small": {"N": 4, "D": 6, "blocks": 8}},
    }
    inputs = [TensorSpec("x", "N D", grad=True)]
    return Contract("halves", naive=halves, forms={"form": halves}, inputs=inputs, **{**parts, **more})


def test_only_multiples_are_drawn_and_all_of_them() -> None:
    made = contract()
    for draws in (equality_draws(made, "float32"), memory_draws(made)):
        dims = [call.draw.case.dims for call in drawn(draws, made, 100)]
        assert all(d["D"] % 2 == 0 < d["D"] for d in dims)
        assert all(d["blocks"] % 4 == 0 < d["blocks"] for d in dims)
        assert any(d["N"] % 2 for d in dims)
    assert {call.draw.case.dims["D"] for call in drawn(equality_draws(made, "float32"), made, 100)} == {2, 4, 6, 8, 10}


def test_a_failure_shrinks_to_the_smallest_multiple() -> None:
    def small(draw: Any) -> None:
        assert draw.case.dims["D"] < 6

    made = contract()
    failure = smallest_failure(small, drawn(equality_draws(made, "float32"), made, 100))
    assert failure is not None
    assert failure[0].case.dims["D"] == 6


def test_a_case_that_is_no_multiple_is_refused() -> None:
    with pytest.raises(ContractError) as refused:
        contract(cases={"small": {"N": 4, "D": 5, "blocks": 8}})
    assert str(refused.value) == "halves, case 'small': D must be a multiple of 2, got 5"


@pytest.mark.parametrize(("low", "high", "multiple_of"), [(1, 4, 2), (2, 5, 2), (2, 4, 0)])
def test_a_range_that_does_not_end_on_multiples_is_refused(low: int, high: int, multiple_of: int) -> None:
    with pytest.raises(ContractError) as refused:
        Dim(low, high, multiple_of)
    assert str(refused.value) == (
        f"a Dim needs low and high that are multiples of multiple_of, got low={low}, high={high}, "
        f"multiple_of={multiple_of}"
    )


@pytest.mark.parametrize(
    ("dim", "size"), [(Dim(1, 9), 5), (Dim(7, 9), 7), (Dim(1, 3), 3), (Dim(2, 10, 2), 4), (Dim(8, 16, 8), 8)]
)
def test_a_call_with_a_bad_input_is_otherwise_a_good_one(dim: Dim, size: int) -> None:
    assert dim.nearest(5) == size
    bad = BadInput("no rows", lambda arguments: arguments.update(x=arguments["x"][:0]), "no rows")
    assert check_bad_input(contract(), "form", bad).status == "pass"


def test_the_law_names_the_multiple() -> None:
    assert contract().laws()["dim D"] == "2 to 10, multiples of 2"


def test_a_search_tries_multiples_alone() -> None:
    def measure(build: Any) -> Reading:
        return Reading("simulated", "H200", build(""), 0, 0, 0, build(""))

    found = memfix.fit(lambda value: lambda _: value, 1001, low=6, start=60, multiple_of=6, measure=measure)
    assert found.value == 996
    assert all(attempt.value % 6 == 0 for attempt in found.tried)
    with pytest.raises(UsageError, match="fit needs a low that is a multiple of multiple_of, got low=1, multiple_of=6"):
        memfix.fit(lambda value: lambda _: value, 1001, multiple_of=6, measure=measure)
