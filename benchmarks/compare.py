"""An op's forms, its peers and its floor in turns: time, peak memory and error, for any op that has a contract.

    python -m benchmarks.compare kda                             # the first table of benchmarks/peers/kda.py
    python -m benchmarks.compare kda --table shapes --case long --json PATH --add
    python -m benchmarks.compare rope --case small --forms naive,shared_table
    python -m benchmarks.compare linear_cross_entropy N=8192 V=32000 share=0.5 --peers none

Everybody runs in one process. Each shape first has its errors taken, against naive in float64 at a smaller size; one
that is wrong is not timed. Then each contender is called once, in which kernels are compiled and tuned, and its peak is
read above its inputs. Times are medians over rounds (``memfix.meters.clock.take_turns``), with half their range.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from memfix.atomic_write import write_whole
from memfix.checks.inputs import phases_of
from memfix.cli.ending import run
from memfix.contract import FLOOR, Contract
from memfix.errors import UsageError, did_you_mean
from memfix.meters.clock import Rounds
from memfix.meters.cuda import gpu_to_ourselves, gpu_unavailable_reason
from memfix.provenance import describe
from memfix.registry import contracts

from .contenders import PHASES, Contenders, longest_phase
from .measuring import Rows, errors_at, measured, running, simulated, wrong_in
from .peers import Comparison, Entry, Table
from .tables import print_comparison
from .workload import Workload, draw_of

SAME = ("commit", "torch", "triton", "gpu", "driver")
"""What two runs must share for their figures to be kept in one file."""


# ---------------------------------------------------------------- what runs
def table_of(
    contract: Contract, comparison: Comparison, name: str | None, case: str | None, settings: Sequence[str]
) -> Table:
    """The table that is named; or the case and the settings that are; or the op's first table, or all its cases."""
    if name is not None and settings:
        raise UsageError("--table has its own shapes; leave out DIM=VALUE, or --table")
    if name is not None and name not in comparison.tables:
        raise UsageError(f"--table: {contract.name} has no table {name!r}{did_you_mean(name, comparison.tables)}")
    if name is None and comparison.tables and case is None and not settings:
        name = next(iter(comparison.tables))
    if name is not None:
        table = comparison.tables[name]
        known = [entry.name for entry in table.entries]
        if case is not None and case not in known:
            raise UsageError(f"--case: the table {name} has no {case!r}{did_you_mean(case, known)}")
        return replace(table, entries=[entry for entry in table.entries if case in (None, entry.name)])
    values = tuple(comparison.values)[:1]
    if case is None and not settings:
        return Table([Entry(each) for each in contract.cases], (longest_phase(contract),), values)
    draw_of(contract, case, settings)  # refused before anything is measured
    shown = case or "as given"
    return Table([Entry(shown, " ".join(settings))], (longest_phase(contract),), values)


class Comparing:
    """What is known so far, on disk after each shape, since the next may take long."""

    def __init__(self, contenders: Contenders, path: Path | None, *, add: bool) -> None:
        self.contenders, self.path = contenders, path
        self.data: dict[str, Any] = {
            "op": contenders.contract.name,
            "surroundings": describe(),
            "sources": contenders.sources(),
            "left_out": dict(contenders.left_out),
            "speed": [],
            "errors": [],
        }
        if add and path is not None and path.exists():
            self._take_over(json.loads(path.read_text(encoding="utf-8")))

    def measure(self, entry: Entry, table: Table, phases: Sequence[str], rounds: Rounds) -> None:
        contract, device = self.contenders.contract, self.contenders.device
        case = entry.name if entry.name in contract.cases else None
        draw = draw_of(contract, case, entry.settings.split())
        work = Workload(contract, self.contenders.comparison, draw, table.values[0] if table.values else None)
        known: dict[str, Rows] = {}
        for phase in phases:
            names = self.contenders.at(entry, phase)
            known[phase] = {name: {} for name in names}
            known[phase] |= simulated(work, self.contenders.simulated_ones(names), phase, device)
        able = [
            name for name in known[phases[0]] if name != FLOOR and all(name in running(rows) for rows in known.values())
        ]
        for values in table.values or (None,):
            self._check(replace(work, values=values), able)
        errors = self._errors_of(work)
        measured_phases = {}
        for phase, rows in known.items():
            for name in running(rows):
                wrong = wrong_in(errors.get(name, {}))
                rows[name] |= {} if wrong is None else {"trouble": wrong}
            measured_phases[phase] = measured(work, rows, phase, device, rounds)
        self._put("speed", {
            "case": entry.name, "settings": draw.spelled(), "dims": dict(draw.case.dims), "dtype": draw.case.dtype,
            "values": work.values, "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), "phases": measured_phases,
        })  # fmt: skip

    def _check(self, work: Workload, names: Sequence[str]) -> None:
        """Errors, of those that are not known yet: several shapes of a table may come down to one small size."""
        missing = [name for name in names if name not in self._errors_of(work)]
        if missing:
            small = work.at_error_size()
            case = small.draw.case
            rows = {**self._errors_of(work), **errors_at(small, missing, self.contenders.device)}
            self._put("errors", {
                "settings": small.draw.spelled(), "dims": dict(case.dims), "dtype": case.dtype, "values": work.values,
                "rows": rows,
            })  # fmt: skip

    def _errors_of(self, work: Workload) -> Rows:
        key = (work.at_error_size().draw.spelled(), work.values)
        return next((old["rows"] for old in self.data["errors"] if (old["settings"], old["values"]) == key), {})

    def _put(self, kind: str, new: dict[str, Any]) -> None:
        def key(entry: Mapping[str, Any]) -> tuple[str, str | None]:
            return entry["settings"], entry["values"]

        entries = self.data[kind]
        entries[:] = [old for old in entries if key(old) != key(new)] + [new]
        if self.path is not None:
            write_whole(self.path, json.dumps(self.data, indent=1) + "\n", "the figures")

    def _take_over(self, earlier: dict[str, Any]) -> None:
        now = self.data["surroundings"]
        for key in SAME:
            if earlier["surroundings"][key] != now[key]:
                raise UsageError(
                    f"--add: {self.path} has the {key} {earlier['surroundings'][key]!r}, this run {now[key]!r}; "
                    "leave --add out to begin afresh"
                )
        sources = {**earlier["sources"], **self.data["sources"]}
        left_out = {name: why for name, why in self.data["left_out"].items() if name not in sources}
        self.data = {**earlier, "surroundings": now, "sources": sources, "left_out": left_out}


