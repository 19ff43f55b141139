"""Checks of the report's table of configurations: simulated steps of its models."""

from __future__ import annotations

import torch

from ....ops.npt_linear import npt_linear
from ...judging import ARITHMETIC, METER, CheckResult, check, decimal, holds_if, matches_figure, sizes
from ..model import SIZES
from . import GPT2, LLAMA_8B, Evidence, drawn

CARD_BYTES = 80 * 10**9


@check("NPT-16")
def offload_frees(evidence: Evidence) -> CheckResult:
    """Measure a step with and without offload; test whether B gets a gradient by the published code and by ours.

    The claim holds if offload frees more than a thousandth of the step.
    """
    step = evidence.run_bytes("product of low rank")
    freed = step - evidence.run_bytes("+ CPU offload")
    a, b = drawn(4, 2, seed=1), drawn(2, 5, seed=2)
    hidden, modulation, weight = drawn(1, 3, 4), drawn(1, 3, 2, seed=3), drawn(4, 5, seed=4)
    published = hidden @ weight + ((hidden @ a.detach().cpu()) * modulation) @ b.detach().cpu()
    (of_published,) = torch.autograd.grad(published.sum(), b, allow_unused=True)
    (ours,) = torch.autograd.grad(npt_linear(hidden, weight, a, b, modulation, form="offload").sum(), b)
    figures = sizes(freed=freed, step=step, all_deltas=evidence.evaluate("B*S*D*F*e"))
    trains = of_published is not None, bool(ours.any())
    return holds_if(freed > step / 1000, METER, **figures, published_trains=str(trains[0]), ours_trains=str(trains[1]))


@check("NPT-27")
def original(evidence: Evidence) -> CheckResult:
    step, delta = evidence.run_bytes("original"), evidence.evaluate("B*S*D*G*e")
    return holds_if(step > CARD_BYTES, METER, step=decimal(step, "TB"), **sizes(one_delta=delta))


@check("NPT-28")
def basic_and_offload(evidence: Evidence) -> CheckResult:
    """Measure the two rows of the report's table, and the low-rank product without offload."""
    names = {"basic": "basic optimization", "product": "product of low rank", "offload": "+ CPU offload"}
    steps = {short: evidence.run_bytes(name) for short, name in names.items()}
    holds = round(steps["basic"] / 1e9) == 79 and round(steps["offload"] / 1e9) == 78
    token = evidence.evaluate("B*D*G*e")
    return holds_if(holds, METER, **{name: decimal(step) for name, step in steps.items()}, **sizes(token=token))


@check("NPT-29")
def half_precision(evidence: Evidence) -> CheckResult:
    step, base = evidence.run_bytes("+ fp16"), 2 * SIZES[LLAMA_8B].num_parameters
    return matches_figure(METER, step, step=decimal(step), base=decimal(base))


@check("NPT-30")
def with_fewer_layers(evidence: Evidence) -> CheckResult:
    step, before = evidence.run_bytes("+ fewer layers"), evidence.run_bytes("+ fp16")
    return matches_figure(METER, step, step=decimal(step), less=decimal(before - step))


@check("NPT-31")
def small_model(evidence: Evidence) -> CheckResult:
    """Compute 16 bytes a parameter, as if all parameters trained; measure a step in which only A and B train."""
    all_trained, step = 16 * SIZES[GPT2].num_parameters, evidence.run_bytes("small model")
    return matches_figure(f"{ARITHMETIC}; {METER}", all_trained, all_trained=decimal(all_trained), step=decimal(step))
