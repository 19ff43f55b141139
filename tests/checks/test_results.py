"""Results of other kinds: integers and truth values that values decide, complex numbers, and zeros but for rounding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from memfix import Contract, Dim, TensorSpec
from memfix.checks.equality import check_equality

FLOATS = ("float64", "float32", "bfloat16", "float16")


def contract_of(form: Callable[..., Any], naive: Callable[..., Any], *, grad: bool = False) -> Contract:
    return Contract(
        "results",
        naive=naive,
        forms={"form": form},
        dims={"T": Dim(1, 20), "D": Dim(2, 20)},
        inputs=[TensorSpec("x", "T D", grad=grad), TensorSpec("y", "D D", grad=grad)],
        cases={"small": {"T": 4, "D": 4}},
    )


def found(made: Contract, dtype: str = "float16") -> tuple[str, str]:
    finding = check_equality(made, "form", dtype=dtype, examples=20)
    return finding.status, finding.text()


def best(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x @ y).argmax(-1)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_form_may_decide_otherwise_where_two_scores_are_equal_but_for_rounding(dtype: str) -> None:
    def in_float64(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return best(x.double(), y.double())

    def in_parts(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        half = x.shape[1] // 2
        return (x[:, :half] @ y[:half] + x[:, half:] @ y[half:]).argmax(-1)

    for form in (best, in_float64, in_parts):
        status, text = found(contract_of(form, best), dtype)
        assert status == "pass", text


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_wrong_index_fails_and_is_named(dtype: str) -> None:
    def second(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x @ y).topk(2, -1).indices[:, 1]

    status, text = found(contract_of(second, best), dtype)
    assert status == "fail"
    assert "output is 1 at [0], naive's is 0" in text or "output is 0 at [0], naive's is 1" in text


def test_truth_values_are_compared() -> None:
    def positive(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ y > 0

    assert found(contract_of(positive, positive))[0] == "pass"
    status, text = found(contract_of(lambda x, y: x @ y < 0, positive))
    assert status == "fail"
    assert "output is " in text


def test_both_parts_of_a_complex_result_are_compared_and_their_gradients() -> None:
    def turned(x: torch.Tensor, y: torch.Tensor, *, imaginary: float = 1.0) -> torch.Tensor:
        return torch.complex((x @ y).float(), imaginary * (x @ y).sin().float())

    assert found(contract_of(turned, turned, grad=True), "float32")[0] == "pass"
    status, text = found(contract_of(partial(turned, imaginary=2.0), turned, grad=True), "float32")
    assert status == "fail"
    assert "output is off by" in text

    def detached(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.complex((x @ y).float(), (x @ y).detach().sin().float())

    status, text = found(contract_of(detached, turned, grad=True), "float32")
    assert status == "fail"
    assert "gradient of" in text


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_where_the_truth_is_float64s_own_rounding_a_form_may_round_otherwise(dtype: str) -> None:
    """As the gradient of ``p / p.sum()`` of a single ``p`` is."""

    def rounding(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 0 * (x + y.sum()) + (4.4e-16 if x.dtype == torch.float64 else 0.0)

    def off_by(ulps: float) -> Callable[..., torch.Tensor]:
        return lambda x, y: rounding(x, y) + ulps * torch.finfo(x.dtype).eps

    assert found(contract_of(off_by(8), rounding), dtype)[0] == "pass"
    assert found(contract_of(off_by(1e4), rounding), dtype)[0] == "fail"


def test_a_nan_may_decide_what_is_left_out() -> None:
    """A NaN is the largest for ``argmax``, so naive multiplies the other rows by 0, and a form may skip them."""

    def masked(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = x[:, :1]
        is_largest = first.detach().argmax(0, keepdim=True) == torch.arange(len(x))[:, None]
        return is_largest * first.cumsum(0) + 0 * y.sum()

    def skipping(x: torch.Tensor, y: torch.Tensor, *, hides: bool = False) -> torch.Tensor:
        first = x[:, :1]
        where = first.detach().argmax(0, keepdim=True)
        kept = torch.zeros_like(first).scatter(0, where, first.cumsum(0).gather(0, where)) + 0 * y.sum()
        return kept.nan_to_num() if hides else kept

    status, text = found(contract_of(skipping, masked))
    assert status == "pass", text
    status, text = found(contract_of(partial(skipping, hides=True), masked))
    assert status == "fail"
    assert "hides a NaN of its input" in text
