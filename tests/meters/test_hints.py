"""The likely cause: one sentence for shapes of a peak that are known, and silence for the others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import memfix
from memfix.meters.base import Step, StepBuilder
from memfix.meters.hints import likely_cause
from memfix.meters.timeline import Allocation

UPCAST = "a whole tensor is upcast to float32; upcast a chunk at a time, or inside the reduction (dtype=)"
COPIED = "a whole tensor is copied into another layout; keep the layout, or copy a chunk at a time"
FOREACH = "the optimizer's foreach form makes temporaries as large as all parameters; fused=True makes none"
PROBABILITIES = "the (log-)probabilities of all rows are kept for backward; compute the loss a chunk at a time"
BEFORE = (
    "each of 8 passes keeps its mul for backward, because it is made before the checkpoint; "
    "make it inside, where it is computed again"
)


def kept(count: int, maker: str) -> str:
    return (
        f"each of {count} passes keeps its {maker} for backward: the loop saves nothing in training; "
        "recompute it (torch.utils.checkpoint), or compute the gradient in the forward"
    )


def together(count: int) -> str:
    return f"{count} results of one line are alive together; write into one buffer, or drop each after use"


def row(what: str, code: str = "y = f(x)", count: int = 1, size: int = 1000) -> Allocation:
    return Allocation(size, what, "loss.py:41 in f", code, count)


@pytest.mark.parametrize(
    ("alive", "cause"),
    [
        (row("_log_softmax, kept for backward", count=3), kept(3, "log_softmax")),
        (row("mul.Tensor, kept for backward", count=8), kept(8, "mul")),
        (row("_foreach_sqrt", "optimizer.step()"), FOREACH),
        (row("mul.Tensor, kept for backward", "total += checkpoint(f, part * 2)", count=8), BEFORE),
        (row("_foreach_norm", "clip_grad_norm_(parameters, 1.0)"), None),
        (row("_foreach_mul", "torch._foreach_mul(averages, decay)"), None),
        (row("_to_copy", "x = logits.float()"), UPCAST),
        (row("_to_copy, kept for backward", "x = logits.to(torch.float32)"), UPCAST),
        (row("clone", "x = y.t().contiguous()"), COPIED),
        (row("_log_softmax, kept for backward"), PROBABILITIES),
        (row("_softmax, kept for backward"), PROBABILITIES),
        # a recorded row has the name of a Python function of torch
        (row("cross_entropy, kept for backward"), PROBABILITIES),
        (row("cross_entropy"), None),
        (row("_multi_tensor_adamw", "optimizer.step()"), FOREACH),
        (row("optimizer state", "optimizer.step()", count=8), None),
        (row("exp", count=6), together(6)),
        (row("exp"), None),
        (row("exp", count=5), None),
        (row("exp", "", count=6), None),
        (row("mm, kept for backward", count=2), None),
        (row("_to_copy", "x = y.bfloat16()"), None),
        (row("_log_softmax"), None),
        # the gradient, not the probabilities
        (row("_log_softmax_backward_data"), None),
        # the copy of this line may be long gone: its product is what is alive
        (row("mm", "x = y.t().contiguous() @ z"), None),
        (row("add.Tensor", "x = y.float() + 1"), None),
    ],
)
def test_a_row_of_a_known_shape_has_its_sentence_and_no_other_has(alive: Allocation, cause: str | None) -> None:
    assert likely_cause([alive]) == cause


def test_no_rows_have_no_cause() -> None:
    assert likely_cause([]) is None


def test_the_largest_row_with_a_known_shape_is_the_one_that_is_named() -> None:
    rows = [row("mm", size=400), row("clone", size=300), row("_to_copy", "x.float()", size=300)]
    assert likely_cause(rows) == COPIED


@pytest.mark.parametrize(("size", "cause"), [(250, COPIED), (249, None)])
def test_a_row_below_a_quarter_of_the_peak_is_not_what_it_is_about(size: int, cause: str | None) -> None:
    assert likely_cause([row("mm", size=1000 - size), row("clone", size=size)]) == cause


# ---------------------------------------------------------------- of real steps
def upcast(device: str) -> Step:
    x = torch.empty(64, 64, dtype=torch.bfloat16, device=device)
    return lambda: x.float().sum()


def copied(device: str) -> Step:
    x = torch.empty(64, 64, device=device)
    return lambda: x.t().contiguous()


def stepped_by_foreach(device: str) -> Step:
    optimizer = torch.optim.Adam([torch.empty(64, 64, device=device, requires_grad=True)], foreach=True)
    optimizer.param_groups[0]["params"][0].grad = torch.empty(64, 64, device=device)
    return lambda: optimizer.step()


def cross_entropy(device: str) -> Step:
    x = torch.empty(64, 100, device=device, requires_grad=True)
    target = torch.empty(64, dtype=torch.int64, device=device)

    def step() -> None:
        F.cross_entropy(x, target).backward()
        x.grad = None

    return step


def kept_chunks(device: str) -> Step:
    x = torch.empty(64, 100, device=device)
    scale = torch.empty(100, device=device, requires_grad=True)

    def step() -> None:
        total = torch.zeros((), device=device)
        for chunk in x.split(8):
            total = total + (chunk * scale).exp().sum()
        total.backward()
        scale.grad = None

    return step


def gathered(device: str) -> Step:
    x = torch.empty(64, 100, device=device)
    return lambda: [chunk.exp() for chunk in x.split(8)]


def product(device: str) -> Step:
    x = torch.empty(64, 64, device=device)
    return lambda: x @ x


def upcast_by_chunks(device: str) -> Step:
    x = torch.empty(64, 64, dtype=torch.bfloat16, device=device)
    return lambda: [part.float().sum() for part in x.split(8)]


def copied_by_chunks(device: str) -> Step:
    x = torch.empty(64, 64, device=device)
    return lambda: [part.t().contiguous().sum() for part in x.split(8)]


def loss_by_chunks(device: str) -> Step:
    x, weight = torch.empty(64, 4, device=device), torch.empty(4, 100, device=device, requires_grad=True)
    target = torch.empty(64, dtype=torch.int64, device=device)

    def step() -> None:
        for part, wanted in zip(x.split(8), target.split(8), strict=True):
            F.cross_entropy(part @ weight, wanted).backward()
        weight.grad = None

    return step


def clipped(device: str) -> Step:
    weights = [torch.empty(64, 64, device=device, requires_grad=True) for _ in range(4)]
    for weight in weights:
        weight.grad = torch.empty(64, 64, device=device)
    return lambda: torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)


@pytest.mark.parametrize(
    ("build", "cause"),
    [
        # what the code does already is not advised
        (upcast_by_chunks, None),
        (copied_by_chunks, None),
        (loss_by_chunks, None),
        (clipped, None),
        (upcast, UPCAST),
        (copied, COPIED),
        (stepped_by_foreach, FOREACH),
        (cross_entropy, PROBABILITIES),
        (kept_chunks, kept(7, "exp")),  # of 8: the last one's is given back as its gradient is multiplied on
        (gathered, together(8)),
        (product, None),
    ],
    ids=[
        "upcast_by_chunks",
        "copied_by_chunks",
        "loss_by_chunks",
        "clipped",
        "upcast",
        "copied",
        "foreach",
        "cross_entropy",
        "kept_chunks",
        "gathered",
        "product",
    ],
)
def test_a_step_is_recognised_by_its_reading(build: StepBuilder, cause: str | None) -> None:
    assert memfix.peak(build).hint == cause
