"""The parts of a step that it names itself, in an image: a numbered mark where each begins, and a list below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..meters.timeline import Timeline
from ..units import format_bytes
from .bands import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_PARTS = 32
"""More have no room over the plot; those that reach highest are shown."""

_BADGE_INCHES = 0.23
_DOTTED: dict[str, Any] = {"color": "#7a828e", "linewidth": 0.7, "linestyle": (0, (1, 1.6))}
_BADGE: dict[str, Any] = {"color": "#3a4352", "fontsize": 8, "weight": "bold", "ha": "center", "va": "bottom"}


@dataclass(frozen=True)
class Part:
    number: int
    name: str
    start: int
    at_end: str
    peak: str


def parts_of(timeline: Timeline) -> list[Part]:
    live, spans = timeline.live_bytes, timeline.marked_spans()
    highest = [max(live[start - 1 : end]) for start, end, _ in spans]
    shown = sorted(sorted(range(len(spans)), key=lambda n: highest[n], reverse=True)[:MOST_PARTS])
    return [
        Part(number, printable(name, 38), start, format_bytes(live[end - 1]), format_bytes(highest[index]))
        for number, index in enumerate(shown, start=1)
        for start, end, name in [spans[index]]
    ]


def draw_marks(axes: Axes, parts: Sequence[Part], num_events: int, plot_inches: float) -> None:
    """A dotted line where a part begins, and its number over the curve, moved aside where others are near."""
    across = axes.get_xaxis_transform()
    inches_per_event = plot_inches / (num_events + 1)
    places = spread([part.start * inches_per_event for part in parts], _BADGE_INCHES, plot_inches)
    for part, inches in zip(parts, places, strict=True):
        x, badge = part.start - 0.5, inches / inches_per_event - 0.5
        axes.plot([x, x, badge], [0, 0.925, 0.95], **_DOTTED, transform=across, zorder=4)
        axes.text(badge, 0.955, str(part.number), **_BADGE, transform=across, zorder=6)


def spread(wanted: Sequence[float], gap: float, width: float) -> list[float]:
    """Places at least ``gap`` apart, in order, within ``width``, each as near to where it is wanted as that allows."""
    half = gap / 2
    # neighbours that would touch form a group around the mean of what its members want, and groups may grow into others
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
    """Where the first of a group stands."""
    extent = (len(group) - 1) * gap
    middle = sum(wanted[index] for index in group) / len(group)
    return max(gap / 2, min(middle - extent / 2, width - gap / 2 - extent))


def _right(group: list[int], wanted: Sequence[float], gap: float, width: float) -> float:
    return _left(group, wanted, gap, width) + (len(group) - 1) * gap
