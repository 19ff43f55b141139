"""Draw time against memory, with a line for each contender, as an SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from memfix.units import GiB

from .svg import BAND_COLORS, head, legend

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 860, 470, 62, 24, 52, 86
_TICKS = 6


@dataclass(frozen=True)
class Point:
    """One setting of a contender; ``label`` is written beside its dot."""

    peak_bytes: int
    times: float
    label: str = ""


@dataclass(frozen=True)
class Curve:
    """The settings of one contender, in the order of the line; a single setting is drawn as a dot."""

    name: str
    points: tuple[Point, ...]


class _Axis:
    """Maps numbers to positions in the picture; ticks are ``step`` apart."""

    def __init__(self, values: Sequence[float], low: float, start: float, end: float) -> None:
        self.low, self.start, self.end = low, start, end
        span = max(max(values) - low, 1e-9)
        rough = span / _TICKS
        size = 10.0 ** math.floor(math.log10(rough))
        self.step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
        self.count = max(1, math.ceil(span / self.step - 1e-9))

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.step * self.count) * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        digits = max(0, -math.floor(math.log10(self.step)))
        values = [self.low + number * self.step for number in range(self.count + 1)]
        return [(self.at(value), f"{value:.{digits}f}") for value in values]


def frontier_svg(title: str, curves: Sequence[Curve], *, floor: str) -> str:
    """Draw peaks from 0 to the right, and times upwards as multiples of the time of ``floor``, from 1."""
    points = [point for curve in curves for point in curve.points]
    if not points:
        raise ValueError("a picture of time against memory needs a point")
    across = _Axis([point.peak_bytes / GiB for point in points], 0.0, _LEFT, _WIDTH - _RIGHT)
    upward = _Axis([point.times for point in points], 1.0, _HEIGHT - _BOTTOM, _TOP)
    lines = [*head(title, _WIDTH, _HEIGHT, size=12), *_grid(across, upward, floor)]
    for number, (curve, color) in enumerate(zip(curves, BAND_COLORS, strict=False)):
        # labels of every other curve are below its dots, so that the labels of two curves that meet do not overlap
        lines += _drawn(curve, color, across, upward, labels_by=17 if number % 2 else -7)
    colors = zip((curve.name for curve in curves), BAND_COLORS, strict=False)
    return "\n".join([*lines, *legend(colors, _HEIGHT - 18), "</svg>", ""])


def _grid(across: _Axis, upward: _Axis, floor: str) -> list[str]:
    lines = []
    for x, text in across.ticks():
        lines.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_HEIGHT - _BOTTOM}" stroke="#e3e7ec"/>')
        lines.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 17}" text-anchor="middle">{text}</text>')
    for y, text in upward.ticks():
        lines.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#e3e7ec"/>')
        lines.append(f'<text x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{text}x</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    lines.append(
        f'<text x="{middle:.0f}" y="{_HEIGHT - _BOTTOM + 36}" text-anchor="middle">peak above the inputs, GiB</text>'
    )
    lines.append(f'<text x="14" y="{_TOP - 8}">time over {escape(floor)}</text>')
    return lines


def _drawn(curve: Curve, color: str, across: _Axis, upward: _Axis, *, labels_by: int) -> list[str]:
    places = [(across.at(point.peak_bytes / GiB), upward.at(point.times)) for point in curve.points]
    lines = []
    if len(places) > 1:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
    for (x, y), point in zip(places, curve.points, strict=True):
        said = f"{curve.name} {point.label}".strip()
        lines.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{color}"><title>{escape(said)}: '
            f"{point.times:.2f}x, {point.peak_bytes / GiB:.2f} GiB</title></circle>"
        )
        lines.append(f'<text x="{x + 3:.1f}" y="{y + labels_by:.1f}" font-size="11">{escape(point.label)}</text>')
    return lines
