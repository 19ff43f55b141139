"""The readings of a pytest session as Markdown, each with the verdict of its test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...laws import NAIVE
from ...units import format_bytes
from .escape import escaped, escaped_html, fenced
from .markdown import LIMIT, Paper

_COLUMNS = ("what", "peak", "meter", "verdict")


def readings_as_markdown(
    readings: Sequence[Mapping[str, Any]], failures: Mapping[str, str], notes: Sequence[str], *, limit: int = LIMIT
) -> str:
    """``failures`` are what the failed tests say, by their ids; ``readings`` have an ``outcome``."""
    paper = Paper(limit)
    word = f"{len(failures)} test{'s' if len(failures) != 1 else ''} failed" if failures else "pass"
    paper.write(f"### memfix: {word}, {len(readings)} readings", "")
    paper.blocks([[f"> {escaped(note)}", ""] for note in notes], "notes", share=0.2)
    folds = [
        [f"<details open><summary>{escaped_html(test)}</summary>", "", *fenced(text), "", "</details>", ""]
        for test, text in failures.items()
    ]
    paper.blocks(folds, "failures", share=0.7)
    rows = {
        (escaped(r["name"]), format_bytes(r["bytes"]), escaped(r["meter"]), _verdict(r)): None for r in readings
    }  # forms share naive's readings
    if rows:
        paper.table(_COLUMNS, rows, thing="readings")
    return paper.text()


def _verdict(reading: Mapping[str, Any]) -> str:
    if reading.get("key") and reading["key"][1] == NAIVE:
        return "reference"
    return "**FAIL**" if reading["outcome"] == "failed" else "pass"
