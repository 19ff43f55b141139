"""Checks of claims about the memory of a train step, by simulated steps of the report's model."""

from __future__ import annotations

from ....units import GiB
from ...judging import METER, CheckResult, check, decimal, holds_if, matches_figure, sizes
from ...profile import GRADIENTS, LATER_STEP, OPTIMIZER, STATES
from . import DENSE, ORIGINAL, ORIGINAL_WORDS, Evidence

CARD_BYTES = 80 * GiB


@check("PYT-03")
def vocabulary_is_primary(evidence: Evidence) -> CheckResult:
    """Compare a step with 50,000 words and one with 10,000. A primary issue would be most of the 40 GB."""
    before, after = evidence.later_step_bytes(*ORIGINAL), evidence.later_step_bytes(DENSE)
    states = 16 * (evidence.parameters(ORIGINAL_WORDS) - evidence.parameters())
    return holds_if(
        before - after > 20e9, METER, before=decimal(before), after=decimal(after), **sizes(parameters_alone=states)
    )


@check("PYT-21")
def fails_with_batch_8(evidence: Evidence) -> CheckResult:
    """Compare the step before the fix with a card of 80 GiB; measure it with one-hot embedding and loss, too."""
    step = evidence.later_step_bytes(*ORIGINAL, "training.batch_size=8")
    one_hot = evidence.later_step_bytes(
        *ORIGINAL, "training.batch_size=8", "model.embedding_form=one_hot", "model.loss_form=one_hot"
    )
    return holds_if(step > CARD_BYTES, METER, step=decimal(step), one_hot=decimal(one_hot))


@check("PYT-22")
def forty_gigabytes(evidence: Evidence) -> CheckResult:
    step = evidence.later_step_bytes(*ORIGINAL, "training.batch_size=8")
    return matches_figure(METER, step, step=decimal(step))


@check("PYT-23")
def works_with_batch_32(evidence: Evidence) -> CheckResult:
    step = evidence.later_step_bytes(DENSE)
    return holds_if(step <= CARD_BYTES, METER, step=decimal(step), times=f"{CARD_BYTES / step:.0f}x")


@check("PYT-32")
def gradients(evidence: Evidence) -> CheckResult:
    size = evidence.rows(DENSE)[OPTIMIZER].kinds[GRADIENTS]
    return matches_figure(METER, size, bytes=size, per_parameter=size // evidence.parameters())


@check("PYT-33")
def adam_states(evidence: Evidence) -> CheckResult:
    size = evidence.rows(DENSE)[LATER_STEP].kinds[STATES]
    return matches_figure(METER, size, bytes=size, per_parameter=size // evidence.parameters())


@check("PYT-34")
def activations(evidence: Evidence) -> CheckResult:
    """Measure what batch 32 keeps for backward, by dense and by sparse attention, and without dropout."""
    kept = evidence.kept_for_backward(DENSE)
    sparse, undropped = evidence.kept_for_backward(), evidence.kept_for_backward(DENSE, "model.dropout=0")
    return matches_figure(METER, kept, dense=decimal(kept), sparse=decimal(sparse), without_dropout=decimal(undropped))


@check("PYT-35")
def total(evidence: Evidence) -> CheckResult:
    step, sparse = evidence.later_step_bytes(DENSE), evidence.later_step_bytes()
    undropped = evidence.later_step_bytes(DENSE, "model.dropout=0")
    return matches_figure(METER, step, dense=decimal(step), sparse=decimal(sparse), without_dropout=decimal(undropped))


@check("PYT-44")
def logits_are_missing(evidence: Evidence) -> CheckResult:
    """Test that the report's rows add up to its total without logits; count the logits alive at the peak."""
    one = evidence.evaluate("B*T*V*e")
    at_once = evidence.alive_at_peak(LATER_STEP, DENSE).count(one)
    rows_mb, total_mb = 304 + 304 + 608 + 2000, 3200
    return holds_if(round(rows_mb, -2) == total_mb and at_once > 0, METER, bytes=one, at_once=at_once)
