"""A step's buffers over time: the peak, what was alive at it, and how a row of it reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memfix.meters.base import Reading
from memfix.meters.timeline import Allocation, Buffer, Line, Timeline
from memfix.units import GiB, KiB, MiB

LOSS = Line("/elsewhere/loss.py", 41, "chunked_loss")
OTHER = Line("/elsewhere/loss.py", 42, "chunked_loss")


def buffer(size: int, born: int, died: int | None = None, what: str = "mm", line: Line | None = LOSS) -> Buffer:
    return Buffer(size, what, line, "forward", born, died)


def forward(*buffers: Buffer, events: int) -> Timeline:
    return Timeline(buffers, events, ((0, "forward"),))


# ---------------------------------------------------------------- a line
def test_a_line_below_the_working_folder_is_placed_by_its_path_from_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Line(str(tmp_path / "model" / "loss.py"), 41, "loss").place == "model/loss.py:41"


def test_a_line_elsewhere_is_placed_by_its_files_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert Line(str(tmp_path / "there" / "loss.py"), 41, "loss").place == "loss.py:41"


def test_a_line_reads_with_its_function_and_its_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loss.py").write_text("def loss():\n    x = logits.float()\n" + "    y = " + "z + " * 30 + "0\n")
    assert str(Line(str(tmp_path / "loss.py"), 2, "loss")) == "loss.py:2 in loss   x = logits.float()"
    assert str(Line(str(tmp_path / "loss.py"), 3, "loss")) == "loss.py:3 in loss   " + ("y = " + "z + " * 30)[:70]


def test_a_line_whose_file_is_gone_reads_without_code() -> None:
    assert LOSS.text == ""
    assert str(LOSS) == "loss.py:41 in chunked_loss"


# ---------------------------------------------------------------- the peak
def test_live_bytes_are_those_after_each_event() -> None:
    timeline = forward(buffer(1000, 0), buffer(50, 1, 3), buffer(8, 2), events=3)
    assert timeline.live_bytes == (1000, 1050, 1058, 1008)
    assert (timeline.base_bytes, timeline.peak_event) == (1000, 2)


def test_a_buffer_is_alive_from_its_birth_until_before_its_death() -> None:
    timeline = forward(buffer(1, 1, 3), buffer(2, 2), events=3)
    assert [[b.bytes for b in timeline.alive_at(event)] for event in range(4)] == [[], [1], [1, 2], [2]]


def test_the_first_of_two_equal_peaks_is_the_peak() -> None:
    assert forward(buffer(9, 1, 2), buffer(9, 3, 4), events=4).peak_event == 1


def test_a_step_that_makes_nothing_has_no_rows() -> None:
    timeline = forward(buffer(7, 0), events=0)
    assert (timeline.live_bytes, timeline.peak_event, timeline.at_peak()) == ((7,), 0, ())


def test_rows_are_those_made_by_the_step_largest_first() -> None:
    timeline = forward(
        buffer(1000, 0, what="existed before"), buffer(1, 1, what="exp"), buffer(5, 2, what="mm"), events=2
    )
    assert [(row.bytes, row.what) for row in timeline.at_peak()] == [(5, "mm"), (1, "exp")]


def test_one_line_and_maker_is_one_row() -> None:
    buffers = [buffer(GiB, event + 1) for event in range(32)]
    (row,) = forward(*buffers, events=32).at_peak()
    assert row == Allocation(32 * GiB, "mm", "loss.py:41 in chunked_loss", "", 32)


def test_another_line_or_another_maker_is_another_row() -> None:
    timeline = forward(buffer(3, 1), buffer(2, 2, line=OTHER), buffer(1, 3, what="exp"), buffer(1, 4), events=4)
    assert [(row.bytes, row.what, row.place, row.count) for row in timeline.at_peak()] == [
        (4, "mm", "loss.py:41 in chunked_loss", 2),
        (2, "mm", "loss.py:42 in chunked_loss", 1),
        (1, "exp", "loss.py:41 in chunked_loss", 1),
    ]


def test_a_buffer_without_a_line_has_no_place() -> None:
    (row,) = forward(buffer(3, 1, line=None), events=1).at_peak()
    assert (row.place, row.code, str(row)) == ("", "", "         3 B  mm")


def test_what_the_forward_made_is_kept_for_backward_when_the_peak_is_there() -> None:
    buffers = (buffer(8, 1), Buffer(8, "mm", LOSS, "backward", 2, None))
    timeline = Timeline(buffers, 2, ((0, "forward"), (2, "backward")))
    assert [row.what for row in timeline.at_peak()] == ["mm", "mm, kept for backward"]


def test_what_the_forward_made_is_not_kept_for_backward_when_the_peak_is_before_it() -> None:
    buffers = (buffer(8, 1), buffer(8, 2, 3), Buffer(4, "mm", LOSS, "backward", 4, None))
    timeline = Timeline(buffers, 4, ((0, "forward"), (4, "backward")))
    assert [(row.what, row.count) for row in timeline.at_peak()] == [("mm", 2)]


def test_what_the_forward_made_and_the_optimizer_finds_is_not_called_kept_for_backward() -> None:
    buffers = (buffer(8, 1), Buffer(9, "_foreach_sqrt", LOSS, "optimizer", 3, None))
    timeline = Timeline(buffers, 3, ((0, "forward"), (2, "backward"), (3, "optimizer")))
    assert [row.what for row in timeline.at_peak()] == ["_foreach_sqrt", "mm"]


# ---------------------------------------------------------------- a row
@pytest.mark.parametrize(
    ("row", "text"),
    [
        (
            Allocation(512 * MiB, "mm", "loss.py:41 in f", "a @ b"),
            "  512.00 MiB  mm   loss.py:41 in f   a @ b",
        ),
        (
            Allocation(32 * 1188 * MiB, "mm", "loss.py:41 in f", "a @ b", 32),
            "   37.12 GiB  mm   loss.py:41 in f   a @ b   (32 x 1.16 GiB)",
        ),
        (Allocation(2 * KiB, "mm", "loss.py:41 in f", "x" * 80), f"    2.00 KiB  mm   loss.py:41 in f   {'x' * 70}"),
    ],
    ids=["one", "folded", "long"],
)
def test_a_row_reads_as_bytes_maker_place_and_code(row: Allocation, text: str) -> None:
    assert str(row) == text


# ---------------------------------------------------------------- a reading in JSON
READING = Reading(
    "simulated", "H200", 12, 3, 4, 5, 512, notes=("an operator is unknown",), exact=False,
    alive_at_peak=(Allocation(12, "mm", "loss.py:41 in f", "a @ b", 3),),
    timeline=forward(buffer(12, 1), events=1),
)  # fmt: skip


def test_a_reading_comes_back_from_json_without_its_timeline() -> None:
    back = Reading.from_dict(json.loads(json.dumps(READING.as_dict())))
    assert back == READING
    assert back.timeline is None
    assert READING.timeline is not None


def test_the_timeline_does_not_tell_readings_apart_and_is_not_printed() -> None:
    assert Reading.from_dict(READING.as_dict()) == READING
    assert "timeline" not in repr(READING)


def test_before_an_event_nothing_later_has_happened() -> None:
    early = Buffer(4, "mm", None, "forward", born=1, died=4)
    late = Buffer(8, "add", None, "forward", born=3, died=None)
    whole = Timeline((early, late), 4, ((0, "forward"), (3, "backward")), ((3, "held"),))
    cut = whole.before(3)
    assert cut.live_bytes == whole.live_bytes[:3] == (0, 4, 4)
    assert cut.buffers == (Buffer(4, "mm", None, "forward", born=1, died=None),)
    assert (cut.phases, cut.stages) == (((0, "forward"),), ())
    assert whole.with_sizes(lambda size: 512).live_bytes == (0, 512, 512, 1024, 512)
