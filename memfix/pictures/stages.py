"""Draw the stages of an image: a numbered dotted line where each stage begins, and the entries of a list below."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..meters.timeline import Timeline
from ..units import format_bytes
from .bands import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_STAGES = 32
"""The plot has room for this many numbers. If there are more stages, those with the highest peaks are shown."""

ASIDE_MARK, ABOUT_ASIDES = "· ", "tried beside the step and dropped again"
"""The mark of an aside, which is a stage that does not belong to the step, and the meaning of the mark."""

_BADGE_INCHES = 0.23
_DOTTED: dict[str, Any] = {"color": "#7a828e", "linewidth": 0.7, "linestyle": (0, (1, 1.6))}
_BADGE: dict[str, Any] = {"color": "#3a4352", "fontsize": 8, "weight": "bold", "ha": "center", "va": "bottom"}


@dataclass(frozen=True)
class ListedStage:
    number: int
    name: str
    """The name of the stage; it begins with ``ASIDE_MARK`` if the stage does not belong to the step."""
    start: int
    at_end: str
    peak: str


def listed_stages(timeline: Timeline) -> list[ListedStage]:
    live, spans = timeline.live_bytes, timeline.stage_spans()
    highest = [max(live[start - 1 : end]) for start, end, _ in spans]
    shown = sorted(sorted(range(len(spans)), key=lambda n: highest[n], reverse=True)[:MOST_STAGES])
    return [
        ListedStage(number, _named(timeline, name), start, format_bytes(live[end - 1]), format_bytes(highest[index]))
        for number, index in enumerate(shown, start=1)
        for start, end, name in [spans[index]]
    ]


def _named(timeline: Timeline, name: str) -> str:
    return printable(f"{ASIDE_MARK}{name}" if name in timeline.asides else name, 38)


def aside_spans(timeline: Timeline) -> list[tuple[int, int]]:
    """The first event of each aside, and the event at which the next stage begins."""
    named = [(start, name) for start, name in timeline.stages if name is not None] + [(timeline.num_events + 1, "")]
    return [(start, end) for (start, name), (end, _) in itertools.pairwise(named) if name in timeline.asides]


def draw_stage_starts(axes: Axes, stages: Sequence[ListedStage], num_events: int, plot_inches: float) -> None:
    """Draw a dotted line where each stage begins, with its number at the top; numbers are shifted to keep apart."""
    across = axes.get_xaxis_transform()
    inches_per_event = plot_inches / (num_events + 1)
    places = spread([stage.start * inches_per_event for stage in stages], _BADGE_INCHES, plot_inches)
    for stage, inches in zip(stages, places, strict=True):
        x, badge = stage.start - 0.5, inches / inches_per_event - 0.5
        axes.plot([x, x, badge], [0, 0.925, 0.95], **_DOTTED, transform=across, zorder=4)
        axes.text(badge, 0.955, str(stage.number), **_BADGE, transform=across, zorder=6)


def spread(wanted: Sequence[float], gap: float, width: float) -> list[float]:
    """Move the ordered positions ``wanted`` as little as possible, to at least ``gap`` apart and within ``width``."""
    half = gap / 2
    # neighbours that would touch form a group around the mean of their wanted positions; groups that touch are merged
    groups: list[list[int]] = []
    for index in range(len(wanted)):
        groups.append([index])
        while len(groups) > 1 and _left(groups[-1], wanted, gap, width) < _right(groups[-2], wanted, gap, width) + gap:
            last = groups.pop()
            groups[-1] += last
    return [
        min(_left(group, wanted, gap, width) + position * gap, width - half)
        for group in groups
        for position in range(len(group))
    ]


def _left(group: list[int], wanted: Sequence[float], gap: float, width: float) -> float:
    """The position of a group's first member."""
    extent = (len(group) - 1) * gap
    middle = sum(wanted[index] for index in group) / len(group)
    return max(gap / 2, min(middle - extent / 2, width - gap / 2 - extent))


def _right(group: list[int], wanted: Sequence[float], gap: float, width: float) -> float:
    return _left(group, wanted, gap, width) + (len(group) - 1) * gap
