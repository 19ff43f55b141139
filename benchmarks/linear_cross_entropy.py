"""Linear cross entropy beside the peers: time over the three matrix products alone, memory, and error.

    python -m benchmarks.linear_cross_entropy [--tokens 4096,8192,32768,131072] [--json PATH]

One process, one train step each in turns (``rounds``). Times are medians, and ratios are over the floor's median of
the same rounds. Logits are flat in the timed steps, as those of a fresh model; loss and gradients are held against
float64 with flat and with peaked logits.
"""

# N tokens, D width, V vocabulary

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from memfix.contract import FLOOR
from memfix.laws import NAIVE
from memfix.meters.cuda import gpu_to_ourselves, gpu_unavailable_reason
from memfix.provenance import describe
from memfix.registry import contracts
from memfix.units import GiB, format_bytes, format_seconds

from .contenders import chosen, relative_error
from .peers import our_forms, peers
from .rounds import Inputs, LossOf, Row, forget_gradients, inputs_to_rotate, run_rounds, trouble_of
from .tables import print_rows

IGNORED = -100
WEIGHT_STD = 0.02
PEAKED_LOGITS_STD = 8.0  # the largest of 151,936 logits is then near 40
REGIMES = ("flat", "peaked")
FLOOR_ROWS = 8192


@dataclass(frozen=True)
class Setting:
    """All that is the same for every contender at every number of tokens."""

    width: int
    vocabulary: int
    dtype: str
    device: str
    ignored: float = 0.0
    """The share of targets that are -100."""


def make_inputs(setting: Setting, tokens: int, *, regime: str = "flat", seed: int = 0) -> Inputs:
    """Hidden of unit scale, as a norm leaves it, and a fresh head. ``peaked`` scales hidden until logits are tens, and
    gives nine tokens in ten their likeliest target."""
    made: dict[str, Any] = {
        "generator": torch.Generator(setting.device).manual_seed(seed),
        "device": setting.device,
    }
    dtype, width, vocabulary = getattr(torch, setting.dtype), setting.width, setting.vocabulary
    hidden_std = PEAKED_LOGITS_STD / (WEIGHT_STD * math.sqrt(width)) if regime == "peaked" else 1.0
    hidden_ND = (hidden_std * torch.randn(tokens, width, **made)).to(dtype)
    weight_VD = (WEIGHT_STD * torch.randn(vocabulary, width, **made)).to(dtype)
    target_N = torch.randint(0, vocabulary, (tokens,), **made)
    if regime == "peaked":
        likeliest_N = (hidden_ND @ weight_VD.T).argmax(-1)
        target_N = torch.where(torch.arange(tokens, device=setting.device) % 10 == 0, target_N, likeliest_N)
    if setting.ignored:
        target_N = target_N.masked_fill(torch.rand(tokens, **made) < setting.ignored, IGNORED)
    return hidden_ND.requires_grad_(), weight_VD.requires_grad_(), target_N


# ---------------------------------------------------------------- time and memory
def race(setting: Setting, tokens: int, contenders: Mapping[str, LossOf], *, deadline_s: float) -> dict[str, Any]:
    """The floor and every contender at one number of tokens."""
    inputs = inputs_to_rotate(lambda seed: make_inputs(setting, tokens, seed=seed))
    rows_per_piece = floor_rows(setting, tokens)
    (contract,) = contracts(["linear_cross_entropy"])
    floor = functools.partial(contract.function(FLOOR), rows_per_piece=rows_per_piece)
    everyone: dict[str, LossOf] = {FLOOR: floor, **contenders}
    rows = run_rounds(everyone, inputs, setting.device, deadline_s=deadline_s)
    return {
        "tokens": tokens,
        "floor": "whole" if rows_per_piece is None else f"in pieces of {rows_per_piece:,} rows",
        "rounds": len(rows[FLOOR].times_s),
        "rows": {name: _figures(row, rows[FLOOR]) for name, row in rows.items()},
    }


def floor_rows(setting: Setting, tokens: int) -> int | None:
    """None where the whole ``[N, V]`` product takes at most a third of the memory, else the rows of its pieces."""
    room = GiB if setting.device == "cpu" else torch.cuda.mem_get_info()[1] // 3
    product_bytes = tokens * setting.vocabulary * getattr(torch, setting.dtype).itemsize
    return None if product_bytes <= room else FLOOR_ROWS


def _figures(row: Row, floor: Row) -> dict[str, Any]:
    memory = {"peak_bytes": row.peak_bytes, "held_bytes": row.held_bytes}
    if row.trouble is not None:
        return {"trouble": row.trouble, **memory}
    ratio = row.median_s / floor.median_s if floor.trouble is None else None
    return {"seconds": row.median_s, "times_floor": ratio, **memory, "times_s": row.times_s}


# ---------------------------------------------------------------- error
def accuracy(setting: Setting, tokens: int, contenders: Mapping[str, LossOf], *, regime: str) -> dict[str, Any]:
    """Relative errors in norm of the loss and of both gradients, against naive in float64 on the same values."""
    hidden_ND, weight_VD, target_N = inputs = make_inputs(setting, tokens, regime=regime)
    wide = (hidden_ND.detach().double().requires_grad_(), weight_VD.detach().double().requires_grad_(), target_N)
    (contract,) = contracts(["linear_cross_entropy"])
    true = _loss_and_gradients(contract.function(NAIVE), wide)
    # only the softmax reaches these rows of the weight's gradient: what drops small probabilities shows here
    untargeted_V = torch.ones(setting.vocabulary, dtype=torch.bool, device=setting.device)
    untargeted_V[target_N[target_N != IGNORED]] = False
    rows: dict[str, dict[str, Any]] = {}
    for name, loss_of in contenders.items():
        try:
            found = _loss_and_gradients(loss_of, inputs)
        except Exception as error:
            rows[name] = {"trouble": trouble_of(error)}
            continue
        loss, hidden, weight = (relative_error(a, b) for a, b in zip(found, true, strict=True))
        untargeted = relative_error(found[2][untargeted_V], true[2][untargeted_V]) if untargeted_V.any() else None
        rows[name] = {"loss": loss, "hidden": hidden, "weight": weight, "weight_untargeted": untargeted}
    return {"regime": regime, "tokens": tokens, "vocabulary": setting.vocabulary, "rows": rows}


