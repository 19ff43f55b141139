"""What changed between two peaks: which rows are the same, and how a change reads."""

from __future__ import annotations

import pytest
import torch

import memfix
from memfix.meters.base import Reading, Step
from memfix.meters.difference import Change, changes
from memfix.meters.timeline import Allocation
from memfix.units import KiB, MiB

LOGITS = Allocation(512 * MiB, "_to_copy", "loss.py:41 in loss", "logits.float()")
PRODUCT = Allocation(MiB, "mm", "loss.py:40 in loss", "hidden @ weight.T")


def row(
    size: int, count: int = 1, *, what: str = "mm", place: str = "loss.py:40 in f", code: str = "a @ b"
) -> Allocation:
    return Allocation(size, what, place, code, count)


# ---------------------------------------------------------------- how it reads
@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        (None, LOGITS, "+512.00 MiB: `logits.float()` loss.py:41, now alive at the peak (_to_copy)"),
        (LOGITS, None, "-512.00 MiB: `logits.float()` loss.py:41, no longer alive at the peak (_to_copy)"),
        (row(MiB), row(3 * MiB), "+2.00 MiB: `a @ b` loss.py:40, 1.00 MiB -> 3.00 MiB (mm)"),
        (row(3 * MiB), row(MiB), "-2.00 MiB: `a @ b` loss.py:40, 3.00 MiB -> 1.00 MiB (mm)"),
        (row(MiB), row(4 * MiB, 4), "+3.00 MiB: `a @ b` loss.py:40, 1 -> 4 of them alive at the peak (mm)"),
        (None, row(KiB, code=""), "+1.00 KiB: mm loss.py:40, now alive at the peak (mm)"),
        (None, row(KiB, place=""), "+1.00 KiB: `a @ b`, now alive at the peak (mm)"),
        (row(KiB, place=""), row(2 * KiB), "+1.00 KiB: `a @ b` loss.py:40, 1.00 KiB -> 2.00 KiB (mm)"),
    ],
    ids=["new", "gone", "grew", "shrank", "more of them", "no code", "no place", "place known now"],
)
def test_a_change_names_its_bytes_its_line_and_its_fate(
    before: Allocation | None, now: Allocation | None, text: str
) -> None:
    assert str(Change(before, now)) == text


# ---------------------------------------------------------------- which rows are the same
def test_the_same_rows_are_no_change() -> None:
    assert changes([LOGITS, PRODUCT], [PRODUCT, LOGITS]) == ()


def test_a_line_that_moved_is_the_same_line() -> None:
    assert changes([row(8, place="loss.py:40 in f")], [row(8, place="loss.py:52 in f")]) == ()


def test_another_maker_on_the_same_line_is_another_row() -> None:
    found = changes([row(8, what="mm")], [row(8, what="mm"), row(3, what="exp")])
    assert [str(change) for change in found] == ["+3 B: `a @ b` loss.py:40, now alive at the peak (exp)"]


def test_rows_without_code_are_told_apart_by_their_place() -> None:
    first, second = row(8, code="", place="a.py:1 in f"), row(8, code="", place="b.py:1 in f")
    assert changes([first], [second, first]) == (Change(None, second),)


def test_what_grew_most_comes_first_and_what_shrank_most_last() -> None:
    before = [row(10, code="shrank"), row(10, code="gone"), row(10, code="grew")]
    now = [row(9, code="shrank"), row(12, code="grew"), row(100, code="new")]
    assert [change.bytes for change in changes(before, now)] == [100, 2, -1, -10]


def test_the_same_text_on_two_lines_is_one_row_of_both() -> None:
    once = [row(512, place="a.py:1 in f")]
    twice = [row(512, place="a.py:1 in f"), row(512, place="a.py:9 in f")]
    assert [str(change) for change in changes(once, twice)] == [
        "+512 B: `a @ b` a.py:1, 1 -> 2 of them alive at the peak (mm)"
    ]
    assert changes(twice, twice) == ()


# ---------------------------------------------------------------- of two readings
def reading(*alive: Allocation) -> Reading:
    return Reading("simulated", "H200", sum(row.bytes for row in alive), 0, 0, 0, 0, alive_at_peak=alive)


def test_a_reading_says_what_it_has_that_the_other_has_not() -> None:
    assert reading(PRODUCT, LOGITS).diff(reading(PRODUCT)) == (Change(None, LOGITS),)
    assert reading(PRODUCT).diff(reading(PRODUCT, LOGITS)) == (Change(LOGITS, None),)


def test_the_line_that_was_added_to_a_step_is_the_change() -> None:
    def build(device: str, upcast: bool) -> Step:
        x = torch.empty(512, 512, dtype=torch.bfloat16, device=device)

        def step() -> object:
            squares = x * x
            wide = squares.float() if upcast else None
            return squares, wide

        return step

    narrow, wide = (memfix.peak(lambda device, upcast=upcast: build(device, upcast)) for upcast in (False, True))
    (change,) = wide.diff(narrow)
    assert change.bytes == 512 * 512 * 4
    assert str(change).startswith("+1.00 MiB: `wide = squares.float() if upcast else None` ")
    assert str(change).endswith(", now alive at the peak (_to_copy)")
    assert [c.bytes for c in narrow.diff(wide)] == [-512 * 512 * 4]
