"""Measures time, peak memory and error of an op's forms, peers and floor, for any op that has a contract.

    python -m benchmarks.compare kda                             # the first table of benchmarks/peers/kda.py
    python -m benchmarks.compare kda --table all --json benchmarks/results/h200    # a file for each table
    python -m benchmarks.compare kda --table shapes --case long --json PATH --add
    python -m benchmarks.compare rope --case small --forms naive,shared_table
    python -m benchmarks.compare linear_cross_entropy N=8192 V=32000 share=0.5 --peers none

All contenders run in one process. At each shape, the first call of each contender compiles and tunes its kernels, and
the next one gives its peak above the inputs. Then errors are computed against naive in float64 at a smaller size; a
wrong contender is not timed. Times are medians over rounds of interleaved calls
(``memfix.meters.clock.take_turns``), with half their range.
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
from memfix.checks.form_call import phases_of
from memfix.cli.ending import run
from memfix.contract import FLOOR, Contract
from memfix.errors import UsageError, did_you_mean
from memfix.meters.clock import Rounds
from memfix.meters.cuda import gpu_unavailable_reason
from memfix.meters.gpu_sharing import gpu_to_ourselves
from memfix.provenance import describe
from memfix.registry import contracts
from memfix.units import format_bytes, format_seconds

from .contenders import PHASES, Contenders, longest_phase
from .measuring import Figures, Rows, attempt, errors_at, first_call_and_peak, running, simulated, timed, wrong_in
from .peers import Comparison, Entry, Table
from .tables import print_comparison
from .tuning import quick_tuning
from .workload import Workload, draw_of

ALL = "all"
SAME = ("commit", "torch", "triton", "gpu", "driver")
"""The entries of ``surroundings`` that two runs must share for their figures to be kept in one file."""


# ---------------------------------------------------------------- what runs
def tables_of(
    contract: Contract, comparison: Comparison, name: str | None, case: str | None, settings: Sequence[str]
) -> dict[str, Table]:
    """Return the tables to measure, by name.

    With ``name`` that table, or all; else with ``case`` or ``settings`` that one shape; else the op's first table, or
    its cases if it has none.
    """
    if name is not None and settings:
        raise UsageError("--table has its own shapes; leave out DIM=VALUE, or --table")
    if name == ALL and comparison.tables:
        if case is not None:
            raise UsageError("--table all has all shapes; leave out --case, or name a table")
        return dict(comparison.tables)
    if name is not None and name not in comparison.tables:
        raise UsageError(f"--table: {contract.name} has no table {name!r}{did_you_mean(name, comparison.tables)}")
    if name is None and comparison.tables and case is None and not settings:
        name = next(iter(comparison.tables))
    if name is not None:
        table = comparison.tables[name]
        known = [entry.name for entry in table.entries]
        if case is not None and case not in known:
            raise UsageError(f"--case: the table {name} has no {case!r}{did_you_mean(case, known)}")
        return {name: replace(table, entries=[entry for entry in table.entries if case in (None, entry.name)])}
    draw_of(contract, case, settings)  # refuse bad settings before anything is measured
    asked = case is not None or settings
    entries = [Entry(case or "as given", " ".join(settings))] if asked else [Entry(each) for each in contract.cases]
    return {"asked": Table(entries, (longest_phase(contract),), tuple(comparison.values)[:1])}


class Comparing:
    """The figures measured so far; they are written to disk after each row, since the next one may take long."""

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
        values = table.values[0] if table.values else None
        work = Workload(contract, self.contenders.comparison, draw, values, table.calls)
        measured: dict[str, Figures] = {}
        begun = self.data["begun"] = {
            "case": entry.name, "settings": draw.spelled(), "dims": dict(draw.case.dims), "dtype": draw.case.dtype,
            "values": work.values, "calls": work.calls, "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "phases": measured,
        }  # fmt: skip
        for phase in phases:
            names = self.contenders.names_at(entry, phase)
            rows: Rows = {name: {} for name in names}
            if device == "cpu" or table.simulated:
                rows |= simulated(work, self.contenders.simulatable(names), phase, device)
            measured[phase] = {"rounds": 0, "rows": rows}
        all_rows = {phase: of["rows"] for phase, of in measured.items()}
        able = [n for n in all_rows[phases[0]] if n != FLOOR and all(n in running(rows) for rows in all_rows.values())]
        for phase, rows in all_rows.items():
            for name in running(rows):
                attempt(rows[name], device, first_call_and_peak, work, name, phase, device)
                self._write()
                click.echo(f"  {phase}, {name}: {_first_figures(rows[name])}", err=True)
        for values in table.values or (None,):
            self._check(replace(work, values=values), able)
        errors = self._errors_of(work)
        for phase, rows in all_rows.items():
            for name in running(rows):
                wrong = wrong_in(errors.get(name, {}))
                rows[name] |= {} if wrong is None else {"trouble": wrong}
            measured[phase]["rounds"] = timed(work, rows, phase, device, rounds)
            click.echo(f"  {phase}: {measured[phase]['rounds']} rounds", err=True)
        del self.data["begun"]
        self._put("speed", begun)

    def _check(self, work: Workload, names: Sequence[str]) -> None:
        """Compute the errors that are still missing: several shapes of a table may share one small size."""
        missing = [name for name in names if name not in self._errors_of(work)]
        if missing:
            small = work.at_error_size()
            case = small.draw.case
            rows = {**self._errors_of(work), **errors_at(small, missing, self.contenders.device)}
            self._put("errors", {
                "settings": small.draw.spelled(), "dims": dict(case.dims), "dtype": case.dtype, "values": work.values,
                "rows": rows,
            })  # fmt: skip
            click.echo(f"  errors of {len(missing)} at {small.draw.case.spelled()}", err=True)

    def _errors_of(self, work: Workload) -> Rows:
        key = (work.at_error_size().draw.spelled(), work.values)
        return next((old["rows"] for old in self.data["errors"] if (old["settings"], old["values"]) == key), {})

    def _put(self, kind: str, new: dict[str, Any]) -> None:
        def key(entry: Mapping[str, Any]) -> tuple[str, str | None]:
            return entry["settings"], entry["values"]

        entries = self.data[kind]
        entries[:] = [old for old in entries if key(old) != key(new)] + [new]
        self._write()

    def _write(self) -> None:
        """Write all figures; an interrupted run leaves the shape that it was measuring under ``begun``."""
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
        self.data.pop("begun", None)


def _first_figures(row: Figures) -> str:
    if "trouble" in row:
        return str(row["trouble"])
    peak = "" if row["peak_bytes"] is None else f", peak {format_bytes(row['peak_bytes'])}"
    return f"first call {format_seconds(row['first_call_s'])}{peak}"


# ---------------------------------------------------------------- the command
@click.command()
@click.argument("op")
@click.argument("settings", nargs=-1, metavar="[DIM=VALUE]...")
@click.option(
    "--case", help="A case of the contract, which DIM=VALUE changes (without it, the first); or a shape of the table."
)
@click.option("--table", "table_name", metavar="NAME", help="A table of benchmarks/peers/OP.py, or all.")
@click.option("--forms", metavar="NAME,...", help="These forms; the floor always runs.")
@click.option("--peers", metavar="NAME,...", help="These peers, or none.")
@click.option("--phase", type=click.Choice(PHASES), help="Without it, those of the table, or the longest.")
@click.option("--values", metavar="NAME", help="Input values of benchmarks/peers/OP.py.")
@click.option("--rounds", "num_rounds", type=click.IntRange(2), help="Without it, 2 to 10, by --seconds.")
@click.option("--seconds", type=click.FloatRange(0), default=6.0, show_default=True, help="Of rounds, at each shape.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="[default: cuda where there is one]")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures there.")
@click.option("--add", is_flag=True, help="Keep what PATH has of other shapes.")
def main(
    op: str, settings: tuple[str, ...], case: str | None, table_name: str | None, forms: str | None, peers: str | None,
    phase: str | None, values: str | None, num_rounds: int | None, seconds: float, device: str | None,
    json_path: Path | None, add: bool,
) -> None:  # fmt: skip
    """Measure time, peak memory and error of OP's forms, peers and floor."""
    no_gpu = gpu_unavailable_reason()
    device = device or ("cuda" if no_gpu is None else "cpu")
    if device == "cuda" and no_gpu is not None:
        raise UsageError(f"{no_gpu}; use --device cpu")
    (contract,) = contracts([op])
    if contract.memory == "host":
        raise UsageError(f"{op} takes host memory, and compare measures a device's; use memfix check {op}")
    contenders = Contenders.of(contract, device).chosen(forms, peers)
    comparison = contenders.comparison
    tables = tables_of(contract, comparison, table_name, case, settings)
    if values is not None:
        if values not in comparison.values:
            raise UsageError(f"--values: {op} has no values {values!r}{did_you_mean(values, comparison.values)}")
        tables = {name: replace(table, values=(values,)) for name, table in tables.items()}
    if phase is not None and phase not in phases_of(contract):
        raise UsageError(f"--phase: {op} has no gradients, so its only phase is forward")
    if table_name == ALL and json_path is not None and not json_path.is_dir():
        raise UsageError(f"--json: with --table all it is a folder, which {json_path} is not")
    console = Console(width=None if sys.stdout.isatty() else 200)
    for name, table in tables.items():
        path = json_path if json_path is None or table_name != ALL else json_path / f"{op}_{name}.json"
        comparing = Comparing(contenders, path, add=add)
        phases = [phase] if phase is not None else list(table.phases)
        number = num_rounds or table.rounds
        rounds = Rounds(2, seconds=seconds / len(phases)) if number is None else Rounds(number, number)
        with contextlib.ExitStack() as stack:
            if device == "cuda":
                stack.enter_context(gpu_to_ourselves())
                stack.enter_context(quick_tuning())
            for entry in table.entries:
                click.echo(f"{op}, {entry.name} {entry.settings}", err=True)
                comparing.measure(entry, table, phases, rounds)
        print_comparison(comparing.data, console)


if __name__ == "__main__":
    run(main, "python -m benchmarks.compare")
