"""The loss's Triton kernels at calls that drawn ones seldom meet, in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.peers.linear_cross_entropy import VARIANTS
from memfix.checks.compiling import check_compiles
from memfix.checks.interpreter import in_interpreter
from memfix.meters import get_meter
from memfix.ops.linear_cross_entropy import triton
from memfix.registry import all_contracts

pytest.importorskip("triton")
from ops import interpreted_kernels as calls


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    return in_interpreter(calls.everything)


def errors(answer: calls.Answer, truth: calls.Answer) -> list[float]:
    return [float((a.double() - t).norm() / t.norm()) for a, t in zip(answer, truth, strict=True)]


@pytest.mark.parametrize("name", ["plain", "many_chunks", "strays", "one_class", "confident"])
def test_kernels_are_nearer_to_the_truth_than_naive(answers: dict[str, Any], name: str) -> None:
    found = answers[name]
    ours, naives = errors(found["kernels"], found["truth"]), errors(found["naive"], found["truth"])
    for our, naive in zip(ours, naives, strict=True):
        assert our <= max(naive, 4e-3)


@pytest.mark.parametrize("name", ["plain", "strays"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_kernels_that_are_cut_otherwise_give_the_same_bits(answers: dict[str, Any], name: str, variant: str) -> None:
    for usual, other in zip(answers[name]["kernels"], answers[f"{name}, cut otherwise"][variant], strict=True):
        assert torch.equal(usual, other)


@pytest.mark.parametrize(
    ("tiles", "status"), [*((tiles, "pass") for tiles in VARIANTS.values()), ({"product_stages": 4}, "fail")]
)
def test_kernels_that_are_cut_otherwise_fit_a_blocks_memory_or_are_seen_not_to(
    tiles: dict[str, Any], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "TILES", replace(triton.TILES, **tiles))
    found = check_compiles(all_contracts()["linear_cross_entropy"], "triton", get_meter("simulated"))
    assert found.status == status, found.message


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


def test_all_targets_ignored_is_nan_with_zero_gradients(answers: dict[str, Any]) -> None:
    loss, hidden, weight = answers["all_ignored"]["kernels"]
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
