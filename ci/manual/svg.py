"""What every SVG of the manual begins with, and its legend. No plotting library is needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from memfix.pictures.palette import BAND_COLORS

__all__ = ["BAND_COLORS", "head", "legend"]


def head(title: str, width: int, height: int, *, size: int) -> list[str]:
    """The opening tag, a white background and the title, whose letters have this ``size`` unless said otherwise."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="DejaVu Sans, Verdana, sans-serif" font-size="{size}" fill="#1c2330">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="14" y="27" font-size="16" font-weight="bold">{escape(title)}</text>',
    ]


def legend(colors: Iterable[tuple[str, str]], y: int, style: str = "") -> Iterator[str]:
    """A square of each colour before the name that it stands for, side by side."""
    x = 14.0
    for name, color in colors:
        yield f'<rect x="{x:.0f}" y="{y - 11}" width="12" height="12" fill="{color}"/>'
        yield f'<text x="{x + 17:.0f}" y="{y}"{style}>{escape(name)}</text>'
        x += 17 + 7.4 * len(name) + 16
