"""Checks of the report's ranking of solutions, by simulated train steps of each."""

from __future__ import annotations

import torch

from ...decoder_parts import num_parameters
from ...judging import METER, CheckResult, check, decimal, holds_if, matches_figure, sizes
from . import Evidence
from .behaviour import gradients

CARD_BYTES = 40 * 2**30
ORIGINAL, FF, CROSS = "original", "1: feed-forwards alone", "2: attention to 256 latents"
BATCH, CHECKPOINT = "3: batch 16", "4: checkpointing"
OUR_ATTENTION, OURS, OURS_CHECKPOINTED = "our attention", "our attention and feed-forward", "both, checkpointed"
RECOMMENDED_WITH_OURS = "1 with our feed-forward"


@check("SCN-12")
def gradients_double(evidence: Evidence) -> CheckResult:
    """Compare what is held for backward with the step's peak above parameters, gradients and Adam's states."""
    held = evidence.held_by_model()
    above = evidence.run_bytes(ORIGINAL) - 16 * num_parameters(evidence.model())
    return holds_if(above > 1.9 * held, METER, times=f"{above / held:.2f}x", **sizes(held=held, step=above))


@check("SCN-15")
def grand_total(evidence: Evidence) -> CheckResult:
    step = evidence.run_bytes(ORIGINAL)
    figures = sizes(binary=step, two_layers=evidence.run_bytes("5: num_layers 2"))
    return matches_figure(METER, step, step=decimal(step), **figures)


@check("SCN-20")
def thirty_six_times(evidence: Evidence) -> CheckResult:
    before, after = evidence.run_bytes(ORIGINAL), evidence.run_bytes(FF)
    times, saved = before / after, 1 - after / before
    return matches_figure(
        METER, times, times=f"{times:.2f}x", saved=f"{saved:.0%}", **sizes(before=before, after=after)
    )


@check("SCN-27")
def to_latents(evidence: Evidence) -> CheckResult:
    """Compute the bytes of all matrices, and measure a step."""
    matrices = 9 * evidence.evaluate("B*H*N*M*e")
    before, after = evidence.run_bytes(ORIGINAL), evidence.run_bytes(CROSS)
    figures = sizes(binary=matrices, before=before, after=after)
    return matches_figure(METER, matrices, decimal=decimal(matrices), times=f"{before / after:.2f}x", **figures)


@check("SCN-28")
def a_quarter_of_the_batch(evidence: Evidence) -> CheckResult:
    before, after = evidence.run_bytes(ORIGINAL), evidence.run_bytes(BATCH)
    states = 16 * num_parameters(evidence.model())
    times = before / after
    return holds_if(round(times) == 4, METER, times=f"{times:.2f}x", **sizes(after=after, states=states))


@check("SCN-31")
def half_by_checkpoints(evidence: Evidence) -> CheckResult:
    before, after = evidence.run_bytes(ORIGINAL), evidence.run_bytes(CHECKPOINT)
    saved = 1 - after / before
    return matches_figure(METER, saved, saved=f"{saved:.0%}", **sizes(before=before, after=after))


@check("SCN-33")
def smaller_runs(evidence: Evidence) -> CheckResult:
    """Measure a step with each of the two smaller configs."""
    before, pixels, layers = (evidence.run_bytes(name) for name in (ORIGINAL, "5: 16 x 16 pixels", "5: num_layers 2"))
    return holds_if(max(pixels, layers) < before, METER, **sizes(pixels=pixels, layers=layers))


@check("SCN-34")
def ranked(evidence: Evidence) -> CheckResult:
    """Sort the first four solutions by the peak of a step, and compare with the report's order."""
    order = [FF, CROSS, BATCH, CHECKPOINT]
    by_peak = sorted(order, key=evidence.run_bytes)
    return holds_if(by_peak == order, METER, order=", ".join(name.partition(": ")[2] for name in by_peak))


@check("SCN-36")
def five_gigabytes(evidence: Evidence) -> CheckResult:
    step, ours = evidence.run_bytes(FF), evidence.run_bytes(RECOMMENDED_WITH_OURS)
    return matches_figure(METER, step, step=decimal(step), **sizes(binary=step, ours=ours))


@check("SCN-37")
def fits_easily(evidence: Evidence) -> CheckResult:
    step, ours = evidence.run_bytes(FF), evidence.run_bytes(OURS)
    return holds_if(step < CARD_BYTES, METER, **sizes(step=step, card=CARD_BYTES, ours=ours))


@check("SCN-43")
def missing_remedy(evidence: Evidence) -> CheckResult:
    """Measure steps of the original decoder with our forms, and compare gradients of a tiny one with naive's."""
    before = evidence.run_bytes(ORIGINAL)
    peaks = {
        "attention": evidence.run_bytes(OUR_ATTENTION),
        "both": evidence.run_bytes(OURS),
        "checkpointed": evidence.run_bytes(OURS_CHECKPOINTED),
    }
    ours, naive = gradients(evidence, "model.attention=auto", "model.feed_forward=auto"), gradients(evidence)
    equal = all(torch.allclose(one, other, rtol=1e-8, atol=1e-12) for one, other in zip(ours, naive, strict=True))
    holds = equal and peaks["attention"] < evidence.run_bytes(FF)
    return holds_if(holds, METER, function="the same" if equal else "another", **sizes(before=before, **peaks))
