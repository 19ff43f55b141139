"""Draw sizes as horizontal bars of stacked parts, as an SVG, without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ..units import format_bytes
from .palette import BAND_COLORS

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
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'font-family="DejaVu Sans, Verdana, sans-serif" font-size="13" fill="#1c2330">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_MARGIN}" y="27" font-size="16" font-weight="bold">{escape(title)}</text>',
    ]
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
    return "\n".join([*lines, *_legend(colors, _TOP + _ROW * len(bars) + 18), "</svg>", ""])


def _legend(colors: dict[str, str], y: int) -> list[str]:
    lines, x = [], float(_MARGIN)
    for name, color in colors.items():
        lines.append(f'<rect x="{x:.0f}" y="{y - 11}" width="12" height="12" fill="{color}"/>')
        lines.append(f'<text x="{x + 17:.0f}" y="{y}" font-size="12">{escape(name)}</text>')
        x += 17 + 7.4 * len(name) + 16
    return lines
