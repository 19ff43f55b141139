"""Which file is written, and what is said when it cannot be."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from timelines import empty, hostile, known_peak, many_events, single_event

from memfix.errors import UsageError
from memfix.meters.timeline import Timeline
from memfix.pictures import DRAWERS, check_path, save

FIRST_BYTES = {".png": b"\x89PNG", ".svg": b"<?xml", ".html": b"<!doctype html>", ".pickle": b"\x80\x04", ".json": b"{"}


def needs_matplotlib(suffix: str) -> None:
    if suffix in (".png", ".svg"):
        pytest.importorskip("matplotlib")


@pytest.mark.parametrize(
    "timeline", [empty(), single_event(), known_peak(), hostile()], ids=["empty", "single", "known", "hostile"]
)
@pytest.mark.parametrize("suffix", DRAWERS)
def test_every_suffix_draws_every_timeline(tmp_path: Path, suffix: str, timeline: Timeline) -> None:
    needs_matplotlib(suffix)
    save(timeline, tmp_path / f"picture{suffix}", "title")
    assert (tmp_path / f"picture{suffix}").read_bytes().startswith(FIRST_BYTES[suffix])
    assert [path.name for path in tmp_path.iterdir()] == [f"picture{suffix}"], "no temporary file stays"


@pytest.mark.parametrize("suffix", DRAWERS)
def test_the_same_timeline_gives_the_same_file(tmp_path: Path, suffix: str) -> None:
    needs_matplotlib(suffix)
    for name in ("a", "b"):
        save(known_peak(), tmp_path / f"{name}{suffix}", "title")
    assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


def test_the_suffix_may_be_upper_case(tmp_path: Path) -> None:
    save(known_peak(), str(tmp_path / "P.HTML"), "title")
    assert (tmp_path / "P.HTML").exists()


@pytest.mark.parametrize(
    "refuse", [lambda path: save(known_peak(), path, "title"), check_path], ids=["save", "check_path"]
)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.gif", r"cannot draw .*a\.gif: unknown suffix '\.gif'; known: \.png, \.svg, \.html, \.pickle, \.json"),
        ("a", r"cannot draw .*a: no suffix; known: \.png"),
        ("nowhere/a.html", r"cannot write the picture .*a\.html: (No such file or directory|no folder .*nowhere)"),
        ("folder.html", r"cannot write the picture .*folder\.html: (Is a directory|it is a folder)"),
    ],
)
def test_a_path_that_cannot_be_drawn_is_refused(tmp_path: Path, refuse, name: str, message: str) -> None:
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(UsageError, match=message):
        refuse(tmp_path / name)
    assert os.listdir(tmp_path) == ["folder.html"]


def test_a_failure_leaves_the_old_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.html"
    target.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UsageError, match=r"a\.html: No space left on device"):
        save(known_peak(), target, "title")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.html"]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for refuse in (check_path, lambda path: save(known_peak(), path, "title")):
        with pytest.raises(UsageError, match=r"pip install memfix\[pictures\]"):
            refuse(tmp_path / f"a{suffix}")


def test_drawing_a_page_imports_neither_torch_nor_matplotlib(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        check="""
        import sys
        from memfix.meters.timeline import Timeline
        from memfix.pictures import save
        for suffix in ("html", "json", "pickle"):
            save(Timeline((), 0, ()), f"a.{suffix}", "title")
        print({"torch", "matplotlib"} & sys.modules.keys())
        """
    )
    assert pytester.run(sys.executable, "check.py").stdout.str().strip() == "set()"


@pytest.fixture(scope="module")
def long_timeline() -> Timeline:
    return many_events(100_000)


@pytest.mark.parametrize(("suffix", "most"), [(".svg", 2_000_000), (".html", 5_000_000), (".png", 2_000_000)])
def test_a_hundred_thousand_events_make_a_small_file(
    tmp_path: Path, long_timeline: Timeline, suffix: str, most: int
) -> None:
    needs_matplotlib(suffix)
    assert long_timeline.num_events == 100_000
    save(long_timeline, tmp_path / f"long{suffix}", "long")
    assert (tmp_path / f"long{suffix}").stat().st_size < most
