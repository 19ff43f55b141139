"""A branch that adds a ``.float()``: the row, the bytes and the line, as text, as Markdown and as an annotation."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORM = "memfix/ops/embedding/gather.py"
BEFORE = "        return None, sum_VD.to(grad_ND.dtype)\n"
ADDED = "        largest = grad_ND.float().abs().amax()\n"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one gate says of such a checkout, on GitHub."""
    folder = tmp_path_factory.mktemp("float") / "checkout"
    shutil.copytree(ROOT / "memfix", folder / "memfix", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "benchmarks").mkdir()
    for name in ("memory.lock", "memory.peaks.json"):
        shutil.copy(ROOT / "benchmarks" / name, folder / "benchmarks")
    form = folder / FORM
    text = form.read_text()
    assert text.count(BEFORE) == 1
    form.write_text(text.replace(BEFORE, ADDED + BEFORE))
    summary = folder / "summary.md"
    environment = {
        **os.environ, "PYTHONPATH": str(folder), "COLUMNS": "160", "GITHUB_ACTIONS": "true",
        "GITHUB_WORKSPACE": str(folder), "GITHUB_STEP_SUMMARY": str(summary),
    }  # fmt: skip
    command = [sys.executable, "-m", "memfix", "gate", "embedding", "--profile", "dev", "--md", "gate.md"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    line = form.read_text().splitlines().index(ADDED.rstrip()) + 1
    return {
        "text": done.stdout, "annotations": done.stderr, "markdown": (folder / "gate.md").read_text(),
        "summary": summary.read_text(), "line": str(line),
    }  # fmt: skip


def test_the_text_has_the_row_the_bytes_and_the_line(said: dict[str, str]) -> None:
    assert "embedding/gather [incident, train]: " in said["text"]
    assert f"`{ADDED.strip()}` {FORM}:{said['line']}, now alive at the peak" in said["text"]
    assert "bytes (" in said["text"]


def test_the_markdown_has_them_in_one_row_of_what_changed(said: dict[str, str]) -> None:
    (row,) = (
        line for line in said["markdown"].splitlines() if line.startswith("| embedding | gather | incident | train |")
    )
    cells = [cell.strip() for cell in row.split("|")]
    before, now, change, source, verdict = cells[5:10]
    assert (before, source) == ("194.25 MiB", f"`{FORM}:{said['line']}`")
    assert now != before
    assert change.startswith("+")
    assert " B (" in change
    assert verdict.startswith("FAIL lock")
    assert said["summary"] == said["markdown"]


def test_the_annotation_stands_on_the_line(said: dict[str, str]) -> None:
    lines = [line for line in said["annotations"].splitlines() if "embedding/gather [incident, train]" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"::error file={FORM},line={said['line']},title=memfix lock")
    assert f"`{ADDED.strip()}`" in lines[0]
