"""Reduce a timeline to what a picture can show: a few columns of time, a few bands of bytes, folded lists."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..meters.timeline import Buffer, Line, Timeline
from ..units import format_bytes, format_room

EXISTED_BEFORE = "existed before"
OTHER_ORIGINS = "the rest"
MAX_BANDS = 8

# a band below this share of the highest point would be thinner than a line
_LEAST_VISIBLE_SHARE = 0.004


@dataclass(frozen=True, slots=True)
class Origin:
    """The operator and source line that made buffers. Buffers of one origin form one band and one row."""

    what: str
    line: Line | None
    existed_before: bool = False

    @classmethod
    def of(cls, buffer: Buffer) -> Origin:
        return cls(buffer.what, buffer.line, buffer.born == 0)

    @property
    def label(self) -> str:
        """The operator's name, and a remark if the buffers existed before the step."""
        age = f", {EXISTED_BEFORE}" if self.existed_before and self.what != EXISTED_BEFORE else ""
        return printable(self.what, 120) + age

    @property
    def place(self) -> str:
        return printable(self.line.place, 200) if self.line else ""

    @property
    def code(self) -> str:
        return printable(self.line.text, 200) if self.line else ""

    @property
    def function(self) -> str:
        return printable(self.line.function, 100) if self.line else ""


@dataclass(frozen=True, slots=True)
class Fold:
    """Buffers of one origin, folded into one row."""

    origin: Origin
    bytes: int
    count: int
    each_bytes: int | None
    """None if their sizes differ."""

    @property
    def times(self) -> str:
        """``32 x 1.16 GiB``; empty for a single buffer."""
        if self.count == 1:
            return ""
        return f"{self.count:,} x {format_bytes(self.each_bytes)}" if self.each_bytes else f"{self.count:,} buffers"


@dataclass(frozen=True, slots=True)
class Band:
    """One layer of the stacked area."""

    label: str
    origin: Origin | None
    """None for the bands ``existed before`` and ``the rest``, which have many origins."""
    at_peak: Fold | None
    """None if no buffer of the band is alive at the peak."""
    max_bytes: int
    values: tuple[int, ...]
    """Bytes in each column."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A timeline as columns and bands, the lowest band first. The bands of a column add up to its live bytes.

    The band ``existed before`` is lowest and ``the rest`` is highest. Between them, bands that come and go lie above
    bands that only grow, and older bands lie lower, so that the layers move as little as possible.
    """

    starts: tuple[int, ...]
    """The first event of each column; a column ends where the next one starts."""
    events: tuple[int, ...]
    """The event that each column shows: the one with the most live bytes, so that no peak is lost."""
    live: tuple[int, ...]
    bands: tuple[Band, ...]


def build_stack(timeline: Timeline, *, max_columns: int, max_bands: int = MAX_BANDS) -> Stack:
    starts, events = choose_columns(timeline.live_bytes, max_columns)
    by_origin = _by_origin(timeline.buffers)
    before = [b for origin, buffers in by_origin.items() if origin.existed_before for b in buffers]
    in_step = {origin: buffers for origin, buffers in by_origin.items() if not origin.existed_before}
    chosen = _choose_origins(timeline, in_step, max_bands)
    others = [b for origin, buffers in in_step.items() if origin not in chosen for b in buffers]
    bands = [_band(timeline, events, EXISTED_BEFORE, None, before)] if before else []
    bands += [_band(timeline, events, origin.what, origin, in_step[origin]) for origin in chosen]
    bands += [_band(timeline, events, OTHER_ORIGINS, None, others)] if others else []
    return Stack(starts, events, tuple(timeline.live_bytes[event] for event in events), tuple(bands))


def largest_first(bands: Iterable[Band]) -> list[Band]:
    """Sort bands by their bytes at the peak; bands with many origins come last."""
    return sorted(bands, key=lambda b: (b.origin is not None, b.at_peak.bytes if b.at_peak else 0), reverse=True)


