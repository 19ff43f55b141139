"""How values are made: patterns such as runs of large and small rows, and values from a function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from memfix import Contract, Dim, Integers, LogUniform, TensorSpec, Uniform
from memfix.checks.draws import drawn, equality_draws
from memfix.checks.equality import check_equality
from memfix.checks.form_call import StepOf
from memfix.checks.inputs import Draw, make_inputs, make_values
from memfix.contract import PATTERNS, WIDE, Case, Pattern
from memfix.errors import ContractError
from memfix.meters import get_meter


def values(spec: TensorSpec, pattern: Pattern, dtype: torch.dtype = torch.float32, **dims: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    case = Case("drawn", dims)
    return make_values(spec, Draw(case, share=0.0, patterns={spec.name: pattern}), dtype, generator)


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """The size of each row."""
    return tensor.double().pow(2).mean(-1).sqrt()


def test_rows_come_in_runs_of_large_and_small_along_the_longest_axis() -> None:
    is_large = rows_of(values(TensorSpec("x", "B T D"), "runs", B=3, T=200, D=40)) > 0.3
    assert 0.2 < is_large.double().mean() < 0.8
    changes = (is_large[:, 1:] != is_large[:, :-1]).double().mean()
    assert 1 / 16 < changes < 1 / 4, "about every eighth row"
    assert not torch.equal(is_large[0], is_large[1]), "each line has runs of its own"


def test_small_rows_of_a_range_are_near_its_smallest_size() -> None:
    drawn = values(TensorSpec("x", "T D", values=Uniform(0.25, 2.0)), "runs", T=200, D=40)
    largest = drawn.amax(-1)
    assert ((largest < 0.31) | (largest > 1.5)).all()
    assert 0.2 < (largest > 1.5).double().mean() < 0.8


def test_log_uniform_runs_are_at_the_two_ends_of_their_range() -> None:
    spec = TensorSpec("g", "T D", values=LogUniform(-1000.0, -0.001))
    middle = values(spec, "runs", T=200, D=41).abs().median(-1).values
    assert ((middle > 100) | (middle < 0.1)).all()
    assert 0.2 < (middle > 100).double().mean() < 0.8


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rows_that_are_alike_differ_by_a_few_roundings_of_their_dtype(dtype: torch.dtype) -> None:
    drawn = values(TensorSpec("x", "T D"), "alike", dtype, T=50, D=8).to(dtype).double()
    apart = (drawn - drawn[0]).abs()
    eps = torch.finfo(dtype).eps
    assert 0 < apart.max() < 16 * eps
    assert drawn.abs().max() > 0.5, "and their size is as it was"


def test_of_integers_a_few_come_up_most_of_the_time_and_all_are_in_range() -> None:
    spec = TensorSpec("ids", "N", dtype="int64", values=Integers(2, "V"))
    even, often = (values(spec, pattern, torch.int64, N=2000, V=52) for pattern in ("even", "runs"))
    assert even.bincount().max() < 100
    assert often.bincount().max() > 600
    assert often.min() == 2
    assert often.max() < 52


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("shape", ["", "N", "N D", "N D N"])
def test_any_shape_has_any_pattern_down_to_a_scalar_and_to_nothing(pattern: Pattern, shape: str) -> None:
    for number in (0, 1, 5):
        assert values(TensorSpec("x", shape), pattern, N=number, D=3).isfinite().all()


def test_a_range_is_kept_whatever_the_pattern() -> None:
    for pattern in PATTERNS:
        drawn = values(TensorSpec("k", "T D", values=Uniform(-0.3, 0.3)), pattern, T=100, D=9)
        assert -0.3 <= drawn.min() < drawn.max() <= 0.3


def test_inputs_have_the_pattern_that_their_draw_names_and_only_they() -> None:
    made = Contract(
        "sums",
        naive=lambda x, y: x + y,
        forms={"form": lambda x, y: x + y},
        dims={"N": Dim(1, 64), "D": Dim(1, 9)},
        inputs=[TensorSpec("x", "N D"), TensorSpec("y", "N D", dtype=WIDE)],
        cases={"small": {"N": 64, "D": 9}},
    )
    tensors = make_inputs(made, Draw(made.cases["small"], patterns={"y": "alike"}), "cpu")
    spread = {name: float((tensor - tensor[0]).abs().max()) for name, tensor in tensors.items()}
    assert spread["x"] > 1
    assert spread["y"] < 1e-5


# ---------------------------------------------------------------- values from a function
def with_function(function: Any, **options: Any) -> Contract:
    return Contract(
        "own",
        naive=lambda x, y: x * y,
        forms={"form": lambda x, y: x * y},
        dims={"N": Dim(1, 64), "V": Dim(1, 99)},
        inputs=[TensorSpec("x", "N V", values=function, **options), TensorSpec("y", "N V", values=function, **options)],
        cases={"small": {"N": 64, "V": 90}},
    )


def made_by(function: Any, seed: int = 0, working: str = "float32", **options: Any) -> dict[str, torch.Tensor]:
    made = with_function(function, **options)
    return make_inputs(made, Draw(replace(made.cases["small"], dtype=working), seed, 0.5), "cpu")


def ids(shape: tuple[int, ...], generator: torch.Generator, dims: Mapping[str, int]) -> torch.Tensor:
    return torch.randint(dims["V"], shape, generator=generator).sort(-1).values


def test_a_function_makes_the_values_of_its_input() -> None:
    x = made_by(ids, dtype="int32")["x"]
    assert (x.dtype, x.shape) == (torch.int32, (64, 90))
    assert (x.diff(dim=-1) >= 0).all()
    assert x.max() == 89


def test_a_function_gives_the_same_values_for_the_same_seed_and_others_to_every_input() -> None:
    first, again, other = (made_by(ids, seed, dtype="int64") for seed in (3, 3, 4))
    assert torch.equal(first["x"], again["x"])
    assert not torch.equal(first["x"], other["x"])
    assert not torch.equal(first["x"], first["y"])


@pytest.mark.parametrize("working", ["float64", "float32", "bfloat16"])
def test_floating_values_of_a_function_are_rounded_to_the_working_dtype(working: str) -> None:
    x = made_by(lambda shape, generator, dims: torch.full(shape, 1 / 3, dtype=torch.float64), working=working)["x"]
    assert torch.equal(x, torch.full((64, 90), 1 / 3, dtype=getattr(torch, working)))


def test_sometimes_replaces_values_of_a_function_too() -> None:
    x = made_by(ids, dtype="int64", sometimes=-100)["x"]
    assert 0.4 < (x == -100).double().mean() < 0.6


def test_a_function_is_drawn_no_pattern_and_compared_like_any_other() -> None:
    contract = with_function(lambda shape, generator, dims: torch.rand(shape, generator=generator))
    assert check_equality(contract, "form", dtype="float32", examples=5).status == "pass"
    calls = [call.draw for call in drawn(equality_draws(contract, "float32"), contract, 5)]
    assert not any(draw.patterns for draw in calls)


def test_the_simulated_meter_does_not_call_a_function() -> None:
    contract = with_function(lambda shape, generator, dims: pytest.fail("called"))
    reading = get_meter("simulated").measure(StepOf(contract, "form", Draw(contract.cases["small"]), "forward"))
    assert reading.peak_bytes == 64 * 90 * 4


_NUMBERS = count()


@pytest.mark.parametrize(
    ("function", "options", "reason"),
    [
        (
            lambda shape, generator, dims: torch.zeros(3),
            {},
            "a tensor of shape [64, 90], got shape [3]",
        ),
        (lambda shape, generator, dims: 0.0, {}, "a tensor of shape [64, 90], got float"),
        (
            lambda shape, generator, dims: torch.zeros(shape),
            {"dtype": "int64"},
            "integer values for an input of torch.int64, got torch.float32",
        ),
        (
            lambda shape, generator, dims: torch.zeros(shape, dtype=torch.int64),
            {"dtype": "bool"},
            "bool values for an input of torch.bool, got torch.int64",
        ),
        (
            lambda shape, generator, dims: torch.zeros(shape, dtype=torch.bool),
            {},
            "floating values for an input of torch.float32, got torch.bool",
        ),
        (
            lambda shape, generator, dims: torch.arange(64 * 90).view(shape),
            {"dtype": "uint8"},
            "values that torch.uint8 can hold, got 0 to 5759",
        ),
        (
            lambda shape, generator, dims: torch.full(shape, float(next(_NUMBERS))),
            {},
            "the same values for the same seed; take all random numbers from its generator",
        ),
    ],
)
def test_what_a_function_may_not_return_is_said_with_the_name_of_the_input(
    function: Any, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ContractError) as refused:
        made_by(function, **options)
    assert str(refused.value) == f"input 'x': function <lambda> must return {reason}"


def test_equality_blames_neither_naive_nor_the_form_for_what_a_function_returns() -> None:
    contract = with_function(lambda shape, generator, dims: torch.zeros(3))
    found = check_equality(contract, "form", dtype="float32", examples=5)
    assert found.status == "error"
    assert found.message.startswith("no call can be made at N=1,V=1,")
    assert found.message.endswith("input 'x': function <lambda> must return a tensor of shape [1, 1], got shape [3]")


def test_a_value_that_is_no_number_is_the_same_the_second_time() -> None:
    assert made_by(lambda shape, generator, dims: torch.full(shape, torch.nan))["x"].isnan().all()
