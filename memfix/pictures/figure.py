"""Draw a timeline as an image with matplotlib: live bytes over events, stacked by origin, with the peak marked."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..meters.timeline import Timeline
from ..units import BYTE_UNITS, format_bytes, format_room
from .bands import Band, Stack, build_stack, largest_first, peak_label, phase_spans, printable, printable_end
from .palette import PEAK_COLOR, band_colors, phase_color
from .stages import ABOUT_ASIDES, ListedStage, aside_spans, draw_stage_starts, listed_stages

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _QUIET, _FAINT = "#1c2330", "#5b6472", "#dfe3e8"

# more columns than the image has pixels would only make the file larger
_MAX_COLUMNS = 900

# inches
_WIDTH, _PLOT_HEIGHT, _ROW_HEIGHT = 12.0, 4.7, 0.265
_INCHES_PER_LETTER, _INCHES_PER_CODE_LETTER = 0.076, 0.069
_LEFT, _RIGHT, _TOP, _AXIS_BELOW, _BOTTOM = 1.0, 0.3, 1.02, 0.62, 0.22


def as_png(timeline: Timeline, title: str, capacity_bytes: int | None = None) -> bytes:
    return _rendered(timeline, title, capacity_bytes, "png", dpi=160)


def as_svg(timeline: Timeline, title: str, capacity_bytes: int | None = None) -> bytes:
    return _rendered(timeline, title, capacity_bytes, "svg", metadata={"Date": None})


def require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError(
            "a .png or .svg needs matplotlib: pip install memfix[pictures]; .html, .json and .pickle need nothing"
        ) from None


def _rendered(timeline: Timeline, title: str, capacity_bytes: int | None, format: str, **options: Any) -> bytes:
    require_matplotlib()
    import matplotlib

    # keep text as text in an SVG, so that it can be searched and copied; the salt makes the file reproducible
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "memfix", "font.family": "DejaVu Sans"}
    content = io.BytesIO()
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # characters that the font lacks are drawn as boxes; a warning about them would not help
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        draw(timeline, title, capacity_bytes).savefig(content, format=format, **options)
    return content.getvalue()


def draw(timeline: Timeline, title: str, capacity_bytes: int | None = None) -> Figure:
    from matplotlib.figure import Figure

    stack = build_stack(timeline, max_columns=_MAX_COLUMNS)
    colors = band_colors(stack)
    rows = [_LegendRow(band, colors[band]) for band in largest_first(stack.bands)]
    stages = listed_stages(timeline)
    list_inches = _ROW_HEIGHT * (-(-len(stages) // 2) + 1.6) if stages else 0.0
    below = list_inches + (_AXIS_BELOW + _ROW_HEIGHT * (len(rows) + 1) + _BOTTOM if rows else _AXIS_BELOW)
    height = _TOP + _PLOT_HEIGHT + below
    figure = Figure(figsize=(_WIDTH, height), facecolor="white")
    box = (_LEFT / _WIDTH, below / height, (_WIDTH - _LEFT - _RIGHT) / _WIDTH, _PLOT_HEIGHT / height)
    axes = figure.add_axes(box)
    _draw_axes(axes, timeline, room_above=0.28 if stages else 0.13)
    _draw_phases(axes, timeline)
    draw_stage_starts(axes, stages, timeline.num_events, _WIDTH - _LEFT - _RIGHT)
    _draw_bands(axes, timeline, stack, colors)
    _fade_asides(axes, timeline)
    _draw_capacity(axes, timeline, capacity_bytes)
    _draw_peak(axes, timeline, capacity_bytes)
    _write(figure, _LEFT, height - 0.34, printable(title, 95), size=14, weight="bold", height=height)
    _write(figure, _LEFT, height - 0.58, _subtitle(timeline, capacity_bytes), size=9.5, color=_QUIET, height=height)
    if rows:
        _draw_legend(figure, rows, height, list_inches)
    if stages:
        _list_stages(figure, stages, height)
    return figure


def _subtitle(timeline: Timeline, capacity_bytes: int | None) -> str:
    if not timeline.buffers:
        return "no buffers"
    total = timeline.live_bytes[timeline.peak_event]
    end = timeline.live_bytes[-1]
    parts = [f"{format_bytes(total)} in all at event {timeline.peak_event:,} of {timeline.num_events:,}"]
    parts += [] if capacity_bytes is None else [format_room(total, capacity_bytes)]
    parts += [f"{format_bytes(end)} at the end"]
    parts += [f"faded: {ABOUT_ASIDES}"] if timeline.asides else []
    return "   ·   ".join(parts)


def byte_ticks(highest: int, most: int = 8) -> tuple[list[int], list[str]]:
    """The positions and labels of the ticks on an axis of bytes, at multiples of a power of two."""
    step = 1
    while highest > step * most:
        step *= 2
    name, size = max(((n, s) for n, s in BYTE_UNITS.items() if s <= step * 4), key=lambda unit: unit[1])
    ticks = list(range(0, highest + 1, step))
    return ticks, [f"{tick / size:g} {name}" if tick else "0" for tick in ticks]


def _draw_axes(axes: Axes, timeline: Timeline, room_above: float) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    highest = timeline.highest_bytes
    axes.set_xlim(-0.5, timeline.num_events + 0.5)
    axes.set_ylim(0, max(1, highest) * (1 + room_above))
    ticks, labels = byte_ticks(highest)
    axes.set_yticks(ticks, labels)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda event, _: f"{event:,.0f}"))
    axes.set_xlabel("event: a buffer is born or dies", color=_QUIET, fontsize=9, labelpad=6)
    axes.tick_params(colors=_QUIET, labelsize=9, length=0, pad=6)
    axes.grid(axis="y", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_QUIET)


def _draw_phases(axes: Axes, timeline: Timeline) -> None:
    """Draw each phase as a tint behind the curve and a strip above it, with its name if there is room."""
    across = axes.get_xaxis_transform()
    plot_inches = _WIDTH - _LEFT - _RIGHT
    inches_per_event = plot_inches / (timeline.num_events + 1)
    labels = []
    for start, end, name in phase_spans(timeline):
        color = phase_color(name)
        axes.axvspan(start - 0.5, end - 0.5, facecolor=color, alpha=0.055, linewidth=0, zorder=0)
        axes.fill_between(
            [start - 0.5, end - 0.5], 1.0, 1.014, color=color, linewidth=0, transform=across, clip_on=False
        )
        middle = ((start + end) / 2) * inches_per_event
        labels.append(_PhaseLabel(name, color, middle, (end - start) * inches_per_event))
    for label, inches in _placed(labels, plot_inches):
        x = inches / inches_per_event - 0.5
        axes.text(
            x, 1.027, label.text, transform=across, color=label.color, fontsize=9.5, weight="bold", ha="center",
            va="bottom", parse_math=False,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _PhaseLabel:
    name: str
    color: str
    middle: float
    room: float
    """The width of the phase in inches, the unit of ``middle`` and ``width``."""

    @property
    def text(self) -> str:
        return printable(self.name, 40)

    @property
    def width(self) -> float:
        return 0.098 * len(self.text) + 0.1


def _placed(labels: list[_PhaseLabel], plot_inches: float) -> list[tuple[_PhaseLabel, float]]:
    """Place labels, widest phase first. Labels never touch; a name that is wider than its phase is shown only once."""
    placed: list[tuple[_PhaseLabel, float]] = []
    for label in sorted(labels, key=lambda label: label.room, reverse=True):
        half = label.width / 2
        middle = min(max(label.middle, half), plot_inches - half)
        named = any(other.name == label.name for other, _ in placed)
        touches = any(abs(middle - x) < half + other.width / 2 for other, x in placed)
        if not touches and (label.room >= label.width or not named):
            placed.append((label, middle))
    return placed


def _draw_bands(axes: Axes, timeline: Timeline, stack: Stack, colors: dict[Band, str]) -> None:
    edges = [start - 0.5 for start in stack.starts] + [timeline.num_events + 0.5]
    below = [0] * len(stack.starts)
    for band in stack.bands:
        above = [low + value for low, value in zip(below, band.values, strict=True)]
        # the last value is repeated, so that its column is drawn to the end
        axes.fill_between(
            edges, [*below, below[-1]], [*above, above[-1]], step="post", facecolor=colors[band], edgecolor="white",
            linewidth=0.25, zorder=2,
        )  # fmt: skip
        below = above
    axes.step(edges, [*stack.live, stack.live[-1]], where="post", color=_INK, linewidth=0.6, zorder=3)


def _fade_asides(axes: Axes, timeline: Timeline) -> None:
    for start, end in aside_spans(timeline):
        axes.axvspan(start - 0.5, end - 0.5, facecolor="white", alpha=0.7, linewidth=0, zorder=3.5)


def _draw_capacity(axes: Axes, timeline: Timeline, capacity_bytes: int | None) -> None:
    """Draw a line at the GPU's memory if the live bytes exceed it."""
    if capacity_bytes is not None and capacity_bytes < timeline.highest_bytes:
        axes.axhline(capacity_bytes, color=PEAK_COLOR, linewidth=1.0, linestyle=(0, (5, 3)), zorder=4)
        axes.annotate(
            f"{format_bytes(capacity_bytes)} of the GPU", (0.995, capacity_bytes), xycoords=axes.get_yaxis_transform(),
            xytext=(0, -4), textcoords="offset points", ha="right", va="top", fontsize=8.5, color=PEAK_COLOR, zorder=6,
        )  # fmt: skip


