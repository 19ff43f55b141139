"""Checks of claims about the weight delta: its shape, its bytes, and the low-rank product that needs no delta."""

# B batch, S tokens of a sequence, D width, F width of the feed-forward, R rank

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from ....laws import NAIVE
from ....ops.npt_linear import npt_linear
from ....ops.npt_linear.contract import contract
from ....ops.npt_linear.reported import compute_weight_delta, reported_npt_linear
from ...evidence import raised
from ...judging import (
    ARITHMETIC,
    METER,
    ON_CPU,
    CheckResult,
    as_recorded,
    check,
    decimal,
    holds_if,
    matches_figure,
    sizes,
)
from ..model import SIZES
from . import LLAMA_7B, LLAMA_8B, Evidence, drawn

B, S, D, F, R = 2, 5, 6, 7, 3  # dims of the tensors that are computed on the CPU


def _inputs() -> dict[str, Any]:
    return {
        "hidden": drawn(B, S, D), "weight": drawn(D, F, seed=1), "a": drawn(D, R, seed=2), "b": drawn(R, F, seed=3),
        "modulation": drawn(B, S, R, seed=4),
    }  # fmt: skip


def _einsum(given: dict[str, Any]) -> torch.Tensor:
    """The weight delta of every token, by the report's own line of code."""
    return torch.einsum("bsr,dr,rf->bsdf", given["modulation"], given["a"], given["b"])


@check("NPT-01")
def four_dimensions(evidence: Evidence) -> CheckResult:
    """Run the report's line at its own dims, on tensors without values."""
    dims = evidence.dims
    shapes = {"modulation": "BSR", "a": "DR", "b": "RF"}
    given = {name: torch.empty([dims[axis] for axis in axes], device="meta") for name, axes in shapes.items()}
    return as_recorded("on the meta device", shape=str(tuple(_einsum(given).shape)))


@check("NPT-02")
def typical_width(evidence: Evidence) -> CheckResult:
    """Look up the width of the feed-forward in the published 7B and 8B models."""
    widths = {size: SIZES[size].ffn_width for size in (LLAMA_7B, LLAMA_8B)}
    holds = set(widths.values()) == {evidence.dims["F"]}
    return holds_if(holds, "the published shapes", of_7b=widths[LLAMA_7B], of_8b=widths[LLAMA_8B])


@check("NPT-03", formula="B*S*D*F*e", at_8b="B*S*D*G*e", unit="GB")
@check("NPT-07", formula="B*D*F*e", at_8b="B*D*G*e", unit="MB")
def bytes_of_deltas(evidence: Evidence, formula: str, at_8b: str, unit: str) -> CheckResult:
    """Compute the bytes of the deltas of all tokens, or of one token per sequence, at both widths."""
    size, wide, one = evidence.evaluate(formula), evidence.evaluate(at_8b), evidence.evaluate(formula, B=1)
    figures = sizes(binary=size, wide=wide, one_sequence=one)
    return matches_figure(ARITHMETIC, size, bytes=size, decimal=decimal(size, unit), **figures)


@check("NPT-04")
def modulation(evidence: Evidence) -> CheckResult:
    """Compare the gradient of A with and without the path through the modulation, ``attention @ A``."""
    given, attention = _inputs(), drawn(B, S, D, seed=5)
    product = attention @ given["a"]
    whole, weight_alone = (
        torch.autograd.grad(npt_linear(**{**given, "modulation": m}).sum(), given["a"])[0]
        for m in (product, product.detach())
    )
    holds = product.shape == (B, S, R) and not torch.allclose(whole, weight_alone)
    return holds_if(holds, ON_CPU, shape="(b, s, r)", paths=2 if holds else 1)


@check("NPT-05")
def modulation_bytes(evidence: Evidence) -> CheckResult:
    size = evidence.evaluate("B*S*R*e")
    return matches_figure(
        ARITHMETIC, size, bytes=size, elements=evidence.evaluate("B*S*R"), one=evidence.evaluate("S*R*e")
    )


@check("NPT-06")
def one_token(evidence: Evidence) -> CheckResult:
    """Compare the delta of every position with its slice of the whole delta; try positions that do not exist."""
    given = _inputs()
    delta = _einsum(given)
    positions = [compute_weight_delta(given["modulation"], at, given["a"], given["b"]) for at in range(S)]
    equal = all(torch.allclose(one, delta[:, at], rtol=1e-12) for at, one in enumerate(positions))
    outside = {raised(compute_weight_delta, given["modulation"], at, given["a"], given["b"]) for at in (-1, S)}
    holds = equal and positions[0].shape == (B, D, F) and outside == {"ValueError"}
    return holds_if(holds, ON_CPU, positions=len(positions), outside=", ".join(sorted(outside)))


