"""Inputs that cut a dim into pieces, that are wide, and whose sizes spread over powers of ten."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from memfix import Contract, Cuts, Dim, LogUniform, Normal, TensorSpec
from memfix.checks.draws import drawn, equality_draws, memory_draws
from memfix.checks.equality import check_equality
from memfix.checks.form_call import StepOf
from memfix.checks.inputs import Draw, make_inputs
from memfix.contract import WIDE
from memfix.errors import ContractError
from memfix.meters import get_meter


def sums(x: torch.Tensor, cuts: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    parts = [x[first:stop].to(start.dtype).sum(0) for first, stop in pairwise(cuts.tolist())]
    return torch.stack(parts) + start


def contract(**more: Any) -> Contract:
    parts: dict[str, Any] = {
        "forms": {"form": sums},
        "dims": {"T": Dim(1, 20), "S": Dim(1, 6), "D": Dim(1, 4)},
        "inputs": [
            TensorSpec("x", "T D", grad=True),
            TensorSpec("cuts", "S+1", dtype="int64", values=Cuts("T")),
            TensorSpec("start", "S D", dtype=WIDE, grad=True),
        ],
        "cases": {"small": {"T": 12, "S": 3, "D": 4}},
    }
    return Contract("sums", naive=sums, **{**parts, **more})


def calls_of(made: Contract, dtype: str = "float32", examples: int = 100) -> list[Draw]:
    return [call.draw for call in drawn(equality_draws(made, dtype), made, examples)]


def test_cuts_go_from_nothing_to_the_whole_and_never_back() -> None:
    made = contract()
    seen = [(draw, make_inputs(made, draw, "cpu")["cuts"].tolist()) for draw in calls_of(made)]
    for draw, cuts in seen:
        assert len(cuts) == draw.case.dims["S"] + 1
        assert cuts == sorted(cuts)
        assert (cuts[0], cuts[-1]) == (0, draw.case.dims["T"])
    assert any(first == stop for _, cuts in seen for first, stop in pairwise(cuts)), "a piece may be empty"
    assert len({tuple(cuts) for _, cuts in seen}) > len(seen) // 3


def test_one_draw_has_one_set_of_cuts() -> None:
    made = contract()
    case = made.cases["small"]
    first, again, other = (make_inputs(made, Draw(case, seed), "cpu")["cuts"] for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_cuts_are_there_where_values_are_not() -> None:
    """Shapes follow from them, so a step on fake tensors reads them too, and says nothing of an assumption."""
    reading = get_meter("simulated").measure(StepOf(contract(), "form", Draw(contract().cases["small"]), "train"))
    assert reading.exact
    assert reading.peak_bytes > 0


def test_a_form_that_loses_empty_pieces_is_caught_and_the_call_shrinks() -> None:
    def without_empty_pieces(x: torch.Tensor, cuts: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        if len(set(cuts.tolist())) < len(cuts):
            return sums(x, cuts, start) + 1
        return sums(x, cuts, start)

    made = contract(forms={"form": without_empty_pieces})
    found = check_equality(made, "form", dtype="float32", examples=100)
    assert found.status == "fail"
    assert "T=1,S=2,D=1" in found.details[0]


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [("float64", "float64"), ("float32", "float32"), ("bfloat16", "float32"), ("float16", "float32")],
)
def test_wide_is_float32_or_wider(dtype: str, wide: str) -> None:
    made = contract(cases={"small": {"T": 12, "S": 3, "D": 4, "dtype": dtype}})
    tensors = make_inputs(made, Draw(made.cases["small"]), "cpu")
    assert (tensors["x"].dtype, tensors["start"].dtype) == (getattr(torch, dtype), getattr(torch, wide))
    assert tensors["start"].requires_grad


def test_drawn_memory_shapes_have_cuts_too() -> None:
    made = contract()
    for call in drawn(memory_draws(made), made, 20):
        draw = call.draw
        assert make_inputs(made, draw, "meta", values=False)["cuts"].tolist()[-1] == draw.case.dims["T"]


def test_a_product_over_the_fan_in_is_as_large_at_every_size() -> None:
    inputs = [TensorSpec("x", "T D", grad=True, values=Normal(fan_in="D")), *contract().inputs[1:]]
    sizes = {f"D{size}": {"T": 12, "S": 3, "D": size} for size in (16, 4096)}
    made = contract(inputs=inputs, cases=sizes)
    for case in made.cases.values():
        x = make_inputs(made, Draw(case), "cpu")["x"]
        assert x.square().sum(1).mean().item() == pytest.approx(1, rel=0.3)


@pytest.mark.parametrize(("low", "high"), [(-100.0, -0.01), (0.01, 100.0)])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_log_uniform_values_are_as_often_small_as_large(low: float, high: float, dtype: str) -> None:
    inputs = list(contract().inputs)
    inputs[0] = TensorSpec("x", "T D", values=LogUniform(low, high))
    made = contract(inputs=inputs, cases={"small": {"T": 200, "S": 1, "D": 50, "dtype": dtype}})
    x = make_inputs(made, Draw(made.cases["small"]), "cpu")["x"].double()
    assert (x.sign() == x.sign()[0, 0]).all()
    assert x[0, 0] * low > 0
    rounded = torch.finfo(getattr(torch, dtype)).eps
    assert 0.01 * (1 - rounded) <= x.abs().min() <= x.abs().max() <= 100 * (1 + rounded)
    for edge, share in ((0.1, 0.25), (1.0, 0.5), (10.0, 0.75)):
        assert (x.abs() < edge).double().mean().item() == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: TensorSpec("cuts", "S", dtype="int64", values=Cuts("T")),
            "input 'cuts': Cuts('T') needs int32 or int64 and a shape like 'S+1', got int64 and shape 'S'",
        ),
        (
            lambda: TensorSpec("cuts", "S+1", values=Cuts("T")),
            "input 'cuts': Cuts('T') needs int32 or int64 and a shape like 'S+1', got working and shape 'S+1'",
        ),
        (
            lambda: TensorSpec("cuts", "S+1", dtype="int64", values=Cuts("T"), sometimes=3),
            "input 'cuts': Cuts('T') decides every element; drop sometimes=",
        ),
        (
            lambda: TensorSpec("g", "T", values=LogUniform(-1.0, 1.0)),
            "input 'g': LogUniform(-1.0, 1.0) needs two numbers of one sign, low below high",
        ),
        (lambda: TensorSpec("g", "T", dtype="wider"), "input 'g': unknown dtype 'wider'; did you mean 'wide'?"),
        (
            lambda: contract(
                dims={"T": Dim(1, 20), "S": Dim(1, 6), "D": Dim(1, 4)},
                inputs=[TensorSpec("x", "T D"), TensorSpec("cuts", "S+1", dtype="int64", values=Cuts("N"))],
            ),
            "sums: input 'cuts' uses 'N', which is no dim",
        ),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(build: Any, message: str) -> None:
    with pytest.raises(ContractError) as refused:
        build()
    assert message in str(refused.value)


def test_laws_name_only_what_an_input_has() -> None:
    laws = contract().laws()
    assert "values=Cuts('T')" in laws["input cuts"]
    assert "values=Normal()" in laws["input x"]
    assert "optional" not in laws["input x"]
    assert "patterns" not in laws["input x"]
    assert "dtype=wide" in laws["input start"]
