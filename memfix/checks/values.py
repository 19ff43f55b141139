"""What stands in an input: values of a size, and how they go together within one call.

Rounding shows where values of different sizes meet, and nowhere else: a large sum that small terms are added to, two
scores that differ by little, a difference of two large sums. Elements that are drawn one by one, all alike in size,
average that away. So a tensor may also have a pattern, whatever the op:

- ``runs``: large rows and small ones, several of a kind in a row along the longest axis;
- ``alike``: rows that differ from each other by little, so that their scores compete and their terms add up;
- of integers both are one: a few values come up most of the time.

A row is a vector along the last axis.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..contract import Case, Pattern, TensorSpec

_SHARE_OF_A_MASK = 0.3
_SMALL = 1 / 32  # the size of small rows
_ROUNDINGS_APART = 1  # what rows that are alike differ by, in roundings of their dtype
_RUN = 8  # rows, on average
_LOG_POWER = 8.0  # draws a log-uniform value to the large end of its range; its inverse to the small one
_INTEGER_POWER = 4  # of 50 values the first then comes up in 4 of 10 places


def make_values(
    spec: TensorSpec,
    case: Case,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    share: float | None,
    magnitude: float,
    pattern: Pattern,
) -> torch.Tensor:
    """The elements of an input, as ``TensorSpec`` and ``Draw`` say; floating ones still to be rounded to ``dtype``."""
    size = spec.size(case.dims)
    made: dict[str, Any] = {"generator": generator, "device": generator.device}
    chance = torch.rand(size, **made)
    if dtype == torch.bool:
        return chance < (_SHARE_OF_A_MASK if share is None else share)
    if not dtype.is_floating_point:
        high = case.dims[spec.high] if isinstance(spec.high, str) else spec.high
        tensor = _integers(int(spec.low or 0), int(high or 0), size, dtype, made, pattern)
    else:
        made["dtype"] = torch.float64 if dtype == torch.float64 else torch.float32
        tensor = _floats(spec, case, size, made, magnitude, pattern)
        if pattern == "alike":
            tensor = _alike(tensor, _ROUNDINGS_APART * torch.finfo(dtype).eps)
    if spec.sometimes is not None:
        value = case.choices[spec.sometimes] if isinstance(spec.sometimes, str) else spec.sometimes
        tensor = tensor.masked_fill(chance < (share or 0), value)
    return tensor


def _integers(
    low: int, high: int, size: tuple[int, ...], dtype: torch.dtype, made: dict[str, Any], pattern: Pattern
) -> torch.Tensor:
    if pattern == "even":
        return torch.randint(low, high, size, dtype=dtype, **made)
    place = torch.rand(size, dtype=torch.float64, **made) ** _INTEGER_POWER
    return (low + place * (high - low)).floor().to(dtype)


def _floats(
    spec: TensorSpec, case: Case, size: tuple[int, ...], made: dict[str, Any], magnitude: float, pattern: Pattern
) -> torch.Tensor:
    if spec.low is None and spec.high is None:
        scale = spec.scale if spec.fan_in is None else spec.scale / math.sqrt(case.dims[spec.fan_in])
        return _patterned(magnitude * scale * torch.randn(size, **made), 0.0, pattern, made)
    low, high = float(spec.low or 0.0), float(spec.high if spec.high is not None else 1.0)
    drawn = torch.rand(size, **made)
    if not spec.log_uniform:
        return _patterned(low + (high - low) * drawn, min(max(0.0, low), high), pattern, made)
    power: torch.Tensor | float = magnitude
    if pattern == "runs":
        power = torch.where(_large_rows(size, made), _LOG_POWER, 1 / _LOG_POWER)
    return low * (math.log(high / low) * drawn**power).exp()


def _patterned(values: torch.Tensor, least: float, pattern: Pattern, made: dict[str, Any]) -> torch.Tensor:
    """``least``: the value of the smallest size in the range, which small rows are near."""
    if pattern == "runs":
        return torch.where(_large_rows(tuple(values.shape), made), values, least + _SMALL * (values - least))
    return values


def _alike(values: torch.Tensor, share: float) -> torch.Tensor:
    """All rows near the first one: a ``share`` of what they were apart."""
    if not values.numel():
        return values
    first = values[(0,) * max(1, values.dim() - 1)] if values.dim() else values
    return first + share * (values - first)


def _large_rows(size: tuple[int, ...], made: dict[str, Any]) -> torch.Tensor:
    """Which rows are large, ``[..., 1]``: runs along the longest axis of rows, each line with runs of its own."""
    if not size:
        return torch.ones(size, dtype=torch.bool, device=made["device"])
    rows = (*size[:-1], 1) if len(size) > 1 else size
    axis = max(range(max(1, len(rows) - 1)), key=lambda axis: rows[axis])
    changes = torch.rand(rows, **made) < 1 / _RUN
    first = changes.narrow(axis, 0, min(1, rows[axis]))
    first.copy_(torch.rand(first.shape, **made) < 0.5)
    return changes.cumsum(axis) % 2 == 0
