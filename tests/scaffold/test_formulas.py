"""Formulas that are found in measured bytes, and contracts that are read off an example call."""

from __future__ import annotations

import itertools

import pytest
import torch

from memfix.contract import Integers
from memfix.formula import Formula
from memfix.scaffold.budgets import Sample, formula_above
from memfix.scaffold.example import candidates_for, contract_of_example

TERMS = ["N*e", "N", "V*e", "rows*e", "N*V*e", "N*V", "rows*V*e"]
SHAPES = [dict(zip(("N", "V", "rows", "e"), sizes, strict=True))
          for sizes in itertools.product((400, 100, 260), (700, 50), (8, 32), (4, 2, 8))]  # fmt: skip


@pytest.mark.parametrize(
    ("truth", "found"),
    [
        ("2*N*V*e", "2*N*V*e + 4096"),
        ("2*N*V*e + 3*rows*V*e", "2*N*V*e + 3*rows*V*e + 4096"),
        ("8*N", "8*N + 4096"),
    ],
)
def test_the_formula_behind_bytes_is_found(truth: str, found: str) -> None:
    assert formula_above([Sample(shape, Formula(truth).evaluate(shape)) for shape in SHAPES], TERMS) == found


@pytest.mark.parametrize("truth", ["max(2*N*V*e, N*V*e + 9*rows*V*e)", "max(N, V)*500", "N*V*e*(1 + rows // 16)"])
def test_a_formula_is_nowhere_below_what_was_measured(truth: str) -> None:
    samples = [Sample(shape, Formula(truth).evaluate(shape)) for shape in SHAPES]
    found = Formula(formula_above(samples, TERMS))
    assert all(found.evaluate(sample.values) >= sample.bytes for sample in samples)


def test_shape_suffixes_name_axes_and_equal_sizes_share_a_name() -> None:
    def naive(hidden_TD, weight, bias, scale):  # type: ignore[no-untyped-def]
        return hidden_TD @ weight + bias

    arguments = {
        "hidden_TD": torch.randn(3, 4).double().requires_grad_(), "weight": torch.randn(4, 5), "bias": torch.rand(5),
        "scale": torch.randn(1),
    }  # fmt: skip
    contract = contract_of_example("op", naive, {"same": naive}, arguments)
    specs = {spec.name: spec.shape for spec in contract.inputs}
    assert specs == {"hidden_TD": "T D", "weight": "D N", "bias": "N", "scale": "1"}
    assert [spec.grad for spec in contract.inputs] == [True, False, False, False]
    assert [spec.dtype for spec in contract.inputs] == ["working", "float32", "float32", "float32"]
    assert str(contract.inputs[2].values).startswith("Uniform(0.0, ")
    assert contract.cases["example"].dtype == "float64"


def test_integers_reach_up_to_a_dim_that_holds_them_and_one_negative_value_is_a_mark() -> None:
    def naive(x, target):  # type: ignore[no-untyped-def]
        return x

    arguments = {"x": torch.randn(9, 7), "target": torch.tensor([0, 6, -100, 3, 1, 2, 5, 4, 0])}
    target = contract_of_example("op", naive, {"same": naive}, arguments).inputs[1]
    assert (target.values, target.sometimes) == (Integers("D"), -100)
    assert list(candidates_for(arguments["target"], {"N": 9, "D": 7})) == [Integers("D"), Integers("N"), Integers(7)]
    assert list(candidates_for(torch.tensor([-2, -1, 3]), {"N": 9})) == [Integers(-2, "N"), Integers(-2, 4)]
    assert list(candidates_for(torch.tensor([7]), {"N": 9, "D": 7})) == [Integers("N"), Integers(8)]
