"""Checks of what the report says its transitions take: sizes, and readings of the real forms at the incident."""

from __future__ import annotations

import torch

from ....laws import NAIVE
from ....ops.kda.reported import precompute_updates
from ....units import GiB, format_bytes
from ...claims import Found, decimal
from .evidence import CAPACITY_BYTES, DIAGONAL, SUBTRACTION, Evidence

METER = "simulated meter"
ARITHMETIC = "arithmetic"
ON_CPU = "run on the CPU"


def fails_at_the_subtraction(evidence: Evidence) -> Found:
    """KDA-02: both operands and the result are alive when the line has run, and two of them before."""
    alive = evidence.full_tensors_at(NAIVE, SUBTRACTION)
    (made,) = evidence.made_by(NAIVE, SUBTRACTION)
    figures: dict[str, int | str] = {"alive": alive, "bytes": format_bytes(alive * evidence.full_bytes)}
    return Found(alive == 3 and made.bytes == evidence.full_bytes, METER, figures)


def a_full_diagonal(evidence: Evidence) -> Found:
    """KDA-05: how large the diagonal is written out, and how much of it is not zero."""
    (made,) = evidence.made_by(NAIVE, DIAGONAL)
    width = evidence.dims["K"]
    example = torch.diag_embed(torch.ones(2, 3, width))
    share = int(example.count_nonzero()) / example.numel()
    figures: dict[str, int | str] = {
        "elements": made.bytes // evidence.dims["e"],
        "non_zero": round(share * evidence.elements),
        "enough": format_bytes(round(share * evidence.full_bytes)),
    }
    return Found(made.bytes == evidence.full_bytes, METER, figures)


def rank_one(evidence: Evidence) -> Found:
    """KDA-06: the rank of what is taken from the diagonal, for each token and head; of beta = 0 too."""
    _, k, v, g, beta = (tensor.detach() for tensor in evidence.tensors(7))
    ranks = []
    for strength in (beta + 0.1, torch.zeros_like(beta)):
        transitions, _ = precompute_updates(k, v, g, strength)
        ranks.append(torch.linalg.matrix_rank(torch.diag_embed(g.exp()) - transitions, atol=1e-9).unique().tolist())
    figures = {"ranks": ", ".join(map(str, ranks[0])), "without_beta": ", ".join(map(str, ranks[1]))}
    return Found(ranks == [[1], [0]], ON_CPU, figures)


def number_of_elements(evidence: Evidence) -> Found:
    """KDA-08"""
    return Found(f"{evidence.elements / 1e6:.0f}M" == "134M", ARITHMETIC, {"elements": evidence.elements})


def one_tensor_of_fp16_inputs(evidence: Evidence) -> Found:
    """KDA-09: what one tensor of transitions takes where the inputs are fp16."""
    (made,) = evidence.made_by(NAIVE, SUBTRACTION, dtype="float16")
    figures = {
        "in_fp16": decimal(evidence.elements * 2, "MB"),
        "in_fp16_binary": format_bytes(evidence.elements * 2),
        "made": format_bytes(made.bytes),
        "made_decimal": decimal(made.bytes, "MB"),
    }
    return Found.sized(f"{METER}, fp16 inputs", figures, made.bytes)


