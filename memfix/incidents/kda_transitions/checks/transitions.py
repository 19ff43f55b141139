"""Checks of claims about the memory of the transitions: sizes, and readings of the forms at the incident's dims."""

from __future__ import annotations

import torch

from ....laws import NAIVE
from ....ops.kda.reported import precompute_updates
from ....units import GiB, format_bytes
from ...judging import METER, ON_CPU, CheckResult, check, decimal, holds_if, matches_figure, sizes
from . import CAPACITY_BYTES, DIAGONAL, SUBTRACTION, Evidence


@check("KDA-02")
def fails_at_the_subtraction(evidence: Evidence) -> CheckResult:
    """Count the tensors of the transitions' size that are alive when the line has run: two operands and the result."""
    alive = evidence.full_tensors_at_failure
    (made,) = evidence.made_by(NAIVE, SUBTRACTION)
    holds = alive == 3 and made.bytes == evidence.full_bytes
    return holds_if(holds, METER, alive=alive, **sizes(bytes=alive * evidence.full_bytes))


@check("KDA-05")
def a_full_diagonal(evidence: Evidence) -> CheckResult:
    """Measure the size of the diagonal matrix, and the share of it that is not zero."""
    (made,) = evidence.made_by(NAIVE, DIAGONAL)
    example = torch.diag_embed(torch.ones(2, 3, evidence.dims["K"]))
    share = int(example.count_nonzero()) / example.numel()
    return holds_if(
        made.bytes == evidence.full_bytes,
        METER,
        elements=made.bytes // evidence.dims["e"],
        non_zero=round(share * evidence.elements),
        **sizes(enough=round(share * evidence.full_bytes)),
    )


@check("KDA-06")
def rank_one(evidence: Evidence) -> CheckResult:
    """Compute the rank of what is subtracted from the diagonal, for each token and head; also with beta = 0."""
    _, k, v, g, beta = (tensor.detach() for tensor in evidence.tensors(7))
    ranks = []
    for strength in (beta + 0.1, torch.zeros_like(beta)):
        transitions, _ = precompute_updates(k, v, g, strength)
        ranks.append(torch.linalg.matrix_rank(torch.diag_embed(g.exp()) - transitions, atol=1e-9).unique().tolist())
    printed = [", ".join(map(str, of_one)) for of_one in ranks]
    return holds_if(ranks == [[1], [0]], ON_CPU, ranks=printed[0], without_beta=printed[1])


@check("KDA-09")
def one_tensor_of_fp16_inputs(evidence: Evidence) -> CheckResult:
    """Measure one tensor of transitions with fp16 inputs."""
    (tensor,) = evidence.made_by(NAIVE, SUBTRACTION, dtype="float16")
    made, in_fp16 = tensor.bytes, evidence.elements * 2
    figures = sizes(in_fp16_binary=in_fp16, made=made)
    return matches_figure(
        f"{METER}, fp16 inputs", made, in_fp16=decimal(in_fp16, "MB"), made_decimal=decimal(made, "MB"), **figures
    )


@check("KDA-10")
def peak_of_the_operation(evidence: Evidence) -> CheckResult:
    """Add up the operands and the result, and measure the peak with the writes and the scan that follow."""
    at_the_line = evidence.full_tensors_at_failure * evidence.full_bytes
    figures = sizes(
        at_the_line=at_the_line,
        in_fp16=at_the_line // 2,
        forward=evidence.peak(NAIVE, "forward"),
        train=evidence.peak(NAIVE, "train"),
    )
    return matches_figure(METER, at_the_line, decimal=decimal(at_the_line, "MB"), **figures)


@check("KDA-11")
def more_than_the_card(evidence: Evidence) -> CheckResult:
    """Compare the operation with the report's card, and compute how many of the report's layers fit."""
    at_the_line = evidence.full_tensors_at_failure * evidence.full_bytes
    layers = evidence.dense_layers
    return holds_if(
        at_the_line > CAPACITY_BYTES,
        f"{METER}, hn_xs and {CAPACITY_BYTES // GiB} GiB",
        share=f"{at_the_line / CAPACITY_BYTES:.2%}",
        layers=layers.most,
        **sizes(a_layer=layers.bytes_a_layer, held=evidence.peak(NAIVE, "held")),
    )


