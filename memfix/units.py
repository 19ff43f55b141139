"""Parse and format bytes, ratios and seconds. Units are powers of two: MiB, not MB."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30
TiB = 1 << 40

BYTE_UNITS = {"B": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB}

_SIZE = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """``"24 GiB"``, ``"512MiB"`` or ``1024`` as an exact number of bytes."""
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise ValueError(f"a size must be an int or a string such as '24GiB', got {text!r}")
    if isinstance(text, int):
        if text < 0:
            raise ValueError(f"a size must be at least 0 bytes, got {text}")
        return text
    match = _SIZE.fullmatch(text)
    if not match:
        raise ValueError(f"cannot read {text!r} as a size; write it as '24GiB', '512MiB' or a number of bytes")
    number, unit = match.groups()
    if unit not in BYTE_UNITS and unit != "":
        raise ValueError(f"unknown unit {unit!r} in {text!r}; memfix counts in powers of two: B, KiB, MiB, GiB, TiB")
    return int(Fraction(number.replace("_", "")) * BYTE_UNITS.get(unit, 1))


def is_size(text: str) -> bool:
    """Whether ``text`` is a number with or without a unit, rather than a formula."""
    return _SIZE.fullmatch(text) is not None


def format_bytes(count: int) -> str:
    """``39.63 GiB``: two decimals in the largest unit that gives at least 1; whole bytes below 1 KiB."""
    magnitude = abs(count)
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if magnitude >= BYTE_UNITS[unit]:
            return f"{count / BYTE_UNITS[unit]:.2f} {unit}"
    return f"{count} B"


def format_room(count: int, capacity_bytes: int) -> str:
    """Whether ``count`` bytes fit: ``fits in 24.00 GiB``, or how much is too much."""
    if count <= capacity_bytes:
        return f"fits in {format_bytes(capacity_bytes)}"
    return f"does not fit: {format_bytes(count - capacity_bytes)} more than {format_bytes(capacity_bytes)}"


def format_change(count: int, reference: int) -> str:
    """The change from ``reference`` to ``count``: ``+22 %`` for small changes, ``7.1x over`` for large ones."""
    if reference <= 0:
        return f"+{format_bytes(count - reference)}"
    ratio = count / reference
    if ratio >= 2:
        return f"{ratio:.1f}x over"
    percent = 100 * (ratio - 1)
    if round(percent, 1) == 0 and count != reference:
        return f"{count - reference:+,} B"
    return f"{percent:+.1f} %"


def format_seconds(seconds: float) -> str:
    """``1.25 ms``: the unit that gives one to three digits before the point."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if float(f"{seconds:.3g}") >= scale:  # 0.9999 s is printed as 1 s
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def format_times(seconds: float, times_s: Sequence[float]) -> str:
    """``812 ms ±1 %``: a median of samples, and half the distance between the shortest and the longest."""
    return f"{format_seconds(seconds)} ±{50 * (max(times_s) - min(times_s)) / seconds:.0f} %"