@check("NPT-08")
def chunks(evidence: Evidence) -> CheckResult:
    """Compare the results of all chunk sizes with naive, and the peaks of two chunk sizes."""
    given = _inputs()
    true = contract.naive(*given.values())
    outputs = [npt_linear(**given, form="token_chunks", tokens_per_chunk=size) for size in range(1, B * S + 2)]
    equal = all(torch.allclose(out, true, rtol=1e-12) for out in outputs)
    few, twice = (evidence.peak("token_chunks", "forward", tokens_per_chunk=size) for size in (8, 16))
    return holds_if(
        equal and few < twice < 2 * few, f"{ON_CPU}; {METER}", sizes_tried=len(outputs), **sizes(at_8=few, at_16=twice)
    )


@check("NPT-09")
def below_a_gigabyte(evidence: Evidence) -> CheckResult:
    """Compute the report's sum; measure its form without gradients and in training, and the low-rank product."""
    summed = evidence.evaluate("B*S*R*e + B*D*F*e")
    forward, held = evidence.peak("reported", "forward"), evidence.peak("reported", "held")
    train = evidence.peak("reported", "train")
    figures = sizes(forward=forward, held=held, factored=evidence.peak("factored", "train"))
    return holds_if(max(summed, forward, train) < 10**9, METER, sum=decimal(summed), **figures)


@check("NPT-10")
def four_hundred_times(evidence: Evidence) -> CheckResult:
    """Compare the bytes of the two tensors, and the peaks of two forms with that of naive."""
    ratio = evidence.evaluate("B*S*D*F*e") / evidence.evaluate("B*D*F*e")
    peaks = {phase: f"{evidence.times_below('reported', phase):.1f}x" for phase in ("forward", "train")}
    factored = f"{evidence.times_below('factored', 'train'):,.0f}x"
    return holds_if(ratio > 400, f"{ARITHMETIC}; {METER}", ratio=round(ratio), **peaks, factored=factored)


@check("NPT-19")
def product_equals(evidence: Evidence) -> CheckResult:
    """Compare the result and all gradients of the low-rank product with the einsum, in float64, at several ranks."""
    worst = 0.0
    for rank in (1, 2, R):
        given = _inputs()
        given |= {"a": drawn(D, rank, seed=2), "b": drawn(rank, F, seed=3), "modulation": drawn(B, S, rank, seed=4)}
        ours = npt_linear(**given, form="factored")
        true = torch.einsum("bsd,bsdf->bsf", given["hidden"], given["weight"] + _einsum(given))
        pairs = zip(*(torch.autograd.grad(out.square().sum(), [*given.values()]) for out in (ours, true)), strict=True)
        worst = max(worst, *(float((one - other).detach().abs().max()) for one, other in [(ours, true), *pairs]))
    return holds_if(worst < 1e-10, ON_CPU, ranks=3, within="1e-10" if worst < 1e-10 else f"{worst:.0e}")


@check("NPT-20")
def distributes(evidence: Evidence) -> CheckResult:
    given = _inputs()
    delta, hidden = _einsum(given), given["hidden"].unsqueeze(-2)
    whole, parts = hidden @ (given["weight"] + delta), hidden @ given["weight"] + hidden @ delta
    return holds_if(torch.allclose(whole, parts, rtol=1e-10), ON_CPU, equal=str(torch.allclose(whole, parts)))


@check("NPT-21")
def no_delta(evidence: Evidence) -> CheckResult:
    """Measure the largest tensor that the low-rank product makes without gradients, and its peak in training."""
    largest, weight = evidence.largest("factored"), evidence.evaluate("D*F*e")
    figures = sizes(
        largest=largest, weight=weight, train=evidence.peak("factored", "train"), naive=evidence.peak(NAIVE, "train")
    )
    return holds_if(largest < weight, METER, **figures)


@check("NPT-24")
def half_the_tokens(evidence: Evidence) -> CheckResult:
    size = evidence.evaluate("B*S*D*F*e", S=256)
    return holds_if(2 * size == evidence.evaluate("B*S*D*F*e"), ARITHMETIC, bytes=size, **sizes(binary=size))


@check("NPT-34")
def operations(evidence: Evidence) -> CheckResult:
    """Count the operations of one token at the report's dims, by the reported form and by the low-rank product."""
    dims = evidence.dims
    shapes = [
        (1, 1, dims["D"]),
        (dims["D"], dims["F"]),
        (dims["D"], dims["R"]),
        (dims["R"], dims["F"]),
        (1, 1, dims["R"]),
    ]
    hidden, weight, a, b, modulation = (torch.empty(shape, device="meta") for shape in shapes)
    with FlopCounterMode(display=False) as loop:
        reported_npt_linear(hidden, weight, a, b, modulation)
    with FlopCounterMode(display=False) as product:
        ((hidden @ a) * modulation) @ b
    counts = loop.get_total_flops(), product.get_total_flops()
    return matches_figure("counted by torch", counts[0] / counts[1], loop=counts[0], product=counts[1])
