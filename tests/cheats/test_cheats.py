"""Tests that each cheat, a form that is wrong on purpose, is caught by the check that it names, with a margin.

The real forms are tested elsewhere: ``ci/gate`` checks all laws of every form.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from margins import DEMANDED, load, margin, names

KEPT = sorted((Path(__file__).resolve().parents[2] / "benchmarks/results/cpu").glob("cheat_margins_*.json"))


@pytest.mark.parametrize("name", names())
def test_cheat_shows_as_often_as_is_demanded_of_the_check_it_names(name: str) -> None:
    demanded = DEMANDED[load(name).CAUGHT_BY]
    found = margin(name, enough=demanded)
    assert found.shows == demanded, f"shows in {found.shows} of {found.places} places, {demanded} are demanded"


def test_there_are_cheats_for_every_kind_of_check() -> None:
    assert {load(name).CAUGHT_BY for name in names()} == DEMANDED.keys()


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_kept_counts_are_of_these_cheats_and_none_is_below_what_is_demanded(path: Path) -> None:
    rows = json.loads(path.read_text())["cheats"]
    again = "run python -m tests.cheats.margins --json with this path, on such a machine"
    assert {(row["cheat"], row["check"]) for row in rows} <= {(name, load(name).CAUGHT_BY) for name in names()}, again
    assert [row for row in rows if row["shows"] < DEMANDED[row["check"]]] == []


def test_every_cheat_was_counted_on_some_machine() -> None:
    counted = {row["cheat"] for path in KEPT for row in json.loads(path.read_text())["cheats"]}
    assert counted == {*names()}
