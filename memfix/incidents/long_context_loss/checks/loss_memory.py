"""Checks of claims about the memory of the loss: sizes, and readings of the op's forms at the incident's dims."""

from __future__ import annotations

from ....laws import NAIVE
from ....units import GiB
from ...claims import Quantity
from ...judging import ARITHMETIC, METER, CheckResult, check, decimal, holds_if, matches_figure, sizes
from . import AFTER_FIRST_LAYER_BYTES, AFTER_FORWARD_BYTES, CAPACITY_BYTES, FLOAT32, Evidence


@check("LOG-02")
def incident_dims(evidence: Evidence) -> CheckResult:
    """Compare the dims and the dtype of the incident's case with the report's."""
    dims, dtype = evidence.dims, evidence.case.dtype
    same = (dims["B"], dims["T"], dims["V"], dtype) == (1, 131_072, 151_936, "bfloat16")
    return holds_if(same, "the incident's case", elements=evidence.evaluate("B*T*V"), dtype=dtype)


@check("LOG-03")
def float32_intermediates(evidence: Evidence) -> CheckResult:
    """Measure what cross entropy takes beside the logits, with and without a cast to float32."""
    one = evidence.evaluate("B*T*V*4")
    cast = evidence.peak(NAIVE, "forward", op=FLOAT32) - evidence.logits_bytes
    plain = evidence.peak(NAIVE, "forward") - evidence.logits_bytes
    return matches_figure(METER, cast, one=decimal(one), **sizes(one_binary=one, cast=cast, plain=plain))


@check("LOG-04")
def total_of_the_loss(evidence: Evidence) -> CheckResult:
    """Measure the peak of the old loss, without and with a backward, in bfloat16 and with a cast to float32."""
    train = evidence.peak(NAIVE, "train")
    figures = sizes(
        forward=evidence.peak(NAIVE, "forward"),
        train=train,
        float32_forward=evidence.peak(NAIVE, "forward", op=FLOAT32),
        float32_train=evidence.peak(NAIVE, "train", op=FLOAT32),
    )
    return matches_figure(METER, train, train_decimal=decimal(train), **figures)


@check("LOG-05")
def refused_allocation(evidence: Evidence) -> CheckResult:
    """Find the allocation with which the old loss exceeds the report's card."""
    timeline = evidence.timeline(NAIVE, "train")
    event = next(event for event, live in enumerate(timeline.live_bytes) if live > CAPACITY_BYTES)
    refused = next(buffer.bytes for buffer in timeline.buffers if buffer.born == event)
    shifted = evidence.evaluate("B*(T - 1)*V*e")
    return matches_figure(METER, refused, **sizes(refused=refused, shifted=shifted, logits=evidence.logits_bytes))


@check("LOG-07")
def does_not_fit(evidence: Evidence) -> CheckResult:
    """Add one more tensor of logits to the table's full forward, and compare the sum with the report's card."""
    total = AFTER_FORWARD_BYTES + evidence.logits_bytes
    return holds_if(total > CAPACITY_BYTES, ARITHMETIC, **sizes(total=total))


@check("LOG-11")
def chunks_of_4096(evidence: Evidence) -> CheckResult:
    """Find the largest tensor that the reported loop makes, and count its chunks."""
    largest = evidence.largest("reported")
    figures = sizes(largest=largest, float32=evidence.evaluate("C*V*4"))
    return holds_if(largest == evidence.evaluate("C*V*e"), METER, **figures, chunks=evidence.evaluate("ceil_div(T, C)"))


@check("LOG-12")
def one_chunk_at_a_time(evidence: Evidence) -> CheckResult:
    """Measure what the reported loop holds after its forward, and the peaks of other forms in training."""
    held = evidence.peak("reported", "held")
    figures = sizes(
        forward=evidence.peak("reported", "forward"),
        held=held,
        train=evidence.peak("reported", "train"),
        float32_held=evidence.peak("reported", "held", op=FLOAT32),
        checkpoint=evidence.peak("checkpoint", "train"),
        triton=evidence.peak("triton", "train"),
    )
    return holds_if(held <= evidence.evaluate("C*V*e"), METER, **figures)


