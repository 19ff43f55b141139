"""Time against memory as a picture."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from ci_script import FOLDER

from memfix.units import GiB

sys.path.append(str(FOLDER))
from manual.frontier import Curve, Point, frontier_svg

SVG = "{http://www.w3.org/2000/svg}"
OURS = Curve("ours", (Point(GiB, 1.5, "512"), Point(2 * GiB, 1.1, "2048"), Point(4 * GiB, 1.05, "8192")))
THEIRS = Curve("theirs <1.0>", (Point(GiB // 2, 2.0, "as it is"),))


def drawn(*curves: Curve) -> ElementTree.Element:
    return ElementTree.fromstring(frontier_svg("Time & memory", curves, floor="the products"))


def test_more_memory_is_further_right_and_more_time_further_up() -> None:
    places = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in drawn(OURS).iter(f"{SVG}circle")]
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    assert [y for _, y in places] == sorted(y for _, y in places), "in a picture y grows downwards"


def test_every_setting_is_a_dot_and_several_are_a_line() -> None:
    picture = drawn(OURS, THEIRS)
    assert len([*picture.iter(f"{SVG}circle")]) == 4
    assert len([*picture.iter(f"{SVG}polyline")]) == 1
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert {"512", "2048", "8192", "as it is", "ours", "theirs <1.0>", "Time & memory"} <= {*texts}


def test_dots_lie_inside_the_axes_which_begin_at_nothing_and_at_the_floor() -> None:
    text = frontier_svg("t", [OURS, THEIRS], floor="f")
    assert re.search(r">0(\.0+)?</text>", text)
    assert re.search(r">1(\.0+)?x</text>", text)
    for circle in ElementTree.fromstring(text).iter(f"{SVG}circle"):
        assert 62 <= float(circle.attrib["cx"]) <= 860 - 24
        assert 52 <= float(circle.attrib["cy"]) <= 470 - 86


def test_one_setting_at_the_floor_is_drawn_too() -> None:
    assert len([*drawn(Curve("ours", (Point(GiB, 1.0),))).iter(f"{SVG}circle")]) == 1


def test_labels_of_two_curves_that_meet_do_not() -> None:
    same = [Curve(name, (Point(GiB, 1.5, name),)) for name in ("ours", "theirs")]
    labels = [text for text in drawn(*same).iter(f"{SVG}text") if text.attrib.get("font-size") == "11"]
    above, below = (float(text.attrib["y"]) for text in labels)
    assert below - above > 20


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="a picture of time against memory needs a point"):
        frontier_svg("t", [Curve("ours", ())], floor="f")