def choose_columns(live_bytes: Sequence[int], most: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cut the events into at most ``most`` columns of equal width. Return the first and the highest event of each."""
    count = min(most, len(live_bytes))
    edges = [index * len(live_bytes) // count for index in range(count + 1)]
    highest = (max(range(start, end), key=live_bytes.__getitem__) for start, end in itertools.pairwise(edges))
    return tuple(edges[:-1]), tuple(highest)


def fold(buffers: Iterable[Buffer]) -> list[Fold]:
    """Fold buffers by origin, the largest sum first."""
    folds = [_fold_of(origin, members) for origin, members in _by_origin(buffers).items()]
    return sorted(folds, key=lambda f: f.bytes, reverse=True)


def was_alive(buffer: Buffer) -> bool:
    """Whether a buffer can be drawn: it has bytes and did not die at the event of its birth."""
    return buffer.bytes > 0 and (buffer.died is None or buffer.died > buffer.born)


def peak_label(timeline: Timeline, capacity_bytes: int | None = None) -> str:
    """The peak in words; with ``capacity_bytes``, they say so if the peak does not fit."""
    total = timeline.live_bytes[timeline.peak_event]
    base = f" above {format_bytes(timeline.base_bytes)} that existed before" if timeline.base_bytes else ""
    room = ""
    if capacity_bytes is not None and total > capacity_bytes:
        room = f", {format_room(total, capacity_bytes)}"
    return f"peak {format_bytes(total - timeline.base_bytes)}{base}{room}"


def phase_spans(timeline: Timeline) -> list[tuple[int, int, str]]:
    """The spans of phases that have events."""
    return [(start, end, name) for start, end, name in timeline.phase_spans() if end > start]


def printable(text: str, most: int) -> str:
    """``text`` on one line, shortened at its end, without control characters, which XML forbids."""
    clean = "".join(c if c.isprintable() else " " for c in text[: most + 1])
    return clean if len(clean) <= most else clean[: most - 1] + "…"


def printable_end(text: str, most: int) -> str:
    """Like :func:`printable`, but shortened at its start, because the end of a path matters."""
    clean = printable(text[-most - 1 :], most + 1)
    return clean if len(clean) <= most else "…" + clean[1 - most :]


def _by_origin(buffers: Iterable[Buffer]) -> dict[Origin, list[Buffer]]:
    groups: defaultdict[Origin, list[Buffer]] = defaultdict(list)
    for buffer in buffers:
        if was_alive(buffer):
            groups[Origin.of(buffer)].append(buffer)
    return dict(groups)


def _choose_origins(timeline: Timeline, buffers_of: dict[Origin, list[Buffer]], most: int) -> list[Origin]:
    """Choose the origins that get a band, lowest first: the largest at the peak, and some that are large elsewhere."""
    visible = timeline.live_bytes[timeline.peak_event] * _LEAST_VISIBLE_SHARE
    at_peak: defaultdict[Origin, int] = defaultdict(int)
    for buffer in timeline.alive_at(timeline.peak_event):
        at_peak[Origin.of(buffer)] += buffer.bytes
    highest = {origin: _highest(buffers) for origin, buffers in buffers_of.items()}
    large = sorted((o for o in buffers_of if highest[o] >= visible), key=highest.__getitem__, reverse=True)
    peaking = sorted((o for o in large if at_peak[o] >= visible), key=at_peak.__getitem__, reverse=True)
    chosen = peaking[: most * 3 // 4]
    chosen += [origin for origin in large if origin not in chosen][: most - len(chosen)]
    turnover = {origin: sum(b.bytes for b in buffers_of[origin]) / highest[origin] for origin in chosen}
    return sorted(chosen, key=lambda origin: (turnover[origin], buffers_of[origin][0].born))


def _highest(buffers: Iterable[Buffer]) -> int:
    """The highest sum of live bytes of the buffers."""
    changes = [(b.born, b.bytes) for b in buffers] + [(b.died, -b.bytes) for b in buffers if b.died is not None]
    # negative changes sort first: within an event, deaths come before births
    return max(itertools.accumulate(change for _, change in sorted(changes)), default=0)


def _band(
    timeline: Timeline, events: Sequence[int], label: str, origin: Origin | None, buffers: Sequence[Buffer]
) -> Band:
    changes = [0] * (timeline.num_events + 1)
    for buffer in buffers:
        changes[buffer.born] += buffer.bytes
        if buffer.died is not None:
            changes[buffer.died] -= buffer.bytes
    curve = list(itertools.accumulate(changes))
    peak = timeline.peak_event
    alive = [b for b in buffers if b.born <= peak and (b.died is None or b.died > peak)]
    at_peak = _fold_of(origin or Origin(label, None), alive) if alive else None
    return Band(label, origin, at_peak, max(curve), tuple(curve[event] for event in events))


def _fold_of(origin: Origin, buffers: Sequence[Buffer]) -> Fold:
    sizes = {buffer.bytes for buffer in buffers}
    return Fold(origin, sum(b.bytes for b in buffers), len(buffers), sizes.pop() if len(sizes) == 1 else None)
