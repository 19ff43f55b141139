"""The tables that ``benchmarks.compare`` prints: a row for each contender, a column for each shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from memfix.units import format_bytes, format_times


def print_comparison(data: Mapping[str, Any], console: Console) -> None:
    phases = dict.fromkeys(phase for entry in data["speed"] for phase in entry["phases"])
    for phase in phases:
        shapes = {
            _heading(entry): entry["phases"][phase]["rows"] for entry in data["speed"] if phase in entry["phases"]
        }
        _print_rows(console, phase, shapes, _speed_cell)
    _print_rows(
        console, "largest error", {_error_heading(check): check["rows"] for check in data["errors"]}, _error_cell
    )
    rows = [row for entry in data["speed"] for of in entry["phases"].values() for row in of["rows"].values()]
    both = [row for row in rows if row.get("peak_bytes") is not None and "simulated_bytes" in row]
    if both:
        same = sum(row["peak_bytes"] == row["simulated_bytes"] for row in both)
        console.print(f"{same} of {len(both)} peaks are those of the simulated meter to the byte")
    for name, reason in data["left_out"].items():
        console.print(f"{name}: not run: {reason}")


def _print_rows(
    console: Console,
    corner: str,
    columns: Mapping[str, Mapping[str, Any]],
    cell: Callable[[Mapping[str, Any]], str],
) -> None:
    """Print a table. ``columns`` has the rows of each column by its heading; a missing contender gets an empty cell."""
    if not columns:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(corner)
    for heading in columns:
        table.add_column(heading, justify="right")
    for name in dict.fromkeys(name for column in columns.values() for name in column):
        table.add_row(name, *(cell(column[name]) if name in column else "" for column in columns.values()))
    console.print(table)
    console.print()


def _heading(entry: Mapping[str, Any]) -> str:
    rounds = max(of["rounds"] for of in entry["phases"].values())
    calls = entry.get("calls", 1)
    return f"{entry['case']}, {entry['dtype']}, {rounds} rounds" + (f" of {calls} calls" if calls > 1 else "")


def _error_heading(check: Mapping[str, Any]) -> str:
    size = " ".join(f"{dim}={size}" for dim, size in check["dims"].items())
    return f"{check['values'] or 'drawn'}, {check['dtype']}, {size}"


def _speed_cell(row: Mapping[str, Any]) -> str:
    if "trouble" in row:
        return str(row["trouble"])
    parts = [format_times(row["seconds"], row.get("times_s") or [row["seconds"]])]
    over = next(
        (f"{row[key]:.2f}x {key.removeprefix('times_')}" for key in ("times_floor", "times_naive") if key in row), ""
    )
    parts += [over] if over else []
    if row.get("peak_bytes") is not None:
        parts.append(format_bytes(row["peak_bytes"]))
    elif "simulated_bytes" in row:
        parts.append(f"{format_bytes(row['simulated_bytes'])} simulated")
    return "  ".join([*parts, *([row["note"]] if "note" in row else [])])


def _error_cell(row: Mapping[str, Any]) -> str:
    reason = row.get("trouble") or row.get("not_checked")
    if reason is not None:
        return str(reason)
    largest = max(row, key=lambda name: row[name])
    return f"{row[largest]:.1e} ({largest})"
