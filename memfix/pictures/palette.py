"""The colours of all pictures, chosen for colour-blind readers and for light and dark backgrounds."""

from __future__ import annotations

from .bands import EXISTED_BEFORE, OTHER_ORIGINS, Band, Stack, largest_first

BAND_COLORS = ("#4269d0", "#efb118", "#ff725c", "#3ca951", "#a463f2", "#6cc5b0", "#ff8ab7", "#9c6b4e")
MANY_ORIGINS_COLORS = {EXISTED_BEFORE: "#64748b", OTHER_ORIGINS: "#c3c9d1"}
PHASE_COLORS = {"forward": "#2f7ed8", "backward": "#d9622b", "optimizer": "#2e9e6b"}
OTHER_PHASE_COLOR = "#8a8f98"
PEAK_COLOR = "#d7263d"


def band_colors(stack: Stack) -> dict[Band, str]:
    """The colour of each band. The largest band always has the first colour."""
    colors = iter(BAND_COLORS)
    return {
        band: next(colors) if band.origin else MANY_ORIGINS_COLORS[band.label] for band in largest_first(stack.bands)
    }


def phase_color(name: str) -> str:
    return PHASE_COLORS.get(name, OTHER_PHASE_COLOR)
