"""Write a timeline as one self-contained, interactive HTML file. The template is ``page.html``."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from ..meters.timeline import Timeline
from ..units import format_bytes, format_room
from .bands import Fold, Origin, Stack, build_stack, fold, largest_first, peak_label, phase_spans, printable, was_alive
from .palette import PEAK_COLOR, band_colors, phase_color
from .stages import ABOUT_ASIDES, ASIDE_MARK, aside_spans, listed_stages

# more columns than a wide screen has pixels, or longer lists than people read, would only make the file larger
_MAX_COLUMNS = 2000
_MAX_BUFFERS = 3000
_MAX_ROWS = 200

# characters that could end the script element, or start another, become JSON escapes
_ESCAPES = str.maketrans({c: f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"})


def as_html(timeline: Timeline, title: str, capacity_bytes: int | None = None) -> bytes:
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    before_title, _, rest = template.partition("{{title}}")
    before_data, _, after_data = rest.partition("{{data}}")
    data = json.dumps(_data(timeline, title, capacity_bytes), separators=(",", ":"), ensure_ascii=False).translate(
        _ESCAPES
    )
    return "".join([before_title, html.escape(printable(title, 200)), before_data, data, after_data]).encode()


def _data(timeline: Timeline, title: str, capacity_bytes: int | None) -> dict[str, Any]:
    """The data for the page's script. Long sequences are lists rather than objects, to keep the file small."""
    stack = build_stack(timeline, max_columns=_MAX_COLUMNS)
    origins = _Origins(stack)
    drawn = [buffer for buffer in timeline.buffers if was_alive(buffer)]
    largest = sorted(drawn, key=lambda b: b.bytes, reverse=True)[:_MAX_BUFFERS]
    return {
        "title": printable(title, 200),
        "facts": _facts(timeline, capacity_bytes),
        "peakLabel": peak_label(timeline, capacity_bytes) if timeline.buffers else "",
        "peakEvent": timeline.peak_event,
        "peakBytes": timeline.live_bytes[timeline.peak_event],
        "highestBytes": timeline.highest_bytes,
        "capacityBytes": capacity_bytes,
        "peakColor": PEAK_COLOR,
        "numEvents": timeline.num_events,
        "phases": [[start, end, printable(name, 40), phase_color(name)] for start, end, name in phase_spans(timeline)],
        "stages": [[start, end, printable(name, 60)] for start, end, name in timeline.stage_spans()],
        "listedStages": [[s.number, s.start, s.name, s.at_end, s.peak] for s in listed_stages(timeline)],
        "asides": aside_spans(timeline),
        "aboutAsides": f"{ASIDE_MARK}{ABOUT_ASIDES}" if timeline.asides else "",
        "starts": stack.starts,
        "events": stack.events,
        "live": stack.live,
        "bands": _bands(stack, origins),
        "buffers": [[origins.number(Origin.of(b)), b.bytes, b.born, b.died] for b in largest],
        "allListed": len(largest) == len(drawn),
        "rows": _rows(timeline, origins),
        "origins": origins.described,
    }


class _Origins:
    """Numbers origins in order of use, so that the page's data describes each origin once."""

    def __init__(self, stack: Stack) -> None:
        self.described: list[tuple[str, str, str, str, int]] = []
        self._numbers: dict[Origin, int] = {}
        self._band_of = {band.origin: number for number, band in enumerate(stack.bands) if band.origin}
        self._last_band = len(stack.bands) - 1

    def number(self, origin: Origin) -> int:
        if origin not in self._numbers:
            self._numbers[origin] = len(self.described)
            band = 0 if origin.existed_before else self._band_of.get(origin, self._last_band)
            self.described.append((origin.label, origin.place, origin.function, origin.code, band))
        return self._numbers[origin]


def _facts(timeline: Timeline, capacity_bytes: int | None) -> list[tuple[str, str]]:
    """The figures at the head of the page."""
    if not timeline.buffers:
        return [("buffers", "none")]
    peak, end = timeline.live_bytes[timeline.peak_event], timeline.live_bytes[-1]
    phase = next((name for start, after, name in phase_spans(timeline) if start <= timeline.peak_event < after), "")
    return [
        ("peak above what existed before", format_bytes(peak - timeline.base_bytes)),
        ("existed before", format_bytes(timeline.base_bytes)),
        ("in all at the peak", format_bytes(peak)),
        *([] if capacity_bytes is None else [("on this GPU", f"it {format_room(peak, capacity_bytes)}")]),
        ("in all at the end", format_bytes(end)),
        ("the peak is in", printable(phase, 40) or "-"),
        ("buffers", f"{len(timeline.buffers):,}"),
    ]


def _bands(stack: Stack, origins: _Origins) -> list[dict[str, Any]]:
    colors = band_colors(stack)
    rank = {band: number for number, band in enumerate(largest_first(stack.bands))}
    return [
        {
            "label": printable(band.label, 60),
            "place": band.origin.place if band.origin else "",
            "origin": origins.number(band.origin) if band.origin else None,
            "color": colors[band],
            "rank": rank[band],
            "values": band.values,
        }
        for band in stack.bands
    ]


def _rows(timeline: Timeline, origins: _Origins) -> list[dict[str, Any]]:
    """The allocations alive at the peak, largest first; the smallest share the last row."""
    folds = fold(timeline.alive_at(timeline.peak_event))
    rows = [{"origin": origins.number(f.origin), "bytes": f.bytes, "times": f.times} for f in folds[:_MAX_ROWS]]
    return rows + ([_last_row(folds[_MAX_ROWS:])] if len(folds) > _MAX_ROWS else [])


def _last_row(folds: list[Fold]) -> dict[str, Any]:
    count = sum(f.count for f in folds)
    return {"origin": None, "bytes": sum(f.bytes for f in folds), "times": f"{count:,} smaller buffers"}
