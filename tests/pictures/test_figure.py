"""The image: its marks, its labels, and that source text stays text."""

from __future__ import annotations

import itertools
import re
import warnings
from pathlib import Path
from xml.etree import ElementTree

import pytest
from timelines import GiB, MiB, empty, gpt_step, hostile, known_peak, many_events

from memfix.meters.timeline import Line, Timeline
from memfix.pictures import figure

pytest.importorskip("matplotlib", reason="a .png or .svg needs matplotlib")


def texts(timeline: Timeline, title: str = "title") -> list[str]:
    root = ElementTree.fromstring(figure.as_svg(timeline, title))
    return ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]


def test_the_svg_says_the_peak_the_phases_and_where_the_bytes_come_from(tmp_path: Path) -> None:
    said = texts(gpt_step(tmp_path), "one step")
    assert {"one step", "forward", "backward", "optimizer", "existed before", "the rest"} <= set(said)
    assert "peak 39.93 GiB above 1.99 GiB that existed before" in said
    assert {"18.55 GiB", "16 x 1.16 GiB", "_log_softmax", "gpt_train.py:12"} <= set(said)
    assert "a_BTF = torch.nn.functional.gelu(h_BTF)" in said


def test_the_peak_is_marked_where_it_is() -> None:
    drawn = figure.draw(known_peak(), "title")
    dot = drawn.axes[0].lines[-1]
    assert (dot.get_xdata()[0], dot.get_ydata()[0]) == (2, 6 * GiB)


def test_an_empty_timeline_says_so() -> None:
    assert "no buffers" in texts(empty())


def test_hostile_text_is_drawn_as_it_is_written() -> None:
    said = texts(hostile(), "<b>$x_1$</b>")
    assert "<b>$x_1$</b>" in said
    assert "a $\\frac{1}$ b & c" in said


def test_a_script_that_the_font_lacks_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.as_png(known_peak(), "内存 峰值")


@pytest.mark.parametrize(
    ("highest", "last", "count"),
    [
        (0, "0", 1),
        (3, "3 B", 4),
        (1000, "896 B", 8),
        (6 * GiB, "6 GiB", 7),
        (44 * GiB, "40 GiB", 6),
        (1536 * MiB, "1.5 GiB", 7),
    ],
)
def test_byte_marks_are_at_multiples_of_a_power_of_two(highest: int, last: str, count: int) -> None:
    ticks, labels = figure.byte_ticks(highest)
    assert labels[-1] == last
    assert len(labels) == count <= 9
    assert len({b - a for a, b in itertools.pairwise(ticks)}) <= 1


def test_no_text_lies_on_another_or_outside(tmp_path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for timeline in (gpt_step(tmp_path), many_events(2000), known_peak(), hostile(), crowded_phases()):
        drawn = figure.draw(timeline, "t" * 200)
        renderer = FigureCanvasAgg(drawn).get_renderer()
        axes = drawn.axes[0]
        drawn.draw(renderer)
        written = [text for text in (*drawn.texts, *axes.texts, *axes.get_yticklabels()) if text.get_text()]
        boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in written]
        for name, box in boxes:
            assert box.x0 >= 0, name
            assert box.x1 <= drawn.bbox.width, name
        for (name, box), (other_name, other) in itertools.combinations(boxes, 2):
            assert not box.overlaps(other), f"{name!r} on {other_name!r}"


def crowded_phases() -> Timeline:
    """Gradient accumulation: many short phases, one of a single event, and a long place."""
    phases = tuple((50 * i, ("forward", "backward")[i % 2]) for i in range(40))
    base = known_peak()
    line = Line("/" + "very_long_folder/" * 9 + "file.py", 1234, "f")
    buffers = tuple(
        type(b)(b.bytes, "a_very_long_operator_name_" * 3, line, b.phase, b.born, b.died) for b in base.buffers
    )
    return Timeline(buffers, 2000, (*phases, (2000, "optimizer")))


def test_the_svg_asks_for_no_other_file() -> None:
    svg = figure.as_svg(known_peak(), "title").decode()
    assert not re.search(r"(href|src)=\"(?!#)", svg.replace("xmlns:xlink", ""))
