"""The book of live bytes: who was alive when, and how high it went."""

from __future__ import annotations

import pytest

from memfix.meters.simulated.ledger import Entry, Ledger
from memfix.meters.timeline import rounded


def entry(size: int, what: str = "made") -> Entry:
    return Entry(size, what)


def born(ledger: Ledger, size: int, what: str = "made") -> Entry:
    made = entry(size, what)
    ledger.birth(made)
    return made


def requested(ledger: Ledger) -> tuple[int, int, int]:
    return ledger.requested.base, ledger.requested.live, ledger.requested.peak


def alive_at_peak(ledger: Ledger) -> list[tuple[str, int]]:
    timeline = ledger.timeline()
    return [(b.what, b.bytes) for b in timeline.alive_at(timeline.peak_event) if b.born]


def names_at_peak(ledger: Ledger) -> list[str]:
    return [what for what, _ in alive_at_peak(ledger)]


@pytest.mark.parametrize(("size", "whole"), [(0, 0), (1, 512), (511, 512), (512, 512), (513, 1024)])
def test_the_allocator_rounds_up_to_512(size: int, whole: int) -> None:
    assert rounded(size) == whole


def test_the_peak_is_what_was_alive_together_not_the_sum() -> None:
    ledger = Ledger()
    first = born(ledger, 100)
    ledger.death(first)
    second = born(ledger, 70)
    third = born(ledger, 50)
    ledger.death(second)
    ledger.death(third)
    assert requested(ledger) == (0, 0, 120)


def test_allocated_bytes_are_rounded_storage_by_storage() -> None:
    ledger = Ledger()
    first = born(ledger, 100)
    born(ledger, 600)
    ledger.death(first)
    assert requested(ledger) == (0, 600, 700)
    assert (ledger.allocated.live, ledger.allocated.peak) == (1024, 1536)


def test_the_allocated_peak_may_lie_elsewhere_than_the_requested_one() -> None:
    ledger = Ledger()
    large = born(ledger, 2048)
    ledger.death(large)
    for _ in range(5):
        born(ledger, 1)
    assert (ledger.requested.peak, ledger.allocated.peak) == (2048, 2560)


def test_those_alive_at_the_peak_are_named_and_those_before_and_after_are_not() -> None:
    ledger = Ledger()
    early = born(ledger, 90, "early")
    born(ledger, 10, "kept")
    ledger.death(early)
    high = born(ledger, 100, "high")
    ledger.death(high)
    born(ledger, 5, "late")
    assert requested(ledger) == (0, 15, 110)
    assert names_at_peak(ledger) == ["kept", "high"]


def test_the_first_of_two_equal_peaks_is_the_one_that_is_explained() -> None:
    ledger = Ledger()
    ledger.death(born(ledger, 100, "first"))
    ledger.death(born(ledger, 100, "second"))
    assert names_at_peak(ledger) == ["first"]


def test_every_buffer_knows_the_phase_it_was_made_in() -> None:
    ledger = Ledger()
    born(ledger, 100, "activation")
    ledger.enter_phase("backward")
    ledger.enter_phase("backward")
    born(ledger, 1, "gradient")
    ledger.workspace([entry(7, "sums")])
    timeline = ledger.timeline()
    assert [(b.what, b.phase) for b in timeline.buffers] == [
        ("activation", "forward"),
        ("gradient", "backward"),
        ("sums", "backward"),
    ]
    assert timeline.phases == ((0, "forward"), (2, "backward"))


def test_the_timeline_adds_up_to_the_peak_and_to_what_is_left() -> None:
    ledger = Ledger()
    ledger.add_existing(entry(1000, "weight"))
    ledger.restart()
    first = born(ledger, 50)
    ledger.workspace([entry(30), entry(5)])
    ledger.death(first)
    born(ledger, 8)
    timeline = ledger.timeline()
    assert timeline.live_bytes == (1000, 1050, 1085, 1050, 1000, 1008)
    assert (timeline.base_bytes, timeline.peak_event, timeline.num_events) == (1000, 2, 5)
    assert (ledger.requested.peak, ledger.requested.live) == (1085, 1008)


# ---------------------------------------------------------------- workspace
def test_workspace_raises_the_peak_and_is_gone_again() -> None:
    ledger = Ledger()
    born(ledger, 100, "output")
    ledger.workspace([entry(30, "sort"), entry(600, "sums")])
    assert requested(ledger) == (0, 100, 730)
    assert (ledger.allocated.live, ledger.allocated.peak) == (512, 2048)
    assert names_at_peak(ledger) == ["output", "sort", "sums"]


def test_one_that_died_before_the_workspace_is_not_in_its_explanation() -> None:
    ledger = Ledger()
    born(ledger, 10, "kept")
    ledger.death(born(ledger, 5, "dead"))
    ledger.workspace([entry(100, "sort")])
    assert requested(ledger) == (0, 10, 110)
    assert names_at_peak(ledger) == ["kept", "sort"]