def _draw_peak(axes: Axes, timeline: Timeline, capacity_bytes: int | None) -> None:
    if not timeline.buffers:
        return
    event, total = timeline.peak_event, timeline.live_bytes[timeline.peak_event]
    share = event / max(1, timeline.num_events)
    side = "left" if share < 0.25 else "right" if share > 0.75 else "center"
    nudge = {"left": -4, "center": 0, "right": 4}[side]
    axes.plot([event], [total], "o", color=PEAK_COLOR, markersize=7, markeredgecolor="white", zorder=5, clip_on=False)
    axes.annotate(
        peak_label(timeline, capacity_bytes), (event, total), xytext=(nudge, 9), textcoords="offset points", ha=side,
        va="bottom", fontsize=10.5, weight="bold", color=_INK, zorder=6, parse_math=False,
        bbox={"facecolor": "white", "alpha": 0.75, "pad": 1.5, "linewidth": 0} if timeline.asides else None,
    )  # fmt: skip


class _LegendRow:
    def __init__(self, band: Band, color: str) -> None:
        fold, origin = band.at_peak, band.origin
        self.color, self.what = color, printable(band.label, 26)
        self.at_peak = format_bytes(fold.bytes) if fold else "-"
        self.times = fold.times if fold else f"up to {format_bytes(band.max_bytes)}"
        self.place = printable_end(origin.place.rpartition("/")[2], 40) if origin else ""
        self.code = origin.code if origin else ""


