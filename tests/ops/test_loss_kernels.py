"""The loss's Triton kernels at calls that drawn ones seldom meet, in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memfix.checks.interpreter import in_interpreter

pytest.importorskip("triton")
from ops import interpreted_kernels as calls


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    return in_interpreter(calls.everything)


def errors(answer: calls.Answer, truth: calls.Answer) -> list[float]:
    return [float((a.double() - t).norm() / t.norm()) for a, t in zip(answer, truth, strict=True)]


@pytest.mark.parametrize(
    "name",
    [
        *("plain", "many_chunks", "strays", "some_strays", "huge", "some_ignored", "one_class", "confident"),
        *("plain, guessed", "some_ignored, guessed"),
    ],
)
def test_kernels_are_nearer_to_the_truth_than_naive(answers: dict[str, Any], name: str) -> None:
    found = answers[name]
    ours, naives = errors(found["kernels"], found["truth"]), errors(found["naive"], found["truth"])
    for our, naive in zip(ours, naives, strict=True):
        assert our <= max(naive, 4e-3)


@pytest.mark.parametrize("name", ["nan_in_hidden", "inf_in_hidden"])
def test_what_is_no_number_comes_out_where_naive_has_it(answers: dict[str, Any], name: str) -> None:
    for ours, naives in zip(answers[name]["kernels"], answers[name]["naive"], strict=True):
        assert torch.equal(ours.isfinite(), naives.isfinite())


def test_a_class_that_is_ruled_out_may_be_a_target(answers: dict[str, Any]) -> None:
    ours, truth = answers["ruled_out"]["kernels"], answers["ruled_out"]["truth"]
    assert ours[0][2].isinf()
    for our, true in zip(ours, truth, strict=True):
        assert torch.equal(our.isfinite(), true.isfinite())
        finite = true.isfinite()
        assert torch.allclose(our[finite].double(), true[finite], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["all_ignored", "all_ignored, guessed"])
def test_all_targets_ignored_is_nan_with_zero_gradients(answers: dict[str, Any], name: str) -> None:
    loss, hidden, weight = answers[name]["kernels"]
    assert loss.isnan()
    assert not hidden.any()
    assert not weight.any()


def test_sum_over_many_chunks_is_as_accurate_as_over_one(answers: dict[str, Any]) -> None:
    """In bfloat16 it would be off by nearly twice as much."""
    many, one = answers["errors of the weight's gradient"]
    assert many <= 1.3 * one


@pytest.mark.parametrize(
    ("rows", "takes"), [("16 of 16", True), ("12 of 16", False), ("16 of 20", False), ("12 of 12", False)]
)
def test_rows_that_the_copy_engine_cannot_take_go_another_way(answers: dict[str, Any], rows: str, takes: bool) -> None:
    assert answers[f"takes {rows}"] is takes
