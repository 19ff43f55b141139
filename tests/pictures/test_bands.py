"""Columns keep the peak, bands add up, and text is made fit for drawing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from timelines import GiB, MiB, Story, empty, gpt_step, hostile, known_peak, many_events, single_event

from memfix.meters.timeline import Buffer, Line, Timeline
from memfix.pictures.bands import (
    EXISTED_BEFORE,
    OTHER_ORIGINS,
    build_stack,
    choose_columns,
    fold,
    largest_first,
    peak_label,
    phase_spans,
    printable,
    printable_end,
)


@pytest.mark.parametrize("most", [1, 2, 7, 100, 10_000])
def test_the_bands_of_every_column_add_up_to_its_live_bytes(tmp_path: Path, most: int) -> None:
    for timeline in (known_peak(), hostile(), gpt_step(tmp_path), many_events(3000), single_event(), empty()):
        stack = build_stack(timeline, max_columns=most)
        sums = [sum(column) for column in zip(*(band.values for band in stack.bands), strict=True)]
        assert (sums or [0]) == list(stack.live)
        assert len(stack.starts) == len(stack.events) == min(most, timeline.num_events + 1)


@pytest.mark.parametrize("most", [1, 2, 3, 50, 999])
def test_downsampling_never_loses_the_peak(most: int) -> None:
    timeline = many_events(3000)
    stack = build_stack(timeline, max_columns=most)
    assert timeline.peak_event in stack.events
    assert max(stack.live) == max(timeline.live_bytes)


def test_a_column_shows_the_highest_of_the_events_it_covers() -> None:
    live = [random.Random(1).randrange(100) for _ in range(1001)]
    starts, events = choose_columns(live, 10)
    assert starts[0] == 0
    for start, end, event in zip(starts, [*starts[1:], len(live)], events, strict=True):
        assert live[event] == max(live[start:end])
        assert start <= event < end


def test_what_existed_before_is_lowest_and_the_rest_is_highest(tmp_path: Path) -> None:
    labels = [band.label for band in build_stack(gpt_step(tmp_path), max_columns=500).bands]
    assert labels[0] == EXISTED_BEFORE
    assert labels[-1] == OTHER_ORIGINS
    assert len(labels) == 10


def test_the_largest_at_the_peak_has_a_band_and_comes_first_in_the_legend(tmp_path: Path) -> None:
    timeline = gpt_step(tmp_path)
    first = largest_first(build_stack(timeline, max_columns=500).bands)[0]
    assert first.label == "_log_softmax"
    assert first.at_peak is not None
    assert first.at_peak.times == "16 x 1.16 GiB"
    assert fold(timeline.alive_at(timeline.peak_event))[0] == first.at_peak


def test_what_is_large_only_after_the_peak_has_a_band_too(tmp_path: Path) -> None:
    bands = build_stack(gpt_step(tmp_path), max_columns=500).bands
    late = next(band for band in bands if band.label == "zeros_like")
    assert late.at_peak is None
    assert late.max_bytes == 12 * 340 * MiB


def test_buffers_of_different_sizes_are_counted_without_a_size() -> None:
    line = Line("a.py", 1, "f")
    buffers = [Buffer(size, "mm", line, "forward", 1, None) for size in (1, 2, 3)]
    assert [(f.bytes, f.times) for f in fold(buffers)] == [(6, "3 buffers")]


def test_buffers_without_bytes_or_without_a_life_are_not_listed() -> None:
    buffers = (Buffer(0, "empty", None, "forward", 1, None), Buffer(8, "mm", None, "forward", 2, 2))
    assert fold(buffers) == []
    assert build_stack(Timeline(buffers, 2, ((0, "forward"),)), max_columns=9).bands == ()


def test_the_band_of_what_existed_before_falls_when_it_is_freed() -> None:
    story = Story()
    old = story.before(GiB)
    story.phase("forward")
    story.make(MiB, "mm", None)
    story.drop(old)
    before = build_stack(story.end(), max_columns=9).bands[0]
    assert (before.label, before.values) == (EXISTED_BEFORE, (GiB, GiB, 0))


def test_the_peak_is_told_above_what_existed_before() -> None:
    assert peak_label(known_peak()) == "peak 5.00 GiB above 1.00 GiB that existed before"
    assert peak_label(single_event()) == "peak 3.00 MiB"


def test_phases_in_which_nothing_happened_are_left_out() -> None:
    timeline = Timeline((), 4, ((0, "forward"), (3, "backward"), (3, "optimizer"), (5, "after")))
    assert phase_spans(timeline) == [(0, 3, "forward"), (3, 5, "optimizer")]
    assert phase_spans(empty()) == []


def test_text_is_one_line_of_printable_characters() -> None:
    assert printable("a\n\tb\0\ud800c", 20) == "a  b  c"
    assert printable("abcdef", 6) == "abcdef"
    assert printable("abcdefg", 6) == "abcde…"
    assert printable_end("abcdefg", 6) == "…cdefg"
    assert printable_end("abcdef", 6) == "abcdef"
