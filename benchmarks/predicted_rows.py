"""Rows of predicted peaks, with measured ones on a GPU: their measurement, text, and files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from importlib import _bootstrap  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

import torch

import memfix
from memfix.atomic_write import write_whole
from memfix.meters.base import Step
from memfix.provenance import describe
from memfix.units import format_bytes

Row = dict[str, Any]


def measured(build: Callable[..., Step], **options: Any) -> Row:
    """Predict the peak of a step, and on a GPU measure it too.

    The row has the prediction with its bounds, or its error; the CPU time of the prediction without imports; and the
    measured peak, or its error. ``options`` are those of :func:`memfix.peak`.
    """
    row: Row = {}
    start, imports = time.process_time(), ImportTime()
    try:
        with imports:
            predicted = memfix.peak(build, **options)
    except Exception as error:  # third-party code may raise anything
        row["error"] = f"{type(error).__name__}: {error}"
    else:
        row |= {"predicted": predicted.peak_bytes, "exact": predicted.exact, "notes": list(predicted.notes)}
        if predicted.at_most is not None:
            row |= {"at_least": predicted.at_least, "at_most": predicted.at_most}
    row["cpu_s"] = round(time.process_time() - start - imports.cpu_s, 2)
    if torch.cuda.is_available():
        try:
            row["measured"] = memfix.peak(build, meter="cuda", **options).peak_bytes
        except Exception as error:
            row["error_on_gpu"] = f"{type(error).__name__}: {error}"
    return row


class ImportTime:
    """A context manager that measures the CPU time of imports: packages import many of their modules at first use."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self._depth = 0

    def __enter__(self) -> None:
        self._find_and_load = _bootstrap._find_and_load
        _bootstrap._find_and_load = self._timed

    def __exit__(self, *_: object) -> None:
        _bootstrap._find_and_load = self._find_and_load

    def _timed(self, *args: Any) -> Any:
        start, self._depth = time.process_time(), self._depth + 1
        try:
            return self._find_and_load(*args)
        finally:
            self._depth -= 1
            if self._depth == 0:  # its time includes that of nested imports
                self.cpu_s += time.process_time() - start


def in_words(row: Row) -> str:
    real = f", measured {row['measured']:,}" if "measured" in row else ""
    real += f", on the GPU {row['error_on_gpu']}" if "error_on_gpu" in row else ""
    if "error" in row:
        return row["error"] + real
    kind = "exact" if row["exact"] else "an estimate"
    if "at_most" in row:
        kind += f" between {row['at_least']:,} and {row['at_most']:,}"
    return f"predicted {row['predicted']:,} bytes ({format_bytes(row['predicted'])}, {kind}){real}; {row['cpu_s']} s"


def kept_rows(path: Path | None) -> dict[str, Any]:
    """Read the figures of an earlier run."""
    return json.loads(path.read_text()) if path else {"workloads": {}}


def take_measured(row: Row, kept: Mapping[str, Any], name: str) -> None:
    """Copy the bytes measured on a GPU from an earlier run."""
    if "measured" in (before := kept["workloads"].get(name, {})):
        row["measured"] = before["measured"]


def write_rows(path: Path, rows: Mapping[str, Row], kept: Mapping[str, Any]) -> None:
    measured_on = kept.get("measured_on") or kept.get("surroundings")
    data = {"surroundings": describe(), "measured_on": measured_on, "workloads": rows}
    write_whole(path, json.dumps(data, indent=1) + "\n", "the figures")