# ---------------------------------------------------------------- the command
@click.command()
@click.argument("op")
@click.argument("settings", nargs=-1, metavar="[DIM=VALUE]...")
@click.option(
    "--case", help="A case of the contract, which DIM=VALUE changes (without it, the first); or a shape of the table."
)
@click.option("--table", "table_name", metavar="NAME", help="A table of benchmarks/peers/OP.py.")
@click.option("--forms", metavar="NAME,...", help="These forms; the floor always runs.")
@click.option("--peers", metavar="NAME,...", help="These peers, or none.")
@click.option("--phase", type=click.Choice(PHASES), help="Without it, those of the table, or the longest.")
@click.option("--values", metavar="NAME", help="Input values of benchmarks/peers/OP.py.")
@click.option("--rounds", "num_rounds", type=click.IntRange(2), help="Without it, 3 to 10, by the time that there is.")
@click.option("--seconds", type=click.FloatRange(0), default=120.0, show_default=True, help="For the rounds of all.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="[default: cuda where there is one]")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures there.")
@click.option("--add", is_flag=True, help="Keep what PATH has of other shapes.")
def main(
    op: str, settings: tuple[str, ...], case: str | None, table_name: str | None, forms: str | None, peers: str | None,
    phase: str | None, values: str | None, num_rounds: int | None, seconds: float, device: str | None,
    json_path: Path | None, add: bool,
) -> None:  # fmt: skip
    """Time, peak memory and error of OP's forms, peers and floor, in turns."""
    no_gpu = gpu_unavailable_reason()
    device = device or ("cuda" if no_gpu is None else "cpu")
    if device == "cuda" and no_gpu is not None:
        raise UsageError(f"{no_gpu}; use --device cpu")
    (contract,) = contracts([op])
    contenders = Contenders.of(contract, device).chosen(forms, peers)
    comparison = contenders.comparison
    table = table_of(contract, comparison, table_name, case, settings)
    if values is not None:
        if values not in comparison.values:
            raise UsageError(f"--values: {op} has no values {values!r}{did_you_mean(values, comparison.values)}")
        table = replace(table, values=(values,))
    if phase is not None and phase not in phases_of(contract):
        raise UsageError(f"--phase: {op} has no gradients, so its only phase is forward")
    phases = [phase] if phase is not None else list(table.phases)
    number = num_rounds or table.rounds
    share_s = seconds / (len(table.entries) * len(phases))
    rounds = Rounds(seconds=share_s) if number is None else Rounds(number, number)
    comparing = Comparing(contenders, json_path, add=add)
    with gpu_to_ourselves() if device == "cuda" else contextlib.nullcontext():
        for entry in table.entries:
            click.echo(f"{op}, {entry.name} {entry.settings} ...", err=True)
            comparing.measure(entry, table, phases, rounds)
    print_comparison(comparing.data, Console(width=None if sys.stdout.isatty() else 200))


if __name__ == "__main__":
    run(main, "python -m benchmarks.compare")