def peak_of_the_operation(evidence: Evidence) -> Found:
    """KDA-10: operands and result; and with the writes and the scan that follow."""
    at_the_line = evidence.full_tensors_at(NAIVE, SUBTRACTION) * evidence.full_bytes
    figures = {
        "at_the_line": format_bytes(at_the_line),
        "decimal": decimal(at_the_line, "MB"),
        "in_fp16": format_bytes(at_the_line // 2),
        "forward": format_bytes(evidence.peak(NAIVE, "forward")),
        "train": format_bytes(evidence.peak(NAIVE, "train")),
    }
    return Found.sized(METER, figures, at_the_line)


def more_than_the_card(evidence: Evidence) -> Found:
    """KDA-11: the operation beside the card, and what a train step of the report's layers takes of it."""
    at_the_line = evidence.full_tensors_at(NAIVE, SUBTRACTION) * evidence.full_bytes
    layers = evidence.dense_layers
    figures: dict[str, int | str] = {
        "share": f"{at_the_line / CAPACITY_BYTES:.2%}",
        "a_layer": format_bytes(layers.bytes_a_layer),
        "layers": layers.most,
        "held": format_bytes(evidence.peak(NAIVE, "held")),
    }
    return Found(at_the_line > CAPACITY_BYTES, f"{METER}, hn_xs and {CAPACITY_BYTES // GiB} GiB", figures)


def both_in_chunks(evidence: Evidence) -> Found:
    """KDA-14: the reported fix makes nothing larger than a chunk where it makes both; and then it joins the chunks."""
    largest = max(evidence.made_in("reported", "_transitions_and_writes"))
    joined = evidence.made_in("reported", "precompute_updates")
    figures: dict[str, int | str] = {
        "largest": format_bytes(largest),
        "joined": format_bytes(sum(joined)),
        "tensors": len(joined),
    }
    return Found(largest == evidence.bytes("B*C*H*K*K*e"), METER, figures)


def four_times_less(evidence: Evidence) -> Found:
    """KDA-20: dense over each form at chunk 64, forward and train."""
    times = {
        f"{form}_{phase}": evidence.reading(form, phase).times_below(evidence.reading(NAIVE, phase))
        for form in ("reported", "streamed", "wy")
        for phase in ("forward", "train")
    }
    figures = {name: f"{ratio:.2f}x" for name, ratio in times.items()}
    return Found(min(times["reported_forward"], times["reported_train"]) >= 4, METER, figures)


def critical_allocation(evidence: Evidence) -> Found:
    """KDA-21: what the failing line asks for in the reported fix, and what the fix asks for at most."""
    each = {piece.bytes for piece in evidence.made_by("reported", SUBTRACTION)}
    figures = {
        "each": ", ".join(map(format_bytes, each)),
        "largest": format_bytes(evidence.largest("reported")),
        "streamed": format_bytes(evidence.largest("streamed")),
    }
    return Found.sized(METER, figures, *each)


def smaller_chunks_take_less(evidence: Evidence) -> Found:
    """KDA-23: peaks of forward by the chunk, streamed and as reported."""
    streamed, reported = (
        {size: evidence.peak(form, "forward", chunk_size=size) for size in sizes}
        for form, sizes in (("streamed", (16, 32, 64, 128)), ("reported", (32, 128)))
    )
    figures = {f"streamed_{size}": format_bytes(peak) for size, peak in streamed.items()}
    figures |= {f"reported_{size}": format_bytes(peak) for size, peak in reported.items()}
    peaks = list(streamed.values())
    return Found(peaks == sorted(set(peaks)), METER, figures)


def fewer_tokens_take_less(evidence: Evidence) -> Found:
    """KDA-31: a tensor of transitions, and the peak, of half the tokens."""
    half = evidence.dims["B"] // 2
    (made,) = evidence.made_by(NAIVE, SUBTRACTION, B=half)
    ratio = evidence.peak(NAIVE, "forward") / evidence.peak(NAIVE, "forward", B=half)
    figures: dict[str, int | str] = {
        "tokens": half * evidence.dims["T"],
        "one": format_bytes(made.bytes),
        "ratio": f"{ratio:.2f}",
    }
    return Found(2 * made.bytes == evidence.full_bytes and ratio > 1.99, METER, figures)


def sequential_takes_states(evidence: Evidence) -> Found:
    """KDA-32: no tensor of a transition a token, and the answer of the scan."""
    peak = evidence.peak("sequential", "forward")
    error = max(
        float((one - other).abs().max())
        for one, other in zip(evidence.computed("sequential", 40), evidence.computed(NAIVE, 40), strict=True)
    )
    figures = {
        "forward": format_bytes(peak),
        "held": format_bytes(evidence.peak("sequential", "held")),
        "below": f"{evidence.peak(NAIVE, 'forward') / peak:.0f}x",
        "error": "below 1e-12" if error < 1e-12 else f"{error:.1e}",
    }
    return Found(peak < evidence.full_bytes / 10 and error < 1e-12, f"{METER}, and {ON_CPU}", figures)


def training_keeps_them(evidence: Evidence) -> Found:
    """KDA-34: what is held after a forward: as reported at three chunk sizes, dense, and by forms that recompute."""
    held = {size: evidence.peak("reported", "held", chunk_size=size) for size in (32, 64, 128)}
    recomputed = {form: evidence.peak(form, "held") for form in ("streamed", "wy")}
    figures: dict[str, int | str] = {
        "dense": format_bytes(evidence.peak(NAIVE, "held")),
        "reported": ", ".join(sorted({format_bytes(size) for size in held.values()})),
        "full": f"{held[64] / evidence.full_bytes:.2f}",
    }
    figures |= {form: format_bytes(size) for form, size in recomputed.items()}
    same = len(set(held.values())) == 1 and min(held.values()) > 2 * evidence.full_bytes
    return Found(same and max(recomputed.values()) < evidence.full_bytes / 10, METER, figures)


CHECKS = {
    check.__name__: check
    for check in (
        fails_at_the_subtraction,
        a_full_diagonal,
        rank_one,
        number_of_elements,
        one_tensor_of_fp16_inputs,
        peak_of_the_operation,
        more_than_the_card,
        both_in_chunks,
        four_times_less,
        critical_allocation,
        smaller_chunks_take_less,
        fewer_tokens_take_less,
        sequential_takes_states,
        training_keeps_them,
    )
}
