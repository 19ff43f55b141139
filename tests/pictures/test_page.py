"""The page: what is in the file, and what a browser makes of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from timelines import GiB, empty, gpt_step, hostile, known_peak, many_events, single_event

from memfix.meters.timeline import Buffer, Line, Timeline
from memfix.pictures import save
from memfix.pictures.page import as_html

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH to open the page in")


class Elements(HTMLParser):
    """Every tag, and the text of the data script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][1].get("id") == "data":
            self.data += data


def page_data(timeline: Timeline, title: str = "title") -> dict[str, Any]:
    return json.loads(Elements(as_html(timeline, title).decode()).data)


def render(path: Path, folder: Path, fragment: str = "") -> str:
    """The document as a browser has it once its script has run."""
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000",
        "--window-size=1300,1000", f"--user-data-dir={folder / 'browser'}", "--dump-dom", f"{path.as_uri()}#{fragment}",
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout


def text_of(markup: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", markup))


def test_the_page_tells_the_peak_and_what_is_alive_there() -> None:
    data = page_data(known_peak())
    assert data["peakLabel"] == "peak 5.00 GiB above 1.00 GiB that existed before"
    assert (data["peakEvent"], data["peakBytes"]) == (2, 6 * GiB)
    listed = [(data["origins"][row["origin"]][:2], row["bytes"]) for row in data["rows"]]
    assert listed == [
        (["log_softmax", "loss.py:42"], 3 * GiB),
        (["mm", "loss.py:41"], 2 * GiB),
        (["existed before", ""], GiB),
    ]


def test_buffers_of_one_line_are_one_row(tmp_path: Path) -> None:
    assert page_data(gpt_step(tmp_path))["rows"][0]["times"] == "16 x 1.16 GiB"


def test_every_row_points_at_its_band(tmp_path: Path) -> None:
    data = page_data(gpt_step(tmp_path))
    bands = {row["origin"]: data["bands"][data["origins"][row["origin"]][4]]["label"] for row in data["rows"]}
    named = {data["origins"][origin][0]: band for origin, band in bands.items()}
    assert named["_log_softmax"] == "_log_softmax"
    assert named["new_zeros"] == "the rest"
    assert named["existed before"] == "existed before"


def test_a_long_timeline_keeps_its_peak_and_lists_its_largest_buffers() -> None:
    timeline = many_events(20_000)
    data = page_data(timeline)
    assert len(data["events"]) == 2000
    assert timeline.peak_event in data["events"]
    assert not data["allListed"]
    assert data["buffers"][0][1] == max(buffer.bytes for buffer in timeline.buffers)


def test_many_small_origins_are_one_last_row() -> None:
    buffers = tuple(Buffer(i + 1, f"op_{i}", None, "forward", i + 1, None) for i in range(300))
    rows = page_data(Timeline(buffers, 300, ((0, "forward"),)))["rows"]
    assert len(rows) == 201
    assert rows[-1] == {"origin": None, "bytes": sum(range(1, 101)), "times": "100 smaller buffers"}


def test_endless_source_lines_are_cut(tmp_path: Path) -> None:
    file = tmp_path / "minified.py"
    file.write_text("x = '" + "y" * 1_000_000 + "'\n")
    timeline = Timeline((Buffer(1, "w" * 99_999, Line(str(file), 1, "f"), "forward", 1, None),), 1, ((0, "forward"),))
    assert len(as_html(timeline, "t" * 99_999)) < 100_000


def test_nothing_in_the_file_can_end_the_script_or_start_an_element() -> None:
    title = "</title><script>alert(1)</script>"
    page = as_html(hostile(), title).decode()
    elements = Elements(page)
    assert [tag for tag, _ in elements.tags].count("script") == 2
    assert not any(tag in ("img", "b") and "onerror" in attributes for tag, attributes in elements.tags)
    assert json.loads(elements.data)["title"] == title
    assert not set("<>&\u2028") & set(elements.data)


def test_the_page_asks_for_nothing_from_outside() -> None:
    page = as_html(known_peak(), "title").decode()
    assert "default-src 'none'" in page
    assert not any({"src", "href"} & attributes.keys() for _, attributes in Elements(page).tags)
    assert set(re.findall(r"https?://[^\s\"']+", page)) == {"http://www.w3.org/2000/svg"}


@needs_browser
def test_a_browser_draws_the_bands_and_tells_what_is_alive_under_the_pointer(tmp_path: Path) -> None:
    save(gpt_step(tmp_path), tmp_path / "gpt.html", "one step")
    page = render(tmp_path / "gpt.html", tmp_path, "event=190&row=2")
    assert page.count('class="band') == 10
    assert page.count('class="band chosen"') == 1
    assert re.search(r'<tr [^>]*aria-pressed="true"', page)
    said = text_of(page)
    assert "event 190, backward" in said
    assert "18.55 GiB _log_softmax 16 x 1.16 GiB gpt_train.py:12 total = total + F.cross_entropy" in said
    assert "3.38 GiB everything else" in said
    assert "peak 39.93 GiB above 1.99 GiB that existed before" in said


@needs_browser
def test_a_browser_shows_hostile_text_as_text(tmp_path: Path) -> None:
    save(hostile(), tmp_path / "hostile.html", "<b>bold</b>")
    page = render(tmp_path / "hostile.html", tmp_path, "event=1")
    assert "<title>&lt;b&gt;bold&lt;/b&gt;</title>" in page, "the script in a name did not run"
    assert page.count("<script") == 2
    assert "<img" not in page
    assert "&lt;/script&gt;&lt;script&gt;document.title='broken'&lt;/script&gt;" in page


@needs_browser
@pytest.mark.parametrize("make", [empty, single_event, lambda: many_events(100_000)], ids=["empty", "single", "many"])
def test_a_browser_draws_every_length_to_its_end(tmp_path: Path, make) -> None:
    timeline = make()
    save(timeline, tmp_path / "a.html", "title")
    page = render(tmp_path / "a.html", tmp_path, "event=99999999")
    assert re.search(r'<div class="tip" id="tip"(?! hidden)', page), "the last column is pointed at"
    assert "NaN" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


@needs_browser
def test_of_many_buffers_a_band_is_told_exactly_under_the_pointer(tmp_path: Path) -> None:
    timeline = many_events(20_000)
    save(timeline, tmp_path / "many.html", "title")
    data = page_data(timeline)
    said = text_of(render(tmp_path / "many.html", tmp_path, f"event={timeline.peak_event}").split('id="tip"')[1])
    column = data["events"].index(timeline.peak_event)
    exact = next(band["values"][column] for band in data["bands"] if band["label"] == "op_0")
    assert f"{exact / GiB:.2f} GiB op_0" in said
