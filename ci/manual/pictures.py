"""The manual's pictures: figures of the reports beside those of memfix, and the loss's time against its peak."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from memfix.incidents.judging import decimal
from memfix.incidents.npt_weight_delta.model import SIZES
from memfix.incidents.pythia_vocabulary.calculator import breakdown
from memfix.incidents.pythia_vocabulary.model import PythiaConfig

from .bars import Bar, bars_svg
from .frontier import Curve, Point, frontier_svg
from .stored import cpu, h200, train_rows


def npt_picture() -> str:
    """A picture of the report's figures of its configurations beside a simulated step of each."""
    simulated = cpu("profile_npt_weight_delta")["runs"]
    peaks = {run["name"]: run["peak_bytes"] for run in simulated}
    bars = []
    for name, gigabytes, size, item_size in (
        ("+ CPU offload", 78, "llama_8b", 4),
        ("+ fp16", 40, "llama_8b", 2),
        ("+ fewer layers", 35, "llama_8b", 2),
        ("small model", 2, "gpt2", 4),
    ):
        weights = SIZES[size].num_parameters * item_size
        parts = (("frozen weights", weights), ("the rest of a step", peaks[name] - weights))
        bars.append(Bar(f"the report: {name}", (("the report", gigabytes * 10**9),), f"~{gigabytes} GB"))
        bars.append(Bar("a step of the same run", parts, decimal(peaks[name])))
    return bars_svg("What the report says, and what a step takes", bars)


def scent_picture() -> str:
    """A picture of a step of every solution of the decoder's report and of memfix beside the report's figures."""
    simulated = cpu("profile_scent_decoder")["runs"]
    peaks = {run["name"]: run["peak_bytes"] for run in simulated}
    bars = []
    for name, gigabytes in (("original", 40), ("1: feed-forwards alone", 5), ("3: batch 16", 10)):
        bars.append(Bar(f"the report: {name}", (("the report", gigabytes * 10**9),), f"{gigabytes} GB"))
        bars.append(Bar("a step of the same run", (("a step", peaks[name]),), decimal(peaks[name])))
    others = dict.fromkeys(("2: attention to 256 latents", "4: checkpointing"), "a step")
    others |= dict.fromkeys(("our attention", "our attention and feed-forward", "both, checkpointed"), "our forms")
    bars += [Bar(f"a step: {name}", ((kind, peaks[name]),), decimal(peaks[name])) for name, kind in others.items()]
    return bars_svg("What the report expects of its solutions, and what a step takes", bars)


def pythia_picture() -> str:
    """A picture of what the Pythia's report blamed and what its train steps take."""
    blamed = (("parameters", 5_500_000_000), ("gradients and Adam's states", 40_000_000_000))
    bars = [Bar("the report, before its fix: 50,000 words, batch 8", blamed, "5-6 GB and 40 GB+")]
    for words, batch_size in ((50_000, 8), (50_000, 32), (10_000, 32)):
        of = breakdown(PythiaConfig(vocab_size=words, dropout=0.1), batch_size=batch_size, context_length=128)
        parts = (
            ("parameters", of.parameters),
            ("gradients and Adam's states", of.adam_states),
            ("activations", of.activations),
            ("logits", of.logits),
        )
        bars.append(Bar(f"a step of the same model: {words:,} words, batch {batch_size}", parts, decimal(of.peak)))
    return bars_svg("What the report blamed, and what takes the memory", bars)


def loss_frontier() -> list[str]:
    """Links to the pictures of time against peak, one for each number of tokens."""
    return [
        f"![Time against peak over rows per chunk, {tokens:,} tokens](../pictures/loss_frontier_{tokens}.svg)"
        for tokens in _frontier_tokens()
    ]


def loss_frontier_picture(tokens: int) -> str:
    """A picture of time against peak: memfix's and Liger's over rows per chunk, and Liger's at its default rows."""
    entries = [entry for entry in _frontier() if entry["dims"]["N"] == tokens]
    names = {"triton_rows": "triton", "liger_rows": "Liger", "liger": "Liger, rows of its own choice"}
    curves = [Curve(shown, _frontier_points(entries, name)) for name, shown in names.items()]
    dims = entries[0]["dims"]
    title = f"{tokens:,} tokens, width {dims['D']:,}, {dims['V']:,} classes, by rows per chunk"
    return frontier_svg(title, [curve for curve in curves if curve.points], floor="the three products alone")


def _frontier() -> list[dict[str, Any]]:
    """The measurements of the loss over rows per chunk."""
    entries: list[dict[str, Any]] = h200("linear_cross_entropy_frontier")["speed"]
    return entries


def _frontier_tokens() -> list[int]:
    return list(dict.fromkeys(entry["dims"]["N"] for entry in _frontier()))


def _frontier_points(entries: list[dict[str, Any]], name: str) -> tuple[Point, ...]:
    """The points of one curve in the order of ``entries``; a point with the peak of an earlier one is left out."""
    is_by_rows = name.endswith("_rows")
    found: dict[int, Point] = {}
    for entry in entries:
        row = train_rows(entry).get(name, {})
        if "times_floor" in row:
            rows = f"{min(entry['dims']['rows_per_chunk'], entry['dims']['N']):,}" if is_by_rows else ""
            found.setdefault(row["peak_bytes"], Point(row["peak_bytes"], row["times_floor"], rows))
    return tuple(found.values())


PICTURES = {
    "docs/pictures/npt_weight_delta.svg": npt_picture,
    "docs/pictures/pythia_vocabulary.svg": pythia_picture,
    "docs/pictures/scent_decoder.svg": scent_picture,
}


def all_pictures() -> dict[str, Callable[[], str]]:
    """Return the functions that draw the manual's pictures, by path."""
    of_tokens = {
        f"docs/pictures/loss_frontier_{tokens}.svg": functools.partial(loss_frontier_picture, tokens)
        for tokens in _frontier_tokens()
    }
    return {**PICTURES, **of_tokens}
