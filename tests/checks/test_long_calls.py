"""Calls with one axis as long as in a model: what counters, positions and fast paths do beyond the drawn sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from memfix import Contract, Dim, Form, Integers, TensorSpec
from memfix.checks.calls import equality_calls
from memfix.checks.equality import check_equality
from memfix.checks.long_calls import LONG


def naive(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(x.shape[0], device=x.device)[:, None] % 7
    return (x * positions).sum(0) / x.shape[0] + x[row].sum(0)


def quadratic(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return (x @ x.T).sum() * naive(x, row)


def contract_of(
    form: Callable[..., torch.Tensor], reference: Callable[..., torch.Tensor] = naive, longest: int = 100_000
) -> Contract:
    def chunked(x: torch.Tensor, row: torch.Tensor, *, chunk: int) -> torch.Tensor:
        return form(x, row)

    return Contract(
        name="positions",
        naive=reference,
        forms={"form": Form(chunked)},
        dims={"T": Dim(1, 20), "D": Dim(2, 8, multiple_of=2), "chunk": Dim(1, 9)},
        inputs=[TensorSpec("x", "T D", grad=True), TensorSpec("row", "D", dtype="int64", values=Integers("T"))],
        cases={"small": {"T": longest, "D": 8, "chunk": 4}},
    )


def long_dims(made: Contract, dtype: str) -> list[dict[str, int]]:
    calls = equality_calls(made, "form", dtype, 10)
    return [dict(call.draw.case.dims) for call in calls if call.draw.case.name == LONG]


def test_each_length_is_drawn_in_a_dtype_of_its_own() -> None:
    made = contract_of(naive)
    assert {dtype: long_dims(made, dtype) for dtype in made.dtypes} == {
        "float64": [], "float32": [],
        "bfloat16": [{"T": 384, "D": 8, "chunk": 9}],
        "float16": [{"T": 70_000, "D": 8, "chunk": 9}],
    }  # fmt: skip


def test_no_call_is_longer_than_the_cases_or_takes_naive_much_memory() -> None:
    assert [long_dims(contract_of(naive, longest=300), dtype) for dtype in ("bfloat16", "float16")] == [
        [{"T": 300, "D": 8, "chunk": 9}], [],
    ]  # fmt: skip
    assert [len(long_dims(contract_of(quadratic, quadratic), dtype)) for dtype in ("bfloat16", "float16")] == [1, 0]


def rounded_positions(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(x.shape[0], dtype=x.dtype, device=x.device)[:, None] % 7
    return (x * positions).sum(0) / x.shape[0] + x[row].sum(0)


def positions_in_8_bits(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(x.shape[0], device=x.device).to(torch.int8)[:, None] % 7
    return (x * positions).sum(0) / x.shape[0] + x[row].sum(0)


def counts_in_the_dtype_of_x(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return naive(x, row) * (x.shape[0] / torch.ones_like(x[:, 0]).sum())


def row_in_16_bits(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return naive(x, row.to(torch.int16).long() % x.shape[0])


def fast_where_aligned(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return naive(x, row) * (2 if x.shape[0] % 128 == 0 else 1)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        (rounded_positions, "bfloat16"), (positions_in_8_bits, "bfloat16"), (fast_where_aligned, "bfloat16"),
        (counts_in_the_dtype_of_x, "float16"), (row_in_16_bits, "float16"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_long_calls_only_fails(form: Callable[..., torch.Tensor], dtype: str) -> None:
    finding = check_equality(contract_of(form), "form", dtype=dtype)
    assert finding.status == "fail"
    assert f"T={384 if dtype == 'bfloat16' else 70000}," in finding.text()
    assert check_equality(contract_of(form, longest=20), "form", dtype=dtype).status == "pass"


def test_naive_may_refuse_a_long_call() -> None:
    def short(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 200 and x.device.type == "cpu":
            raise ValueError("too long")
        return naive(x, row)

    made = contract_of(lambda x, row: naive(x, row), short)
    assert len(long_dims(made, "bfloat16")) == 1
    assert check_equality(made, "form", dtype="bfloat16").status == "pass"
