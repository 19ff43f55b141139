"""Checks of what the report says its loss takes: sizes, and readings of the real forms at the incident."""

from __future__ import annotations

import itertools

from ....laws import NAIVE
from ....units import GiB, format_bytes
from ...claims import Found, Quantity, decimal
from .evidence import AFTER_FIRST_LAYER_BYTES, AFTER_FORWARD_BYTES, CAPACITY_BYTES, Evidence

METER = "simulated meter"
ARITHMETIC = "arithmetic"


def incident_dims(evidence: Evidence) -> Found:
    """LOG-02: what the incident is replayed at."""
    dims, dtype = evidence.dims, evidence.case.dtype
    same = (dims["B"], dims["T"], dims["V"], dtype) == (1, 131_072, 151_936, "bfloat16")
    return Found(same, "the incident's case", {"elements": evidence.bytes("B*T*V"), "dtype": dtype})


def float32_intermediates(evidence: Evidence) -> Found:
    """LOG-03: what cross entropy takes beside the logits, with and without a cast to float32."""
    cast = evidence.peak(NAIVE, "forward", in_float32=True) - evidence.logits_bytes
    plain = evidence.peak(NAIVE, "forward") - evidence.logits_bytes
    figures = {
        "one": decimal(evidence.bytes("B*T*V*4")),
        "one_binary": format_bytes(evidence.bytes("B*T*V*4")),
        "cast": format_bytes(cast),
        "plain": format_bytes(plain),
    }
    return Found.sized(METER, figures, cast)


def total_of_the_loss(evidence: Evidence) -> Found:
    """LOG-04: the peak of the old loss, without and with a backward."""
    train = evidence.peak(NAIVE, "train")
    figures = {
        "train_decimal": decimal(train),
        "forward": format_bytes(evidence.peak(NAIVE, "forward")),
        "train": format_bytes(train),
        "float32_forward": format_bytes(evidence.peak(NAIVE, "forward", in_float32=True)),
        "float32_train": format_bytes(evidence.peak(NAIVE, "train", in_float32=True)),
    }
    return Found.sized(METER, figures, train)


def refused_allocation(evidence: Evidence) -> Found:
    """LOG-05: what the old loss asks for when the report's card is full."""
    timeline = evidence.reading(NAIVE, "train").timeline
    assert timeline is not None
    event = next(event for event, live in enumerate(timeline.live_bytes) if live > CAPACITY_BYTES)
    refused = next(buffer.bytes for buffer in timeline.buffers if buffer.born == event)
    figures = {
        "refused": format_bytes(refused),
        "shifted": format_bytes(evidence.bytes("B*(T - 1)*V*e")),
        "logits": format_bytes(evidence.logits_bytes),
    }
    return Found.sized(METER, figures, refused)


def does_not_fit(evidence: Evidence) -> Found:
    """LOG-07: the table's full forward and one more tensor of logits, on the report's card."""
    total = AFTER_FORWARD_BYTES + evidence.logits_bytes
    return Found(total > CAPACITY_BYTES, ARITHMETIC, {"total": format_bytes(total)})


def chunks_of_4096(evidence: Evidence) -> Found:
    """LOG-11: the largest tensor that the reported loop makes, and how many chunks it takes."""
    timeline = evidence.reading("reported", "forward").timeline
    assert timeline is not None
    largest = max(buffer.bytes for buffer in timeline.buffers if buffer.born)
    figures: dict[str, int | str] = {
        "largest": format_bytes(largest),
        "float32": format_bytes(evidence.bytes("C*V*4")),
        "chunks": evidence.bytes("ceil_div(T, C)"),
    }
    return Found(largest == evidence.bytes("C*V*e"), METER, figures)


def one_chunk_at_a_time(evidence: Evidence) -> Found:
    """LOG-12: what the reported loop holds when its forward has ended, and what others hold."""
    held = evidence.peak("reported", "held")
    figures = {
        "forward": format_bytes(evidence.peak("reported", "forward")),
        "held": format_bytes(held),
        "train": format_bytes(evidence.peak("reported", "train")),
        "float32_held": format_bytes(evidence.peak("reported", "held", in_float32=True)),
        "checkpoint": format_bytes(evidence.peak("checkpoint", "train")),
        "triton": format_bytes(evidence.peak("triton", "train")),
    }
    return Found(held <= evidence.bytes("C*V*e"), METER, figures)


def logits_not_materialised(evidence: Evidence) -> Found:
    """LOG-21: as many log-probabilities as there are logits, or none, after the forward of a train step."""
    held = evidence.peak("reported", "held")
    figures = {
        "held": format_bytes(held),
        "logits": format_bytes(evidence.logits_bytes),
        "checkpoint": format_bytes(evidence.peak("checkpoint", "held")),
    }
    return Found(held < evidence.logits_bytes, METER, figures)