def test_workspace_below_an_earlier_peak_is_not_in_its_explanation() -> None:
    ledger = Ledger()
    ledger.death(born(ledger, 1000, "large"))
    ledger.workspace([entry(999, "sort")])
    assert ledger.requested.peak == 1000
    assert names_at_peak(ledger) == ["large"]


def test_a_higher_peak_later_forgets_the_workspace_of_the_earlier_one() -> None:
    ledger = Ledger()
    ledger.workspace([entry(100, "sort")])
    born(ledger, 200, "large")
    assert names_at_peak(ledger) == ["large"]


# ---------------------------------------------------------------- written over
def test_an_heir_takes_over_the_bytes_of_one_that_dies_next() -> None:
    ledger = Ledger()
    old, new = born(ledger, 100, "old"), entry(100, "new")
    ledger.birth_in_place_of(old, new)
    ledger.death(old)
    assert requested(ledger) == (0, 100, 100)
    assert names_at_peak(ledger) == ["old"]
    ledger.death(new)
    assert requested(ledger) == (0, 0, 100)


def test_an_heir_counts_as_new_when_the_old_one_stays() -> None:
    ledger = Ledger()
    old, new = born(ledger, 100, "old"), entry(100, "new")
    ledger.birth_in_place_of(old, new)
    ledger.settle()
    assert requested(ledger) == (0, 200, 200)
    assert names_at_peak(ledger) == ["old", "new"]
    ledger.death(old)
    assert requested(ledger) == (0, 100, 200)


def test_the_next_birth_settles_that_the_old_one_stays() -> None:
    ledger = Ledger()
    old = born(ledger, 100, "old")
    ledger.birth_in_place_of(old, entry(100, "new"))
    born(ledger, 1, "next")
    assert requested(ledger) == (0, 201, 201)


def test_the_next_heir_settles_that_the_old_one_stays() -> None:
    ledger = Ledger()
    old = born(ledger, 100, "old")
    new = entry(100, "new")
    ledger.birth_in_place_of(old, new)
    ledger.birth_in_place_of(new, entry(100, "newest"))
    ledger.death(new)
    assert requested(ledger) == (0, 200, 200)


def test_a_resize_settles_that_the_old_one_stays() -> None:
    ledger = Ledger()
    old, other = born(ledger, 100, "old"), born(ledger, 1, "other")
    ledger.birth_in_place_of(old, entry(100, "new"))
    ledger.resize(other, 11)
    assert requested(ledger) == (0, 211, 212)


def test_settling_twice_counts_the_heir_once() -> None:
    ledger = Ledger()
    ledger.birth_in_place_of(born(ledger, 100), entry(100))
    ledger.settle()
    ledger.settle()
    assert requested(ledger) == (0, 200, 200)


def test_the_death_of_another_makes_the_heir_new_while_that_one_is_still_alive() -> None:
    ledger = Ledger()
    old, other = born(ledger, 100, "old"), born(ledger, 40, "other")
    ledger.birth_in_place_of(old, entry(100, "new"))
    ledger.death(other)
    assert requested(ledger) == (0, 200, 240)


def test_the_entries_of_that_peak_add_up_to_it() -> None:
    ledger = Ledger()
    old, other = born(ledger, 100, "old"), born(ledger, 40, "other")
    ledger.birth_in_place_of(old, entry(100, "new"))
    ledger.death(other)
    assert sorted(names_at_peak(ledger)) == ["new", "old", "other"]


# ---------------------------------------------------------------- found, restart, resize
def test_a_storage_that_was_there_before_raises_the_whole_history() -> None:
    ledger = Ledger()
    ledger.death(born(ledger, 100, "gone"))
    ledger.restart()
    born(ledger, 50, "new")
    ledger.add_existing(entry(1000, "input"))
    assert requested(ledger) == (1000, 1050, 1050)
    assert (ledger.allocated.base, ledger.allocated.live, ledger.allocated.peak) == (1024, 1536, 1536)
    assert names_at_peak(ledger) == ["new"]


def test_the_death_of_an_input_does_not_raise_a_later_peak() -> None:
    ledger = Ledger()
    there = entry(1000, "input")
    ledger.add_existing(there)
    ledger.death(there)
    born(ledger, 900, "new")
    assert requested(ledger) == (1000, 900, 1000)


def test_restart_makes_what_is_live_the_base_and_forgets_the_peak() -> None:
    ledger = Ledger()
    weight = born(ledger, 100, "weight")
    ledger.workspace([entry(900, "warm-up")])
    ledger.restart()
    assert requested(ledger) == (100, 100, 100)
    assert (ledger.allocated.base, ledger.allocated.peak) == (512, 512)
    assert names_at_peak(ledger) == []
    born(ledger, 7, "step")
    assert requested(ledger) == (100, 107, 107)
    assert names_at_peak(ledger) == ["step"]
    ledger.death(weight)
    assert requested(ledger) == (100, 7, 107)


