"""Patterns of values: runs of large and small rows, rows that are alike, integers of which a few come up often."""

from __future__ import annotations

import pytest
import torch

from memfix import Contract, Dim, TensorSpec
from memfix.checks.inputs import Draw, make_inputs
from memfix.checks.values import make_values
from memfix.contract import PATTERNS, WIDE, Case, Pattern


def values(spec: TensorSpec, pattern: Pattern, dtype: torch.dtype = torch.float32, **dims: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    case = Case("drawn", dims)
    return make_values(spec, case, dtype, generator, share=0.0, magnitude=1.0, pattern=pattern)


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
    drawn = values(TensorSpec("x", "T D", low=0.25, high=2.0), "runs", T=200, D=40)
    largest = drawn.amax(-1)
    assert ((largest < 0.31) | (largest > 1.5)).all()
    assert 0.2 < (largest > 1.5).double().mean() < 0.8


def test_log_uniform_runs_are_at_the_two_ends_of_their_range() -> None:
    spec = TensorSpec("g", "T D", low=-1000.0, high=-0.001, log_uniform=True)
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
    spec = TensorSpec("ids", "N", dtype="int64", low=2, high="V")
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
        drawn = values(TensorSpec("k", "T D", low=-0.3, high=0.3), pattern, T=100, D=9)
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
