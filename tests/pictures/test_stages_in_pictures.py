"""Stages in pictures: numbers that do not touch, and a list of what each stage took."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timelines import GiB, gpt_step, known_peak

from memfix.meters.timeline import Timeline
from memfix.pictures import figure, page, trace
from memfix.pictures.stages import MOST_STAGES, listed_stages, spread

pytest.importorskip("matplotlib", reason="a .png or .svg needs matplotlib")

GAP, WIDTH = 0.25, 10.0


def staged(timeline: Timeline, *stages: tuple[int, str | None]) -> Timeline:
    return dataclasses.replace(timeline, stages=stages)


def texts(timeline: Timeline, capacity_bytes: int | None = None) -> list[str]:
    root = ElementTree.fromstring(figure.as_svg(timeline, "title", capacity_bytes))
    return ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]


@given(st.lists(st.floats(0, WIDTH), max_size=int(WIDTH / GAP) - 1))
def test_marks_keep_apart_in_order_and_within_the_plot(wanted: list[float]) -> None:
    wanted = sorted(wanted)
    places = spread(wanted, GAP, WIDTH)
    assert len(places) == len(wanted)
    assert all(GAP / 2 - 1e-9 <= place <= WIDTH - GAP / 2 + 1e-9 for place in places)
    assert all(after - before >= GAP - 1e-9 for before, after in itertools.pairwise(places))


def test_a_mark_with_room_stays_where_it_is_wanted() -> None:
    assert spread([1.0, 5.0, 9.0], GAP, WIDTH) == [1.0, 5.0, 9.0]
    assert spread([5.0, 5.0], GAP, WIDTH) == [5.0 - GAP / 2, 5.0 + GAP / 2]


def test_the_list_says_what_was_live_at_the_end_of_each_stage_and_at_its_peak() -> None:
    timeline = staged(known_peak(), (1, "grows"), (3, None), (4, "rests"))
    live = timeline.live_bytes
    assert [(stage.number, stage.name, stage.start) for stage in listed_stages(timeline)] == [
        (1, "grows", 1),
        (2, "rests", 4),
    ]
    said = texts(timeline)
    assert {"grows", "rests", "1", "2", "at its end", "peak"} <= set(said)
    assert listed_stages(timeline)[0].peak == figure.format_bytes(max(live[0:3]))
    assert listed_stages(timeline)[0].at_end == figure.format_bytes(live[2])


def test_of_too_many_stages_the_highest_are_shown() -> None:
    base = known_peak()
    timeline = staged(base, *((1 + n % base.num_events, f"stage {n}") for n in range(base.num_events)))
    crowded = dataclasses.replace(base, num_events=500, stages=tuple((1 + n, f"stage {n}") for n in range(499)))
    assert len(listed_stages(timeline)) == base.num_events
    shown = listed_stages(crowded)
    assert len(shown) == MOST_STAGES
    assert any(stage.start <= base.peak_event + 1 for stage in shown)


def test_no_text_of_a_picture_with_stages_lies_on_another(tmp_path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    step = gpt_step(tmp_path)
    near = tuple((step.peak_event + n, f"a stage with a rather long name, number {n}") for n in range(-3, 12))
    for timeline in (
        staged(step, (1, "all of it")),
        staged(step, *near),
        staged(known_peak(), (1, "a"), (2, "b" * 99)),
    ):
        drawn = figure.draw(timeline, "t" * 200)
        renderer = FigureCanvasAgg(drawn).get_renderer()
        drawn.draw(renderer)
        axes = drawn.axes[0]
        written = [text for text in (*drawn.texts, *axes.texts, *axes.get_yticklabels()) if text.get_text()]
        boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in written]
        for (name, box), (other_name, other) in itertools.combinations(boxes, 2):
            assert not box.overlaps(other), f"{name!r} on {other_name!r}"
        assert all(0 <= box.x0 <= box.x1 <= drawn.bbox.width and box.y0 >= 0 for _, box in boxes)


# ---------------------------------------------------------------- asides, and the memory of the GPU
def with_an_aside() -> Timeline:
    """The step's own peak is 2 GiB above 1 GiB; beside it 3 GiB more were tried and dropped."""
    timeline = staged(known_peak(), (1, "own"), (2, "tried"), (3, None), (4, "goes on"))
    return dataclasses.replace(timeline, asides=frozenset({"tried"}))


def test_the_peak_of_every_picture_is_the_steps_own() -> None:
    timeline = with_an_aside()
    assert (timeline.live_bytes[timeline.peak_event], timeline.highest_bytes) == (3 * GiB + GiB // 2, 6 * GiB)
    said = "peak 2.50 GiB above 1.00 GiB that existed before"
    drawn = page.as_html(timeline, "title").decode()
    assert f'"peakLabel":"{said}"' in drawn
    assert '"in all at the peak","3.50 GiB"' in drawn
    assert f'"highestBytes":{6 * GiB}' in drawn
    assert '"asides":[[2,4]]' in drawn
    assert said in texts(timeline)
    assert any("faded: tried beside the step and dropped again" in text for text in texts(timeline))
    assert "· tried" in texts(timeline)
    assert trace.as_trace(timeline, "title").decode().count(said) == 1


@pytest.mark.parametrize(
    ("capacity", "said"),
    [(8 * GiB, "fits in 8.00 GiB"), (4 * GiB, "does not fit: 2.00 GiB more than 4.00 GiB")],
)
def test_every_picture_says_whether_the_peak_fits(capacity: int, said: str) -> None:
    drawn = page.as_html(known_peak(), "title", capacity).decode()
    assert f'"on this GPU","it {said}"' in drawn
    image = [text for text in texts(known_peak(), capacity) if said in text]
    assert image
    marks = [text for text in texts(known_peak(), capacity) if text == "4.00 GiB of the GPU"]
    assert len(marks) == (1 if capacity < 6 * GiB else 0)
    assert (f", {said}" in trace.as_trace(known_peak(), "title", capacity).decode()) == (capacity < 6 * GiB)


def test_the_stages_of_a_page_are_numbered_and_named() -> None:
    drawn = page.as_html(with_an_aside(), "title").decode()
    assert (
        '"listedStages":[[1,1,"own","3.00 GiB","3.00 GiB"],[2,2,"· tried","6.00 GiB","6.00 GiB"],'
        '[3,4,"goes on","3.00 GiB","3.50 GiB"]]'
    ) in drawn


def test_a_page_knows_its_stages() -> None:
    timeline = staged(known_peak(), (1, "grows </script>"), (3, None))
    drawn = page.as_html(timeline, "title").decode()
    assert '"stages":[[1,3,"grows \\u003c/script\\u003e"]]' in drawn
    assert '"stages":[]' in page.as_html(known_peak(), "title").decode()
