"""Calls in another mode: under autocast, without a graph, differentiated twice, and with an input of another dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd.function import once_differentiable

from memfix import Contract, Dim, TensorSpec
from memfix.checks.calls import drawn_calls
from memfix.checks.equality import check_equality, compare_once
from memfix.checks.inputs import AUTOCASTS, WITHOUT_GRAPH, Draw, make_inputs
from memfix.errors import ContractError, UsageError


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x @ y.to(x.dtype)).sin()


def contract_of(form: Callable[..., Any], naive: Callable[..., Any] = product) -> Contract:
    return Contract(
        name="wave",
        naive=naive,
        forms={"form": form},
        dims={"T": Dim(1, 20), "D": Dim(1, 20)},
        inputs=[TensorSpec("x", "T D", grad=True), TensorSpec("y", "D D", grad=True, also_in=("float32",))],
        cases={"small": {"T": 4, "D": 4}},
    )


def found(made: Contract, dtype: str) -> tuple[str, str]:
    finding = check_equality(made, "form", dtype=dtype, examples=20)
    return finding.status, finding.text()


class _Wave(torch.autograd.Function):
    """Right once; what happens the second time is a subclass's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return product(x, y)

    @staticmethod
    def gradients(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = ctx.saved_tensors
        inner = upstream * (x @ y.to(x.dtype)).cos()
        return inner @ y.to(x.dtype).T, (x.T @ inner).to(y.dtype)


class WithoutGraph(_Wave):
    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            return _Wave.gradients(ctx, upstream)


class WrongTheSecondTime(_Wave):
    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = ctx.saved_tensors
        inner = upstream * (x @ y.to(x.dtype)).cos().detach()
        return inner @ y.to(x.dtype).T, (x.T @ inner).to(y.dtype)


class Refusing(_Wave):
    message = "wave has no second derivative"

    @classmethod
    def backward(cls, ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.is_grad_enabled():
            raise RuntimeError(cls.message)
        return _Wave.gradients(ctx, upstream)


class MarkedOnce(_Wave):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _Wave.gradients(ctx, upstream)


class NotImplementedTwice(Refusing):
    message = "the derivative for '_wave_backward' is not implemented"


class Crashing(Refusing):
    message = "index out of range"


class Differentiable(_Wave):
    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _Wave.gradients(ctx, upstream)


def applied(function: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def form(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = function.apply(x, y)
        return result

    return form


@pytest.mark.parametrize("function", [Differentiable, Refusing, MarkedOnce, NotImplementedTwice])
def test_a_second_derivative_is_naives_or_refused(function: Any) -> None:
    assert found(contract_of(applied(function)), "float64")[0] == "pass"


def test_a_gradient_without_a_graph_fails_and_is_reproduced() -> None:
    made = contract_of(applied(WithoutGraph))
    status, text = found(made, "float64")
    assert status == "fail"
    assert "gives no second derivative by x" in text
    assert "mode=twice" in text
    assert found(made, "float32")[0] == "pass"


def test_a_wrong_second_derivative_fails() -> None:
    status, text = found(contract_of(applied(WrongTheSecondTime)), "float64")
    assert status == "fail"
    assert "second derivative by" in text


def test_an_error_that_is_no_refusal_fails() -> None:
    status, text = found(contract_of(applied(Crashing)), "float64")
    assert status == "fail"
    assert "raises RuntimeError: index out of range" in text


def test_naive_may_have_no_second_derivative() -> None:
    assert found(contract_of(product, naive=applied(Crashing)), "float64")[0] == "pass"


class TwiceAsMuchTheSecondTime(_Wave):
    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.times = getattr(ctx, "times", 0) + 1
        in_x, in_y = _Wave.gradients(ctx, upstream)
        return ctx.times * in_x, ctx.times * in_y


class OnlyOnce(TwiceAsMuchTheSecondTime):
    message = "Trying to backward through the graph a second time"

    @classmethod
    def backward(cls, ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if hasattr(ctx, "times"):
            raise RuntimeError(cls.message)
        return TwiceAsMuchTheSecondTime.backward(ctx, upstream)


@pytest.mark.parametrize(
    ("function", "promises", "text"),
    [
        (TwiceAsMuchTheSecondTime, False, "second gradient of x is off by"),
        (OnlyOnce, False, None),
        (OnlyOnce, True, "a second time"),
    ],
)
def test_a_second_backward_is_right_or_refused(function: Any, promises: bool, text: str | None) -> None:
    status, message = found(replace(contract_of(applied(function)), repeats_backward=promises), "float32")
    assert status == ("fail" if text else "pass")
    assert (text or "") in message


def under_autocast(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    def form(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = otherwise(x, y) if torch.is_autocast_enabled("cpu") else product(x, y)
        return result

    return form


def test_a_form_that_autocast_makes_wrong_fails() -> None:
    status, text = found(contract_of(under_autocast(lambda x, y: product(x, 1.05 * y))), "float32")
    assert status == "fail"
    assert "mode=autocast" in text


def test_a_form_that_takes_any_autocast_for_bfloat16_fails() -> None:
    made = contract_of(
        under_autocast(lambda x, y: product(x.bfloat16(), y.bfloat16()).to(torch.get_autocast_dtype("cpu")))
    )
    status, text = found(made, "float32")
    assert status == "fail"
    assert "mode=autocast_float16" in text


def test_a_form_may_stay_in_the_dtype_of_its_inputs_under_autocast() -> None:
    def wide(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return product(x, y)

    assert found(contract_of(under_autocast(wide)), "float32")[0] == "pass"


def test_a_form_must_not_round_under_autocast_where_naive_does_not() -> None:
    def naive(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y.sum().to(x.dtype)

    def rounds(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        narrow = torch.is_autocast_enabled("cpu") and x.dtype == torch.float32
        return naive(x.bfloat16().float() if narrow else x, y)

    assert found(contract_of(naive, naive), "float32")[0] == "pass"
    status, text = found(contract_of(rounds, naive), "float32")
    assert status == "fail"
    assert "mode=autocast" in text


def without_a_graph(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    def form(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = product(x, y) if torch.is_grad_enabled() else otherwise(x, y)
        return result

    return form


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_a_form_that_is_wrong_without_a_graph_fails(dtype: str) -> None:
    made = contract_of(without_a_graph(lambda x, y: product(x, 1.05 * y)))
    status, text = found(made, dtype)
    assert status == "fail"
    assert "mode=no_grad" in text or "mode=inference" in text


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_a_form_that_is_wrong_in_inference_mode_fails(dtype: str) -> None:
    def form(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return product(x, 1.05 * y if torch.is_inference_mode_enabled() else y)

    status, text = found(contract_of(form), dtype)
    assert status == "fail"
    assert "mode=inference" in text


def test_a_table_from_inference_mode_must_serve_training() -> None:
    tables: dict[tuple[object, ...], torch.Tensor] = {}

    def form(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        key = (*x.shape, x.dtype)
        if key not in tables:
            tables[key] = torch.ones_like(x)
        return product(x * tables[key], y)

    made = contract_of(form)
    draw = Draw.parsed(made, "T=3,D=2,dtype=float32,seed=2,mode=inference")
    compare_once(made, "form", draw)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        compare_once(made, "form", replace(draw, mode="plain"))
    tables.clear()
    status, text = found(made, "float32")
    assert status == "fail"
    assert "Inference tensors cannot be saved for backward" in text


def test_a_form_must_not_write_into_its_input_without_a_graph() -> None:
    made = contract_of(without_a_graph(lambda x, y: x.copy_(product(x, y))))
    status, text = found(made, made.dtypes[0])
    assert status == "fail"
    assert "writes into its input x" in text


def test_every_option_meets_every_mode() -> None:
    made = Contract(
        name="biased", naive=biased, forms={"form": biased}, dims={"T": Dim(1, 20)}, choices={"times": (1, 2)},
        inputs=[TensorSpec("x", "T", grad=True), TensorSpec("bias", "T", grad=True, optional=True)],
        cases={"small": {"T": 4}},
    )  # fmt: skip
    draws = [call.draw for dtype in made.dtypes for call in drawn_calls(made, dtype, 32)]
    for modes in ({*AUTOCASTS}, {*WITHOUT_GRAPH}, {"twice"}):
        met = {(draw.case.choices["times"], draw.case.present) for draw in draws if draw.mode in modes}
        assert {times for times, _ in met} == {1, 2}
        assert {present for _, present in met} == {(), ("bias",)}


def biased(x: torch.Tensor, bias: torch.Tensor | None, *, times: int) -> torch.Tensor:
    return times * x if bias is None else times * x + bias


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_an_input_comes_in_another_dtype_too(dtype: str) -> None:
    made = contract_of(product)
    drawn = [call.draw for call in drawn_calls(made, dtype, 20)]
    assert 0 < sum(bool(draw.dtypes) for draw in drawn) < len(drawn)
    for draw in drawn:
        assert Draw.parsed(made, draw.spelled()).dtypes == draw.dtypes
        wanted = torch.float32 if draw.dtypes else getattr(torch, dtype)
        assert make_inputs(made, draw, "cpu")["y"].dtype == wanted
    assert found(made, dtype)[0] == "pass"


def test_a_form_that_takes_one_dtype_only_fails() -> None:
    status, text = found(contract_of(lambda x, y: (x @ y).sin()), "bfloat16")
    assert status == "fail"
    assert "dtype.y=float32" in text


def test_what_is_no_floating_dtype_is_refused() -> None:
    with pytest.raises(ContractError, match="input 'x': also_in needs a floating input and some of"):
        TensorSpec("x", "T", also_in=("int64",))
    with pytest.raises(UsageError, match="cannot read 'mode=thrice'"):
        Draw.parsed(contract_of(product), "T=1,D=1,dtype=float32,mode=thrice")


def wide_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.float().sin() @ y.float().cos()).sum()


def test_a_single_number_that_naive_keeps_in_float32_must_not_be_rounded_to_16_bits() -> None:
    def rounded(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return wide_sum(x, y).to(x.dtype).float()

    status, text = found(contract_of(rounded, wide_sum), "bfloat16")
    assert status == "fail"
    assert "output is off by" in text
    assert found(contract_of(wide_sum, wide_sum), "bfloat16")[0] == "pass"


def test_a_single_number_that_naive_rounds_may_be_rounded_even_where_naive_is_right_by_luck() -> None:
    def rounds(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return wide_sum(x, y).to(x.dtype).float()

    def rounds_otherwise(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result = wide_sum(x, y)
        return (result + 2**-9 * result.detach()).to(x.dtype).float()

    assert found(contract_of(rounds_otherwise, rounds), "bfloat16")[0] == "pass"
