"""A branch that adds a ``.double()``: the row, the bytes and the line, as text, as Markdown and as an annotation."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkouts import edit, gate

FORM = "memfix/ops/affine/in_place.py"
BEFORE = "    return doubled.add_(1)\n"
ADDED = "    wide = doubled.double()\n"


@pytest.fixture(scope="module")
def said(_toy_checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one gate says of such a checkout, on GitHub."""
    folder = shutil.copytree(_toy_checkout, tmp_path_factory.mktemp("double") / "checkout")
    edit(folder / FORM, BEFORE, ADDED + BEFORE)
    summary = folder / "summary.md"
    done = gate(
        folder, "affine", "--md", "gate.md",
        GITHUB_ACTIONS="true", GITHUB_WORKSPACE=str(folder), GITHUB_STEP_SUMMARY=str(summary),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    line = (folder / FORM).read_text().splitlines().index(ADDED.rstrip()) + 1
    return {
        "text": done.stdout, "annotations": done.stderr, "markdown": (folder / "gate.md").read_text(),
        "summary": summary.read_text(), "line": str(line),
    }  # fmt: skip


def test_the_text_has_the_row_the_bytes_and_the_line(said: dict[str, str]) -> None:
    assert "affine/in_place [large, train]: 49,152 bytes (48.00 KiB), lock 32,768 (32.00 KiB)" in said["text"]
    assert f"`{ADDED.strip()}` {FORM}:{said['line']}, now alive at the peak" in said["text"]


def test_the_markdown_has_them_in_one_row_of_what_changed(said: dict[str, str]) -> None:
    (row,) = (
        line for line in said["markdown"].splitlines() if line.startswith("| affine | in_place | large | train |")
    )
    cells = [cell.strip() for cell in row.split("|")]
    before, now, change, source, verdict = cells[5:10]
    assert (before, now, source) == ("32.00 KiB", "48.00 KiB", f"`{FORM}:{said['line']}`")
    assert change.startswith("+16,384 B (")
    assert verdict.startswith("FAIL lock")
    assert said["summary"] == said["markdown"]


def test_the_annotation_stands_on_the_line(said: dict[str, str]) -> None:
    (line,) = (line for line in said["annotations"].splitlines() if "affine/in_place [large, train]" in line)
    assert line.startswith(f"::error file={FORM},line={said['line']},title=memfix lock")
    assert f"`{ADDED.strip()}`" in line