def saved_by_chunks(evidence: Evidence) -> Found:
    """LOG-22: the old loss less the new one, by phase and form."""
    saved = {
        "forward": evidence.peak(NAIVE, "forward") - evidence.peak("reported", "forward"),
        "reported": evidence.peak(NAIVE, "train") - evidence.peak("reported", "train"),
        "checkpoint": evidence.peak(NAIVE, "train") - evidence.peak("checkpoint", "train"),
    }
    figures = {name: format_bytes(count) for name, count in saved.items()}
    figures["reported_decimal"] = decimal(saved["reported"])
    return Found.sized(METER, figures, *saved.values())


def old_loss_in_a_column_of_totals(evidence: Evidence) -> Found:
    """LOG-35: the row counted as the others are. 62.97 has the logits already; without them it would be more."""
    beside_logits = evidence.peak(NAIVE, "train") - evidence.logits_bytes
    total = AFTER_FORWARD_BYTES + beside_logits
    figures = {"total": format_bytes(total), "without": format_bytes(total + evidence.logits_bytes)}
    return Found.sized(f"{METER}, and the table's 62.97", figures, total)


def new_loss_in_a_column_of_totals(evidence: Evidence) -> Found:
    """LOG-36: a forward in chunks on top of what is there without logits."""
    plain = AFTER_FIRST_LAYER_BYTES + evidence.peak("reported", "forward")
    cast = AFTER_FIRST_LAYER_BYTES + evidence.peak("reported", "forward", in_float32=True)
    figures = {"total": format_bytes(plain), "float32_total": format_bytes(cast)}
    return Found.sized(f"{METER}, and the table's 25.87", figures, plain, cast)


def fits_in_training(evidence: Evidence) -> Found:
    """LOG-37: parameters, tables, the inputs of checkpointed layers, and what the reported loss holds in float32."""
    there = evidence.parameter_bytes + evidence.table_bytes + evidence.layer_inputs_bytes
    cast = there + evidence.peak("reported", "held", in_float32=True)
    figures = {
        "total": format_bytes(cast),
        "plain": format_bytes(there + evidence.peak("reported", "held")),
        "checkpoint": format_bytes(there + evidence.peak("checkpoint", "train")),
    }
    return Found(cast <= CAPACITY_BYTES, f"{METER}, before backward", figures)


def enables_training(evidence: Evidence) -> Found:
    """LOG-55: which losses leave room for the rest of the step on the report's card."""
    there = evidence.parameter_bytes + evidence.table_bytes + evidence.layer_inputs_bytes
    standard, reported, ours = (
        there + evidence.peak(form, "train", in_float32=in_float32)
        for form, in_float32 in ((NAIVE, False), ("reported", True), ("triton", False))
    )
    figures = {
        "standard": format_bytes(standard),
        "reported": format_bytes(reported),
        "reported_plain": format_bytes(there + evidence.peak("reported", "train")),
        "triton": format_bytes(ours),
    }
    return Found(standard > CAPACITY_BYTES >= reported, METER, figures)


def one_thing_one_figure(evidence: Evidence) -> Found:
    """LOG-45: three totals for the model and its activations, and the one that follows from sizes."""
    derived = evidence.parameter_bytes + evidence.table_bytes + evidence.layer_inputs_bytes + evidence.logits_bytes
    said = ("62.97 GB", "~66 GB", "68 GB")
    agree = all(first == second for first, second in itertools.pairwise(Quantity.parsed(text).low for text in said))
    return Found(agree, ARITHMETIC, {"derived": format_bytes(derived), "said": ", ".join(said)})


def after_embedding(evidence: Evidence) -> Found:
    """LOG-32: parameters and hidden states, added in GiB and in GB, to the two digits that both summands have."""
    hidden = evidence.bytes("B*T*D*e")
    in_gib, in_gb = 8.72 + hidden / GiB, 8.72 + hidden / 10**9
    figures = {"in_gib": f"{in_gib:.3f}", "in_gb": f"{in_gb:.3f}"}
    return Found(abs(in_gib - 9.35) < 0.01 <= abs(in_gb - 9.35), ARITHMETIC, figures)


CHECKS = {
    check.__name__: check
    for check in (
        incident_dims,
        float32_intermediates,
        total_of_the_loss,
        refused_allocation,
        does_not_fit,
        chunks_of_4096,
        one_chunk_at_a_time,
        logits_not_materialised,
        saved_by_chunks,
        old_loss_in_a_column_of_totals,
        new_loss_in_a_column_of_totals,
        fits_in_training,
        enables_training,
        one_thing_one_figure,
        after_embedding,
    )
}