@check("LOG-21")
def logits_not_materialised(evidence: Evidence) -> CheckResult:
    """Compare what the reported loop holds after a forward, its log-probabilities, with the logits."""
    held, logits = evidence.peak("reported", "held"), evidence.logits_bytes
    checkpoint = evidence.peak("checkpoint", "held")
    return holds_if(held < logits, METER, **sizes(held=held, logits=logits, checkpoint=checkpoint))


@check("LOG-22")
def saved_by_chunks(evidence: Evidence) -> CheckResult:
    """Compute by how much the peak of the new loss is below that of the old loss, by phase and form."""
    train = evidence.peak(NAIVE, "train")
    saved = {
        "forward": evidence.peak(NAIVE, "forward") - evidence.peak("reported", "forward"),
        "reported": train - evidence.peak("reported", "train"),
        "checkpoint": train - evidence.peak("checkpoint", "train"),
    }
    return matches_figure(METER, *saved.values(), **sizes(**saved), reported_decimal=decimal(saved["reported"]))


@check("LOG-35")
def old_loss_in_a_column_of_totals(evidence: Evidence) -> CheckResult:
    """Count the row as the table's other rows: 62.97 and the peak of the old loss, with its logits counted once."""
    without = AFTER_FORWARD_BYTES + evidence.peak(NAIVE, "train")
    total = without - evidence.logits_bytes
    return matches_figure(f"{METER}, and the table's 62.97", total, **sizes(total=total, without=without))


@check("LOG-36")
def new_loss_in_a_column_of_totals(evidence: Evidence) -> CheckResult:
    """Add the peak of a forward in chunks to the table's total without logits."""
    plain = AFTER_FIRST_LAYER_BYTES + evidence.peak("reported", "forward")
    cast = AFTER_FIRST_LAYER_BYTES + evidence.peak("reported", "forward", op=FLOAT32)
    return matches_figure(f"{METER}, and the table's 25.87", plain, cast, **sizes(total=plain, float32_total=cast))


@check("LOG-37")
def fits_in_training(evidence: Evidence) -> CheckResult:
    """Add up parameters, RoPE tables, the inputs of all layers, and what the loss holds after its forward."""
    there = evidence.held_beside_loss_bytes
    cast = there + evidence.peak("reported", "held", op=FLOAT32)
    figures = sizes(
        total=cast,
        plain=there + evidence.peak("reported", "held"),
        checkpoint=there + evidence.peak("checkpoint", "train"),
    )
    return holds_if(cast <= CAPACITY_BYTES, f"{METER}, before backward", **figures)


@check("LOG-55")
def enables_training(evidence: Evidence) -> CheckResult:
    """Compute which losses leave room for the rest of the step on the report's card."""
    there = evidence.held_beside_loss_bytes
    standard = there + evidence.peak(NAIVE, "train")
    reported = there + evidence.peak("reported", "train", op=FLOAT32)
    figures = sizes(
        standard=standard,
        reported=reported,
        reported_plain=there + evidence.peak("reported", "train"),
        triton=there + evidence.peak("triton", "train"),
    )
    return holds_if(standard > CAPACITY_BYTES >= reported, METER, **figures)


@check("LOG-45")
def one_thing_one_figure(evidence: Evidence) -> CheckResult:
    """Compare the report's three totals for the model and its activations, and compute the right one."""
    derived = evidence.held_beside_loss_bytes + evidence.logits_bytes
    said = ("62.97 GB", "~66 GB", "68 GB")
    agree = len({Quantity.parsed(text).low for text in said}) == 1
    return holds_if(agree, ARITHMETIC, **sizes(derived=derived), said=", ".join(said))


@check("LOG-32")
def after_embedding(evidence: Evidence) -> CheckResult:
    """Add parameters and hidden states, in GiB and in GB, and compare with the report's two decimals."""
    hidden = evidence.evaluate("B*T*D*e")
    in_gib, in_gb = 8.72 + hidden / GiB, 8.72 + hidden / 10**9
    is_gib = abs(in_gib - 9.35) < 0.01 <= abs(in_gb - 9.35)
    return holds_if(is_gib, ARITHMETIC, in_gib=f"{in_gib:.3f}", in_gb=f"{in_gb:.3f}")