def test_restart_counts_an_heir_whose_elder_stayed_into_the_base() -> None:
    ledger = Ledger()
    ledger.birth_in_place_of(born(ledger, 100), entry(100))
    ledger.restart()
    assert requested(ledger) == (200, 200, 200)


def test_a_storage_that_grows_holds_its_old_memory_while_that_is_copied() -> None:
    ledger = Ledger()
    grown = born(ledger, 100, "grown")
    ledger.resize(grown, 600)
    assert requested(ledger) == (0, 600, 700)
    assert alive_at_peak(ledger) == [("grown", 100), ("grown", 600)]
    assert (ledger.allocated.live, ledger.allocated.peak) == (1024, 1536)
    ledger.death(grown)
    assert (ledger.requested.live, ledger.allocated.live) == (0, 0)


def test_a_storage_that_shrinks_keeps_the_peak() -> None:
    ledger = Ledger()
    shrunk = born(ledger, 600)
    ledger.resize(shrunk, 0)
    assert requested(ledger) == (0, 0, 600)
    assert (ledger.allocated.live, ledger.allocated.peak) == (0, 1024)


def test_a_storage_that_shrank_after_the_peak_is_explained_at_its_size_then() -> None:
    ledger = Ledger()
    shrunk = born(ledger, 600, "gathered")
    ledger.resize(shrunk, 0)
    assert alive_at_peak(ledger) == [("gathered", 600)]


# ---------------------------------------------------------------- estimated workspace
def bounds(ledger: Ledger) -> tuple[int, int, int]:
    return ledger.requested.least_peak, ledger.requested.peak, ledger.requested.most_peak


def test_an_estimated_workspace_bounds_the_peak() -> None:
    ledger = Ledger()
    born(ledger, 100)
    ledger.workspace([entry(50)], (10, 400))
    assert bounds(ledger) == (110, 150, 500)
    assert requested(ledger) == (0, 100, 150)


def test_a_later_peak_may_exceed_what_the_workspace_could_take() -> None:
    ledger = Ledger()
    first = born(ledger, 100)
    ledger.workspace([entry(50)], (0, 80))
    born(ledger, 200)
    assert bounds(ledger) == (300, 300, 300)
    ledger.death(first)
    ledger.workspace([entry(150)], (0, 170))
    assert bounds(ledger) == (300, 350, 370)


def test_a_known_workspace_leaves_no_doubt() -> None:
    ledger = Ledger()
    born(ledger, 100)
    ledger.workspace([entry(50)])
    assert bounds(ledger) == (150, 150, 150)


def test_what_was_there_before_and_a_restart_move_the_bounds_too() -> None:
    ledger = Ledger()
    ledger.workspace([entry(50)], (0, 80))
    ledger.add_existing(entry(1000))
    assert bounds(ledger) == (1000, 1050, 1080)
    ledger.restart()
    assert bounds(ledger) == (1000, 1000, 1000)


# ---------------------------------------------------------------- memory that is freed late
def late(ledger: Ledger, size: int, reason: str = "a stream") -> Entry:
    made = born(ledger, size)
    ledger.may_be_late(made, reason)
    return made


def test_memory_that_may_be_freed_late_counts_on_in_the_late_peak() -> None:
    ledger = Ledger()
    ledger.death(late(ledger, 100))
    born(ledger, 70)
    ledger.workspace([entry(5)])
    assert ledger.requested.peak == 100
    assert (ledger.late_peak, ledger.late_reasons) == (175, {"a stream"})


def test_the_most_that_a_workspace_takes_counts_in_the_late_peak() -> None:
    ledger = Ledger()
    ledger.death(late(ledger, 100))
    ledger.workspace([entry(5)], (0, 50))
    assert ledger.late_peak == 150


def test_memory_is_late_only_until_its_reason_ends() -> None:
    ledger = Ledger()
    ledger.death(late(ledger, 100, "a thread"))
    alive, other = late(ledger, 10, "a thread"), late(ledger, 20)
    ledger.no_longer_late("a thread")
    ledger.death(alive)
    ledger.death(other)
    born(ledger, 200)
    assert (ledger.late_peak, ledger.late_reasons) == (220, {"a stream"})


def test_an_heir_of_late_memory_is_late_and_counts_once() -> None:
    ledger = Ledger()
    old, new = late(ledger, 100), entry(100)
    ledger.birth_in_place_of(old, new)
    ledger.death(old)
    assert ledger.requested.live == 100
    ledger.death(new)
    born(ledger, 1)
    assert ledger.late_peak == 101


def test_a_late_storage_that_is_emptied_is_late() -> None:
    ledger = Ledger()
    gathered = late(ledger, 100)
    ledger.resize(gathered, 0)
    ledger.resize(gathered, 100)
    assert ledger.late_peak == 200
    ledger.death(gathered)
    born(ledger, 100)
    assert ledger.late_peak == 200


def test_nothing_is_late_when_a_step_begins() -> None:
    ledger = Ledger()
    ledger.death(late(ledger, 100))
    ledger.restart()
    born(ledger, 10)
    assert ledger.late_peak == 0
