"""Measures how often the time gate fails on this machine: on identical code, and on artificially slowed code.

    python -m benchmarks.gate_power [--op kda] [--form wy] [--only] [--gates 20] [--planted 0,3,5,10] [--json PATH]

Every gate is a real one: all forms of the op in the working tree against HEAD's copy and against naive, in fresh
processes, with the canary and the second measurement. One form is slowed by each of the given percentages
(``memfix.meters.clock.slowed``). With ``--only`` that form alone is timed, at its first case, against HEAD. With
``--at-once`` several gates run concurrently, which saves time when processes start; on a GPU only one measures at a
time. Rows that PATH already has for the same form are kept, each with the machine on which it was measured.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from memfix.atomic_write import write_whole
from memfix.errors import EXIT_NOT_MEASURED, EXIT_PASS, EXIT_REGRESSION
from memfix.gate.report import as_json
from memfix.gate.timing.run import run_time_gate
from memfix.gate.timing.timing_plan import TimedForm, forms_to_time
from memfix.meters.cuda import gpu_unavailable_reason
from memfix.provenance import describe
from memfix.registry import contracts

WORDS = {EXIT_PASS: "passed", EXIT_REGRESSION: "failed", EXIT_NOT_MEASURED: "could_not_measure"}


def one_gate(
    op: str, form: str, timed_forms: list[TimedForm] | None, device: str, slower_by: float, *, is_alone: bool
) -> dict[str, Any]:
    """Run one gate; return its verdict, the forms that failed, its reading of the slowed form, and its seconds."""
    start = time.perf_counter()
    verdict = run_time_gate(
        contracts([op]), device=device, base_ref="HEAD",
        timed_forms={op: timed_forms} if timed_forms else None,
        slower_by={form: slower_by}, needs_idle_gpu=is_alone,
    )  # fmt: skip
    found = next(finding for finding in verdict.findings if (finding.check, finding.form) == ("time", form))
    return {
        "verdict": WORDS[verdict.exit_code],
        "blames": sorted({finding.form for finding in verdict.findings if finding.status == "fail"}),
        "took_s": time.perf_counter() - start,
        **{name: found.figures.get(name) for name in ("ratio", "low", "high", "limit", "processes")},
    }


def row_of(form: str, gates: list[dict[str, Any]]) -> dict[str, Any]:
    ratios = [gate["ratio"] for gate in gates if gate["ratio"] is not None]
    return {
        "gates": len(gates),
        "blamed_another_form": sum(any(blamed != form for blamed in gate["blames"]) for gate in gates),
        **{word: sum(gate["verdict"] == word for gate in gates) for word in WORDS.values()},
        "ratio": statistics.median(ratios) if ratios else None,
        "low": min(ratios, default=None),
        "high": max(ratios, default=None),
        "longest_s": max(gate["took_s"] for gate in gates),
        "each": gates,
    }


def earlier_rows(path: Path | None, where: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rows that ``path`` has for the same form."""
    if path is None or not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        rows: dict[str, dict[str, Any]] = data["planted_percent"] if data.items() >= where.items() else {}
    except (ValueError, KeyError, AttributeError):
        raise click.BadParameter(f"{path} is there and is no file of this benchmark", param_hint="--json") from None
    return rows


def print_rows(rows: dict[str, dict[str, Any]], console: Console) -> None:
    headings = f"{'gates':>6} {'failed':>7} {'wrongly':>8} {'no word':>8} {'ratio read':>24} {'longest':>9}"
    console.print(f"{'slower by':>10} {headings}")
    for planted, row in rows.items():
        read = f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})" if row["ratio"] else "none"
        console.print(
            f"{planted + ' %':>10} {row['gates']:>6} {row['failed']:>7} {row['blamed_another_form']:>8} "
            f"{row['could_not_measure']:>8} {read:>24} "
            f"{row['longest_s']:>7.1f} s"
        )


@click.command()
@click.option("--op", default="kda", show_default=True)
@click.option("--form", default="wy", show_default=True, help="The one that is made slower.")
@click.option("--only", is_flag=True, help="Time nothing but this form, against HEAD.")
@click.option("--gates", type=click.IntRange(1), default=20, show_default=True, help="For each share.")
@click.option("--planted", default="0,3,5,10", show_default=True, metavar="PERCENT,...", help="Shares to plant.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: cuda where there is one]")
@click.option("--at-once", type=click.IntRange(1), default=1, show_default=True, help="Gates side by side.")
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(
    op: str, form: str, only: bool, gates: int, planted: str, device: str | None, at_once: int, json_path: Path | None
) -> None:  # fmt: skip
    """Count how often the time gate fails on identical and on slowed code."""
    device = device or ("cpu" if gpu_unavailable_reason() else "cuda")
    (contract,) = contracts([op])
    timed = [one for one in forms_to_time(contract, device) if one.form == form]
    if not timed:
        raise click.UsageError(f"{op}/{form} is not timed on {device}")
    only_form = [TimedForm(form, timed[0].case, timed[0].phase)] if only else None
    try:
        shares = {text.strip(): float(text) / 100 for text in planted.split(",")}
    except ValueError:
        raise click.BadParameter(f"percentages, got {planted!r}", param_hint="--planted") from None
    console = Console(width=100)
    where = {"op": op, "form": form, "only": only, "device": device}
    measured_on = {"surroundings": describe(), "at_once": at_once}
    rows = earlier_rows(json_path, where)
    for text, share in shares.items():
        ended: list[dict[str, Any]] = []
        with ThreadPoolExecutor(at_once) as side_by_side:
            asked = [
                side_by_side.submit(one_gate, op, form, only_form, device, share, is_alone=at_once == 1)
                for _ in range(gates)
            ]
            for gate in as_completed(asked):  # write after each gate, so that an interrupted run keeps its figures
                ended.append(gate.result())
                rows[text] = {**measured_on, **row_of(form, ended)}
                if json_path is not None:
                    write_whole(json_path, as_json({**where, "planted_percent": rows}), "the figures")
    console.print(f"{op}, {form} {'alone' if only else 'among all forms'}, on {device}")
    print_rows(rows, console)


if __name__ == "__main__":
    sys.exit(main())
