"""Checks of what the report says a train step takes: simulated steps of its model."""

from __future__ import annotations

from ....units import GiB
from ...judging import METER, CheckResult, check, compared, decimal, result, sizes
from ...profile import GRADIENTS, LATER_STEP, OPTIMIZER, STATES
from .evidence import DENSE, ORIGINAL, ORIGINAL_WORDS, Evidence

CARD_BYTES = 80 * GiB


@check("PYT-03")
def vocabulary_is_primary(evidence: Evidence) -> CheckResult:
    """A step with 50,000 words against one with 10,000. The primary issue would be most of the 40 GB."""
    before, after = evidence.later_step_bytes(*ORIGINAL), evidence.later_step_bytes(DENSE)
    states = 16 * (evidence.parameters(ORIGINAL_WORDS) - evidence.parameters())
    return result(
        before - after > 20e9, METER, before=decimal(before), after=decimal(after), **sizes(parameters_alone=states)
    )


@check("PYT-21")
def fails_with_batch_8(evidence: Evidence) -> CheckResult:
    """The step before the fix, on a card of 80 GiB; and where its embedding and loss go by one-hot rows."""
    step = evidence.later_step_bytes(*ORIGINAL, "training.batch_size=8")
    one_hot = evidence.later_step_bytes(
        *ORIGINAL, "training.batch_size=8", "model.embedding_form=one_hot", "model.loss_form=one_hot"
    )
    return result(step > CARD_BYTES, METER, step=decimal(step), one_hot=decimal(one_hot))


@check("PYT-22")
def forty_gigabytes(evidence: Evidence) -> CheckResult:
    step = evidence.later_step_bytes(*ORIGINAL, "training.batch_size=8")
    return compared(METER, step, step=decimal(step))


@check("PYT-23")
def works_with_batch_32(evidence: Evidence) -> CheckResult:
    step = evidence.later_step_bytes(DENSE)
    return result(step <= CARD_BYTES, METER, step=decimal(step), times=f"{CARD_BYTES / step:.0f}x")


@check("PYT-32")
def gradients(evidence: Evidence) -> CheckResult:
    size = evidence.rows(DENSE)[OPTIMIZER].kinds[GRADIENTS]
    return compared(METER, size, bytes=size, per_parameter=size // evidence.parameters())


@check("PYT-33")
def adam_states(evidence: Evidence) -> CheckResult:
    size = evidence.rows(DENSE)[LATER_STEP].kinds[STATES]
    return compared(METER, size, bytes=size, per_parameter=size // evidence.parameters())


@check("PYT-34")
def activations(evidence: Evidence) -> CheckResult:
    """Kept for backward at batch 32, by dense and by sparse attention, and without dropout."""
    kept = evidence.kept_for_backward(DENSE)
    sparse, undropped = evidence.kept_for_backward(), evidence.kept_for_backward(DENSE, "model.dropout=0")
    return compared(METER, kept, dense=decimal(kept), sparse=decimal(sparse), without_dropout=decimal(undropped))


@check("PYT-35")
def total(evidence: Evidence) -> CheckResult:
    step, sparse = evidence.later_step_bytes(DENSE), evidence.later_step_bytes()
    undropped = evidence.later_step_bytes(DENSE, "model.dropout=0")
    return compared(METER, step, dense=decimal(step), sparse=decimal(sparse), without_dropout=decimal(undropped))


@check("PYT-44")
def logits_are_missing(evidence: Evidence) -> CheckResult:
    """The report's rows make its total without them; how many tensors of their size are alive at the peak."""
    one = evidence.bytes("B*T*V*e")
    at_once = evidence.alive_at_peak(LATER_STEP, DENSE).count(one)
    rows_mb, total_mb = 304 + 304 + 608 + 2000, 3200
    return result(round(rows_mb, -2) == total_mb and at_once > 0, METER, bytes=one, at_once=at_once)
