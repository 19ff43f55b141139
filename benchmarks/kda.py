"""KDA beside flash-linear-attention: time, memory and error of a train step and of the forward alone.

    python -m benchmarks.kda [--shape incident,long] [--only triton,fla] [--seconds 90] [--add] [--json PATH]

One process, contenders in turns (``rounds``). A train step is forward and backward from a random gradient of o; the
forward alone is under ``no_grad``. Everybody makes the final state, through which no gradient comes in.

A time is the mean over consecutive steps that fill ``BATCH_S``, with CUDA events around them, after as many untimed
ones as ``SUSTAINED_S`` takes: the incident's step is so short that a lone one, waited for, would show how long the CPU
takes to launch it into an idle GPU. Medians are over the rounds.

At each shape every contender first runs once, in which kernels are compiled and tuned for that size; flash-linear-
attention's take minutes, and are kept on disk. Then it is held against naive in float64, at as many heads of the same
width; one that is wrong is not timed. What tuning chose for a number of heads serves every length in the process.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from memfix.atomic_write import write_whole
from memfix.errors import did_you_mean
from memfix.laws import NAIVE
from memfix.meters.cuda import gpu_to_ourselves, gpu_unavailable_reason
from memfix.provenance import describe
from memfix.units import format_bytes, format_seconds

from .contenders import chosen
from .kda_fields import FAST, PHASES, SHAPES, SLOW, SMOKE_SHAPES, Shape, measured, overhead
from .kda_peers import our_forms, peers
from .tables import print_rows

RESULT = Path(__file__).parent / "results/h200/kda.json"


# ---------------------------------------------------------------- for people
def print_tables(data: Mapping[str, Any], console: Console) -> None:
    fields = data["fields"]
    headings = [f"{field['spelled']} {field['dtype']}" for field in fields]
    for phase in PHASES:
        print_rows(console, phase, headings, [field[phase] for field in fields], _speed_cell)
    print_rows(console, "largest error", headings, [field["errors"] for field in fields], _error_cell)
    print_rows(console, "first step", headings, [field["first_step_s"] for field in fields], format_seconds)
    for heading, field in zip(headings, fields, strict=True):
        rounds = ", ".join(f"{count} rounds of {phase}" for phase, count in field["rounds"].items())
        console.print(f"{heading}: {rounds}")
    for phase, found in data.get("overhead", {}).items():
        console.print(f"streamed over naive, {phase}: {_spelled_spread(found)}")
    for chunk, found in data.get("streamed_by_chunk", {}).items():
        times = ", ".join(
            f"{key} {value if isinstance(value, str) else round(value, 3)}" for key, value in found.items()
        )
        console.print(f"streamed in chunks of {chunk}: {times}")
    for name, reason in data["left_out"].items():
        console.print(f"{name}: left out: {reason}")


def _speed_cell(row: Mapping[str, Any]) -> str:
    if "trouble" in row:
        return row["trouble"]
    parts = [format_seconds(row["seconds"])]
    parts += [format_bytes(row["peak_bytes"])] if row["peak_bytes"] is not None else []
    parts += [f"held {format_bytes(row['held_bytes'])}"] if row["held_bytes"] is not None else []
    return "  ".join(parts)


def _error_cell(errors: Mapping[str, Any]) -> str:
    if "trouble" in errors:
        return errors["trouble"]
    largest = max(errors, key=lambda name: errors[name])
    return f"{errors[largest]:.1e} ({largest})"


def _spelled_spread(found: Mapping[str, Any]) -> str:
    if "trouble" in found:
        return found["trouble"]
    return f"{found['median']:.3f}x ({found['low']:.3f} to {found['high']:.3f} in {found['pairs']} pairs)"


# ---------------------------------------------------------------- the command
class Figures:
    """What is known so far, on disk after each part, since the next may be long.

    ``add`` keeps the fields of an earlier run that this one does not measure, if it was of the same code on the same
    machine: the ratios within a field are always of one run.
    """

    SAME = ("commit", "torch", "triton", "gpu", "driver")

    def __init__(self, path: Path | None, sources: dict[str, str], left_out: dict[str, str], *, add: bool) -> None:
        self.path = path
        self.data: dict[str, Any] = {"surroundings": describe(), "sources": sources, "left_out": left_out, "fields": []}
        if add and path is not None and path.exists():
            self._take_over(json.loads(path.read_text(encoding="utf-8")))

    def put(self, field: dict[str, Any]) -> None:
        fields = self.data["fields"]
        fields[:] = [old for old in fields if (old["shape"], old["dtype"]) != (field["shape"], field["dtype"])]
        fields.append(field)
        self.save()

    def save(self) -> None:
        if self.path is not None:
            write_whole(self.path, json.dumps(self.data, indent=1) + "\n", "the figures")

    def _take_over(self, earlier: dict[str, Any]) -> None:
        now = self.data["surroundings"]
        for key in self.SAME:
            if earlier["surroundings"][key] != now[key]:
                raise click.UsageError(
                    f"--add: {self.path} has the {key} {earlier['surroundings'][key]!r}, this run {now[key]!r}; "
                    "leave --add out to begin afresh"
                )
        sources = {**earlier["sources"], **self.data["sources"]}
        left_out = {name: why for name, why in self.data["left_out"].items() if name not in sources}
        self.data = {**earlier, "surroundings": now, "sources": sources, "left_out": left_out}


def shapes_named(names: str | None, known: Mapping[str, Shape]) -> dict[str, Shape]:
    if names is None:
        return dict(known)
    for name in names.split(","):
        if name not in known:
            raise click.BadParameter(f"no shape {name!r}{did_you_mean(name, known)}", param_hint="--shape")
    return {name: known[name] for name in names.split(",")}


@click.command()
@click.option("--shape", "shape_names", metavar="NAME,...", help=f"Of {', '.join(SHAPES)}; all of them without it.")
@click.option("--only", metavar="NAME,...", help="These contenders.")
@click.option("--seconds", type=click.FloatRange(0), default=90.0, show_default=True, help="For the rounds of all.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Default on a GPU: results/h200/kda.json.")
@click.option("--add", is_flag=True, help="Keep what the file has of other shapes.")
@click.option("--smoke", is_flag=True, help="A tiny shape on the CPU: shows that everything runs, and no figures.")
def main(
    shape_names: str | None, only: str | None, seconds: float, json_path: Path | None, add: bool, smoke: bool
) -> None:
    """KDA, ours and flash-linear-attention's, in turns."""
    no_gpu = gpu_unavailable_reason()
    if no_gpu is not None and not smoke:
        raise click.UsageError(f"{no_gpu}; --smoke runs without one")
    device = "cpu" if smoke else "cuda"
    shapes = shapes_named(shape_names, SMOKE_SHAPES if smoke else SHAPES)
    found, left_out = peers(device)
    found = [*our_forms(), *found]
    names = {contender.name for contender in found}
    left_out |= {name: "kda has no such form" for name in (*SLOW, *FAST) if name not in {*names, *left_out}}
    contenders = chosen(found, only, left_out)
    functions = {contender.name: contender.function for contender in contenders}
    sources = {contender.name: contender.source for contender in contenders}
    figures = Figures(json_path or (None if smoke else RESULT), sources, left_out, add=add)
    fields = [
        (name, dtype, {other: functions[other] for other in everyone if other in functions})
        for name, shape in shapes.items()
        for dtype, everyone in shape.fields().items()
    ]
    share_s = seconds / max(1, sum(len(running) for *_, running in fields))
    with contextlib.nullcontext() if smoke else gpu_to_ourselves():
        for name, dtype, running in fields:
            click.echo(f"{shapes[name].spelled()} {dtype}, first steps ...", err=True)
            field = measured(shapes[name], dtype, running, device, seconds=share_s * len(running))
            figures.put({"shape": name, **field})
        for shape in shapes.values():
            if shape.for_all and {NAIVE, "streamed"} <= functions.keys():
                click.echo(f"{shape.spelled()}, streamed over naive ...", err=True)
                figures.data |= overhead(functions[NAIVE], functions["streamed"], shape, device)
                figures.save()
    print_tables(figures.data, Console(width=None if sys.stdout.isatty() else 200))


if __name__ == "__main__":
    sys.exit(main())
