"""The incident's loss on the report's card: 94.97 GiB, as a hard cap on a GPU that has more, and as a prediction.

The report's run ended with "Tried to allocate 37.09 GiB". Here the same loss does, at the same size, and the forms
that save memory run under the same cap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import memfix
from memfix.laws import NAIVE
from memfix.meters.base import Reading, Step
from memfix.meters.cuda import CappedRun, CudaMeter
from memfix.ops.linear_cross_entropy import linear_cross_entropy
from memfix.registry import contracts
from memfix.units import format_bytes, parse_bytes

CAPACITY = parse_bytes("94.97 GiB")
LOGITS_BYTES = 131_072 * 151_936 * 2

# what does not fit, and what it asks for when it fails: another [N, V] in bfloat16, or its copy in float32
TOO_LARGE = {"naive": LOGITS_BYTES, "naive in float32": 2 * LOGITS_BYTES}
SMALL_ENOUGH = ("recompute", "triton")


def loss_called(name: str) -> Callable[..., torch.Tensor]:
    (contract,) = contracts(["linear_cross_entropy"])
    if name == "naive":
        return contract.function(NAIVE)
    if name == "naive in float32":
        return lambda hidden, weight, target: F.cross_entropy((hidden @ weight.T).float(), target)
    return functools.partial(linear_cross_entropy, form=name)


def build_incident(device: str, *, name: str) -> Step:
    """A train step at the report's size. A function of this module, so that it travels to a child process."""
    (contract,) = contracts(["linear_cross_entropy"])
    dims = contract.cases["incident"].dims
    hidden = torch.randn(dims["N"], dims["D"], device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(dims["V"], dims["D"], device=device, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, dims["V"], (dims["N"],), device=device)
    loss_of = loss_called(name)

    def step() -> None:
        loss_of(hidden, weight, target).backward()
        hidden.grad = weight.grad = None

    return step


# ---------------------------------------------------------------- predicted
def predicted(name: str) -> Reading:
    return memfix.peak(functools.partial(build_incident, name=name))


@pytest.mark.parametrize(("name", "asked_bytes"), TOO_LARGE.items())
def test_naive_is_predicted_to_ask_for_more_than_the_cap_leaves(name: str, asked_bytes: int) -> None:
    reading = predicted(name)
    assert reading.exact, reading.notes
    assert reading.timeline is not None
    live_bytes = reading.timeline.live_bytes
    event = next(event for event, live in enumerate(live_bytes) if live > CAPACITY)
    (refused,) = (buffer for buffer in reading.timeline.buffers if buffer.born == event)
    assert refused.bytes == asked_bytes
    assert live_bytes[event - 1] < CAPACITY < live_bytes[event - 1] + asked_bytes


@pytest.mark.parametrize("name", SMALL_ENOUGH)
def test_a_form_is_predicted_to_run_far_below_the_cap(name: str) -> None:
    reading = predicted(name)
    assert reading.base_bytes + reading.allocated_bytes < CAPACITY / 10


def test_the_logits_are_what_the_report_was_refused() -> None:
    assert format_bytes(LOGITS_BYTES) == "37.09 GiB"


# ---------------------------------------------------------------- for real
@pytest.fixture
def capped() -> Callable[[str], CappedRun]:
    total = torch.cuda.get_device_properties(0).total_memory
    if total <= CAPACITY:
        pytest.skip(f"the cap is {format_bytes(CAPACITY)} and this GPU has {format_bytes(total)}")

    def run(name: str) -> CappedRun:
        return CudaMeter().fits(functools.partial(build_incident, name=name), CAPACITY, warmup=0)

    return run


@pytest.mark.gpu(use="meters")
@pytest.mark.parametrize(("name", "asked_bytes"), TOO_LARGE.items())
def test_naive_runs_out_of_memory_under_the_cap(
    capped: Callable[[str], CappedRun], name: str, asked_bytes: int
) -> None:
    fit = capped(name)
    assert not fit.fits
    assert f"Tried to allocate {format_bytes(asked_bytes)}" in fit.message


@pytest.mark.gpu(use="meters")
@pytest.mark.parametrize("name", SMALL_ENOUGH)
def test_a_form_runs_under_the_cap(capped: Callable[[str], CappedRun], name: str) -> None:
    fit = capped(name)
    assert fit.fits, fit.message
