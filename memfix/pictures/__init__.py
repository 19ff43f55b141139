"""Save a timeline as a picture or as a file for a memory viewer. The suffix of the path chooses the format."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..atomic_write import write_whole
from ..errors import UsageError
from ..meters.timeline import Timeline
from . import figure, page, snapshot, trace

DRAWERS: dict[str, Callable[[Timeline, str, int | None], bytes]] = {
    ".png": figure.as_png,
    ".svg": figure.as_svg,
    ".html": page.as_html,
    ".pickle": snapshot.as_snapshot,
    ".json": trace.as_trace,
}
"""Suffix -> writer: images, an interactive HTML page, files for PyTorch's memory viewer and for ui.perfetto.dev."""


def save(timeline: Timeline, path: str | os.PathLike[str], title: str, capacity_bytes: int | None = None) -> None:
    """Draw ``timeline`` into the file ``path``, in the format that its suffix names.

    With ``capacity_bytes``, the GPU's memory, images and pages say whether the peak fits.
    """
    check_path(path)
    target = Path(path)
    write_whole(target, _drawer(target)(timeline, title, capacity_bytes), "the picture")


def check_path(path: str | os.PathLike[str]) -> None:
    """Refuse a path that :func:`save` would refuse, before minutes are spent on measuring."""
    target = Path(path)
    if _drawer(target) in (figure.as_png, figure.as_svg):
        figure.require_matplotlib()
    if target.is_dir():
        raise UsageError(f"cannot write the picture {target}: it is a folder")
    if not target.resolve().parent.is_dir():
        raise UsageError(f"cannot write the picture {target}: no folder {target.resolve().parent}")


def _drawer(target: Path) -> Callable[[Timeline, str, int | None], bytes]:
    suffix = target.suffix.lower()
    if suffix not in DRAWERS:
        known = ", ".join(DRAWERS)
        said = f"unknown suffix {target.suffix!r}" if suffix else "no suffix"
        raise UsageError(f"cannot draw {target}: {said}; known: {known}")
    return DRAWERS[suffix]