def _loss_and_gradients(loss_of: LossOf, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    try:
        loss = loss_of(*inputs)
        assert loss is not None
        loss.backward()
        hidden_grad, weight_grad = inputs[0].grad, inputs[1].grad
        assert hidden_grad is not None
        assert weight_grad is not None
        return loss.detach(), hidden_grad, weight_grad
    finally:
        forget_gradients(inputs)


# ---------------------------------------------------------------- for people
def print_tables(data: Mapping[str, Any], console: Console) -> None:
    races, checks = data["speed"], data["accuracy"]
    headings = [f"{race['tokens']:,} tokens" for race in races]
    print_rows(console, "train step", headings, [race["rows"] for race in races], _speed_cell)
    headings = [f"{check['regime']}: loss, dX, dW, dW untargeted" for check in checks]
    print_rows(console, "train step", headings, [check["rows"] for check in checks], _accuracy_cell)
    for race in races:
        console.print(f"{race['tokens']:,} tokens: {race['rounds']} rounds, the floor's product {race['floor']}")
    for name, reason in data["left_out"].items():
        console.print(f"{name}: left out: {reason}")


def _speed_cell(row: Mapping[str, Any]) -> str:
    if "trouble" in row:
        return row["trouble"]
    parts = [format_seconds(row["seconds"])]
    parts += [f"{row['times_floor']:.3f}x"] if row["times_floor"] is not None else []
    parts += [format_bytes(row["peak_bytes"])] if row["peak_bytes"] is not None else []
    parts += [f"held {format_bytes(row['held_bytes'])}"] if row["held_bytes"] is not None else []
    return "  ".join(parts)


def _accuracy_cell(row: Mapping[str, Any]) -> str:
    if "trouble" in row:
        return row["trouble"]
    return "  ".join("-" if error is None else f"{error:.1e}" for error in row.values())


# ---------------------------------------------------------------- the command
class _Tokens(click.ParamType):
    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        try:
            tokens = [int(part) for part in value.split(",")]
        except ValueError:
            self.fail(f"must be a list of whole numbers such as 4096,8192, got {value!r}", param, ctx)
        if min(tokens) < 1:
            self.fail(f"must be at least 1, got {min(tokens)}", param, ctx)
        return tokens


@click.command()
@click.option("--tokens", type=_Tokens(), default="4096,8192,32768,131072", show_default=True)
@click.option("--vocabulary", type=click.IntRange(1), default=151_936, show_default=True)
@click.option("--width", type=click.IntRange(1), default=2560, show_default=True)
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True)
@click.option("--only", metavar="NAME,...", help="These contenders; the floor always runs.")
@click.option("--ignored", type=click.FloatRange(0, 1, max_open=True), default=0.0, help="Share of targets ignored.")
@click.option("--accuracy-tokens", type=click.IntRange(0), default=1024, show_default=True, help="0: no accuracy.")
@click.option(
    "--accuracy-vocabulary", type=click.IntRange(1), help="Where float64 logits of --vocabulary are too many."
)
@click.option("--seconds", type=float, default=150.0, show_default=True, help="When spent, only the least rounds run.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="Default: cuda where there is a GPU.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures there.")
def main(
    tokens: list[int],
    vocabulary: int,
    width: int,
    dtype: str,
    only: str | None,
    ignored: float,
    accuracy_tokens: int,
    accuracy_vocabulary: int | None,
    seconds: float,
    device: str | None,
    json_path: Path | None,
) -> None:
    """Train steps of linear cross entropy, ours and the peers', in turns."""
    deadline_s = time.perf_counter() + seconds
    no_gpu = gpu_unavailable_reason()
    device = device or ("cuda" if no_gpu is None else "cpu")
    if device == "cuda" and no_gpu is not None:
        raise click.UsageError(f"{no_gpu}; use --device cpu")
    found, left_out = peers(device)
    contenders = chosen([*our_forms(), *found], only, left_out)
    loss_of = {contender.name: contender.function for contender in contenders}
    setting = Setting(width, vocabulary, dtype, device, ignored)
    data: dict[str, Any] = {
        "surroundings": describe(),
        "setting": asdict(setting),
        "sources": {contender.name: contender.source for contender in contenders},
        "left_out": left_out,
        "accuracy": [],
        "speed": [],
    }

    def save() -> None:  # after each part, since the next may be long
        if json_path is not None:
            json_path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    with gpu_to_ourselves() if device == "cuda" else contextlib.nullcontext():
        if accuracy_tokens:
            held_against = Setting(width, accuracy_vocabulary or vocabulary, dtype, device)
            data["accuracy"] = [accuracy(held_against, accuracy_tokens, loss_of, regime=r) for r in REGIMES]
            save()
        for number in tokens:
            click.echo(f"{number:,} tokens ...", err=True)
            data["speed"].append(race(setting, number, loss_of, deadline_s=deadline_s))
            save()
    print_tables(data, Console(width=None if sys.stdout.isatty() else 200))


if __name__ == "__main__":
    sys.exit(main())
