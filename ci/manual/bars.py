"""Draw sizes as horizontal bars of stacked parts, as an SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from memfix.units import format_bytes

from .svg import BAND_COLORS, head, legend

_WIDTH, _ROW, _BAR, _TOP, _MARGIN = 860, 58, 20, 46, 14


@dataclass(frozen=True)
class Bar:
    """A labelled bar of ``(name, bytes)`` parts. ``printed`` replaces the text of the sum beside the bar."""

    label: str
    parts: tuple[tuple[str, int], ...]
    printed: str = ""

    @property
    def total(self) -> int:
        return sum(size for _, size in self.parts)


def bars_svg(title: str, bars: Sequence[Bar]) -> str:
    """Draw all bars to one scale. Parts with the same name have the same colour, which the legend explains."""
    names = list(dict.fromkeys(name for bar in bars for name, _ in bar.parts))
    colors = dict(zip(names, BAND_COLORS, strict=False))
    scale = (_WIDTH - 2 * _MARGIN - 170) / max(bar.total for bar in bars)
    height = _TOP + _ROW * len(bars) + 44
    lines = head(title, _WIDTH, height, size=13)
    for number, bar in enumerate(bars):
        y, x = _TOP + number * _ROW, float(_MARGIN)
        lines.append(f'<text x="{_MARGIN}" y="{y + 14}">{escape(bar.label)}</text>')
        for name, size in bar.parts:
            width = size * scale
            lines.append(
                f'<rect x="{x:.1f}" y="{y + 21}" width="{max(width, 0.5):.1f}" height="{_BAR}" fill="{colors[name]}">'
                f"<title>{escape(name)}: {format_bytes(size)}</title></rect>"
            )
            x += width
        printed = escape(bar.printed or format_bytes(bar.total))
        lines.append(f'<text x="{x + 8:.1f}" y="{y + 36}" font-weight="bold">{printed}</text>')
    last = _TOP + _ROW * len(bars) + 18
    return "\n".join([*lines, *legend(colors.items(), last, ' font-size="12"'), "</svg>", ""])