def _draw_legend(figure: Figure, rows: list[_LegendRow], height: float, above: float) -> None:
    """Draw the legend as a table under the plot, because matplotlib's legend box has no columns for source lines."""
    from matplotlib.patches import Rectangle

    y = above + _BOTTOM + _ROW_HEIGHT * (len(rows) + 0.35)
    size_at, times_at, what_at = _LEFT + 1.1, _LEFT + 1.25, _LEFT + 2.7
    place_at = what_at + _INCHES_PER_LETTER * max(len(row.what) for row in rows) + 0.3
    code_at = place_at + _INCHES_PER_LETTER * max(len(row.place) for row in rows) + 0.3
    code_letters = int((_WIDTH - _RIGHT - code_at) / _INCHES_PER_CODE_LETTER)
    for x, text, align in ((size_at, "at the peak", "right"), (what_at, "what", "left"), (place_at, "where", "left")):
        _write(figure, x, y, text, size=8.5, color=_QUIET, align=align, height=height)
    for row in rows:
        y -= _ROW_HEIGHT
        swatch = (_LEFT / _WIDTH, (y - 0.075) / height)
        figure.add_artist(Rectangle(swatch, 0.2 / _WIDTH, 0.15 / height, facecolor=row.color, linewidth=0))
        _write(figure, size_at, y, row.at_peak, size=9, weight="bold", align="right", height=height)
        _write(figure, times_at, y, row.times, size=8.5, color=_QUIET, height=height)
        _write(figure, what_at, y, row.what, size=9, height=height)
        _write(figure, place_at, y, row.place, size=8.5, color=_QUIET, height=height)
        _write(figure, code_at, y, printable(row.code, code_letters), size=8, family="DejaVu Sans Mono", height=height)


def _list_stages(figure: Figure, stages: list[ListedStage], height: float) -> None:
    """List the stages in two columns: number, name, live bytes at the end, and peak."""
    per_column = -(-len(stages) // 2)
    column_width = (_WIDTH - _LEFT - _RIGHT) / 2
    for column in (0, 1):
        left, right = _LEFT + column * column_width, _LEFT + (column + 1) * column_width - 0.25
        end_at, peak_at = right - 0.98, right
        y = _BOTTOM + _ROW_HEIGHT * (per_column + 0.35)
        members = stages[column * per_column : (column + 1) * per_column]
        for x, text in ((end_at, "at its end"), (peak_at, "peak")) if members else ():
            _write(figure, x, y, text, size=8.5, color=_QUIET, align="right", height=height)
        for stage in members:
            y -= _ROW_HEIGHT
            _write(figure, left + 0.22, y, str(stage.number), size=9, weight="bold", align="right", height=height)
            _write(figure, left + 0.32, y, stage.name, size=8.5, height=height)
            _write(figure, end_at, y, stage.at_end, size=9, color=_QUIET, align="right", height=height)
            _write(figure, peak_at, y, stage.peak, size=9, weight="bold", align="right", height=height)


def _write(
    figure: Figure, x: float, y: float, text: str, *, size: float, height: float, align: str = "left", **style: Any
) -> None:
    """Write text at a position in inches. Mathtext is off, because source lines may have dollar signs."""
    style = {"color": _INK, **style}
    figure.text(x / _WIDTH, y / height, text, fontsize=size, ha=align, va="center", parse_math=False, **style)