@check("KDA-14")
def both_in_chunks(evidence: Evidence) -> CheckResult:
    """Find the largest tensor that the loop of the reported fix makes, and those that join its chunks afterwards."""
    in_loop = evidence.made_by("reported", function="_transitions_and_writes")
    joined = [buffer.bytes for buffer in evidence.made_by("reported", function="precompute_updates")]
    largest = max(buffer.bytes for buffer in in_loop)
    holds = largest == evidence.evaluate("B*C*H*K*K*e")
    return holds_if(holds, METER, **sizes(largest=largest, joined=sum(joined)), tensors=len(joined))


@check("KDA-20")
def four_times_less(evidence: Evidence) -> CheckResult:
    """Compare the peaks of naive and of each form in chunks of 64, in forward and in training."""
    times = {
        f"{form}_{phase}": evidence.times_below(form, phase)
        for form in ("reported", "streamed", "wy")
        for phase in ("forward", "train")
    }
    figures = {name: f"{ratio:.2f}x" for name, ratio in times.items()}
    return holds_if(min(times["reported_forward"], times["reported_train"]) >= 4, METER, **figures)


@check("KDA-21")
def critical_allocation(evidence: Evidence) -> CheckResult:
    """Find what the failing line allocates in the reported fix, and the fix's largest allocation."""
    each = {piece.bytes for piece in evidence.made_by("reported", SUBTRACTION)}
    figures = sizes(largest=evidence.largest("reported"), streamed=evidence.largest("streamed"))
    return matches_figure(METER, *each, each=", ".join(map(format_bytes, each)), **figures)


@check("KDA-23")
def smaller_chunks_take_less(evidence: Evidence) -> CheckResult:
    """Measure the peak of a forward by chunk size, with the streamed and the reported form."""
    peaks = {
        f"{form}_{size}": evidence.peak(form, "forward", chunk_size=size)
        for form, chunk_sizes in (("streamed", (16, 32, 64, 128)), ("reported", (32, 128)))
        for size in chunk_sizes
    }
    streamed = [peak for name, peak in peaks.items() if name.startswith("streamed")]
    return holds_if(streamed == sorted(set(streamed)), METER, **sizes(**peaks))


@check("KDA-31")
def fewer_tokens_take_less(evidence: Evidence) -> CheckResult:
    """Measure a tensor of transitions, and the peak, with half the tokens."""
    half = evidence.dims["B"] // 2
    (made,) = evidence.made_by(NAIVE, SUBTRACTION, B=half)
    ratio = evidence.peak(NAIVE, "forward") / evidence.peak(NAIVE, "forward", B=half)
    holds = 2 * made.bytes == evidence.full_bytes and ratio > 1.99
    return holds_if(holds, METER, tokens=half * evidence.dims["T"], **sizes(one=made.bytes), ratio=f"{ratio:.2f}")


@check("KDA-32")
def sequential_takes_states(evidence: Evidence) -> CheckResult:
    """Test that the sequential mode takes less than one tensor of transitions, and computes what the scan does."""
    peak = evidence.peak("sequential", "forward")
    pairs = zip(evidence.computed("sequential", 40), evidence.computed(NAIVE, 40), strict=True)
    error = max(float((one - other).abs().max()) for one, other in pairs)
    return holds_if(
        peak < evidence.full_bytes / 10 and error < 1e-12,
        f"{METER}, and {ON_CPU}",
        **sizes(forward=peak, held=evidence.peak("sequential", "held")),
        below=f"{evidence.times_below('sequential', 'forward'):.0f}x",
        error="below 1e-12" if error < 1e-12 else f"{error:.1e}",
    )


@check("KDA-34")
def training_keeps_them(evidence: Evidence) -> CheckResult:
    """Measure what is held after a forward by the reported form, at three chunk sizes, and by the other forms."""
    held = {size: evidence.peak("reported", "held", chunk_size=size) for size in (32, 64, 128)}
    recomputed = {form: evidence.peak(form, "held") for form in ("streamed", "wy")}
    same = len(set(held.values())) == 1 and min(held.values()) > 2 * evidence.full_bytes
    return holds_if(
        same and max(recomputed.values()) < evidence.full_bytes / 10,
        METER,
        reported=", ".join(sorted(map(format_bytes, set(held.values())))),
        full=f"{held[64] / evidence.full_bytes:.2f}",
        **sizes(dense=evidence.peak(NAIVE, "held"), **recomputed),
    )
