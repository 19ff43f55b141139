"""Is an answer as near to the truth as a small factor of naive's own rounding error, at worst and on average?"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..laws import Tolerance

_ENOUGH_FOR_AN_AVERAGE = 16
_ROUNDINGS_WHERE_NAIVE_OVERFLOWS = 32  # naive gives no error of its own to compare with there


class Unequal(AssertionError):
    """The form's answer differs from naive's; the message says where and by how much."""


@dataclass(frozen=True)
class Answer:
    """Outputs and gradients by name; ``None`` for a gradient that did not arrive."""

    tensors: Mapping[str, torch.Tensor | None]
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True)
class Reference:
    """What naive says of one call."""

    naive: Answer
    """In the working dtype: what rounding alone costs."""
    truth: Answer
    """In float64."""
    nearby: tuple[Answer, ...]
    """In float64, of inputs that are off by what sums are allowed."""

    @functools.cached_property
    def expected(self) -> dict[str, _Expected | None]:
        """By name; None where naive gives nothing. Worked out once for all forms."""
        found: dict[str, _Expected | None] = {}
        for name, true in self.truth.tensors.items():
            rounded = self.naive.tensors[name]
            moved = [t for near in self.nearby if (t := near.tensors[name]) is not None]
            found[name] = None if true is None or rounded is None else _Expected.of(true, rounded.double(), moved)
        return found


@dataclass(frozen=True)
class _Expected:
    """One tensor as it should be, and how far naive and rounded sums are off from it, where both are finite."""

    true: torch.Tensor
    rounded: torch.Tensor
    finite: torch.Tensor | None
    """Where; None where all of it is."""
    own_error: float = 0.0
    moved_error: float = 0.0
    magnitude: float = 0.0
    own_average: float = 0.0
    size: float = 0.0
    """The average magnitude."""
    num_that_matter: float = 0.0

    @staticmethod
    def of(true: torch.Tensor, rounded: torch.Tensor, moved: list[torch.Tensor]) -> _Expected:
        where = rounded.isfinite() & true.isfinite()
        finite = None if bool(where.all()) else where
        if not bool(where.any()):
            return _Expected(true, rounded, finite)
        off, values = _picked(rounded - true, finite), _picked(true, finite)
        return _Expected(
            true,
            rounded,
            finite,
            own_error=off.abs().max().item(),
            moved_error=max(_picked(near - true, finite).abs().max().item() for near in moved),
            magnitude=values.abs().max().item(),
            own_average=_rms(off),
            size=_rms(values),
            num_that_matter=_num_that_matter(values),
        )


def sum_rounding(tolerance: Tolerance, dtype: torch.dtype) -> float:
    """The relative error that sums are given, in the dtype that they are kept in."""
    return tolerance.sum_ulps * torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def compare(answer: Answer, reference: Reference, tolerance: Tolerance, dtype: torch.dtype) -> None:
    """Raises ``Unequal`` at the first tensor that is not as expected."""
    naive = reference.naive
    if len(answer.dtypes) != len(naive.dtypes):
        raise Unequal(f"returns {len(answer.dtypes)} tensors, naive {len(naive.dtypes)}")
    if answer.dtypes != naive.dtypes:
        raise Unequal(f"returns {answer.dtypes[0]}, naive {naive.dtypes[0]}")
    for name, expected in reference.expected.items():
        if name not in answer.tensors:  # of a second backward that the form refuses
            continue
        got = answer.tensors[name]
        if expected is None:
            if got is not None and bool(got.ne(0).any()):
                raise Unequal(f"gives a {name}, naive gives none")
            continue
        if got is None:
            raise Unequal(f"gives no {name}")
        if got.shape != expected.true.shape:
            raise Unequal(f"{name} has shape {list(got.shape)}, naive's {list(expected.true.shape)}")
        _compare_tensor(name, got.double(), expected, tolerance, dtype)


def _compare_tensor(
    name: str, got: torch.Tensor, expected: _Expected, tolerance: Tolerance, dtype: torch.dtype
) -> None:
    true, finite, eps = expected.true, expected.finite, torch.finfo(dtype).eps
    if finite is not None:
        _compare_where_naive_overflows(name, got, expected, dtype)
        if not bool(finite.any()):
            return
    off = _picked(got - true, finite)
    sum_error = expected.moved_error + sum_rounding(tolerance, dtype) * expected.magnitude
    allowed = tolerance.factor * expected.own_error + tolerance.ulps * eps * expected.magnitude + sum_error
    worst = off.abs().max().item() if off.numel() else 0.0
    if not worst <= allowed:
        everywhere = (got - true).nan_to_num(nan=float("inf")).abs()
        flat = (everywhere if finite is None else everywhere.masked_fill(~finite, -1)).argmax()
        index = [int(i) for i in torch.unravel_index(flat, got.shape)]
        raise Unequal(
            f"{name} is off by {worst:.3g} at {index}: {got.flatten()[flat]:.6g}, "
            f"truth {true.flatten()[flat]:.6g}; "
            f"allowed {allowed:.3g} (naive's own error {expected.own_error:.3g})"
        )
    # where a few elements outweigh the rest, naive's average can be right by luck as one element can
    if expected.num_that_matter >= _ENOUGH_FOR_AN_AVERAGE:
        _compare_on_average(name, _rms(off), expected, sum_error, tolerance, dtype)


def _compare_where_naive_overflows(name: str, got: torch.Tensor, expected: _Expected, dtype: torch.dtype) -> None:
    """In the working dtype a form may do the same there, or be right where naive is not."""
    true, rounded, finite = expected.true, expected.rounded, expected.finite
    assert finite is not None
    as_naive = (got == rounded) | (got.isnan() & rounded.isnan())
    as_truth = (got - true).abs() <= _ROUNDINGS_WHERE_NAIVE_OVERFLOWS * torch.finfo(dtype).eps * true.abs()
    if not bool((as_naive | as_truth)[~finite].all()):
        raise Unequal(f"{name} is neither naive's nor the truth where naive is not finite")


def _compare_on_average(
    name: str, average: float, expected: _Expected, sum_error: float, tolerance: Tolerance, dtype: torch.dtype
) -> None:
    own_average, size = expected.own_average, expected.size
    rounding = torch.finfo(dtype).eps / 4 * size  # about what one rounding of the result costs
    allowed = tolerance.rms_factor * (own_average + rounding) + sum_error
    if not average <= allowed:
        raise Unequal(
            f"{name} is off by {average:.3g} on average, naive by {own_average:.3g}, allowed {allowed:.3g}: "
            "it rounds more often than naive"
        )
    if tolerance.rms_ulps is not None and dtype in (torch.bfloat16, torch.float16):
        # what is below the normal numbers of the dtype has fewer digits than a rounding leaves
        allowed = tolerance.rms_ulps * torch.finfo(dtype).eps * size + torch.finfo(dtype).tiny + sum_error
        if not average <= allowed:
            raise Unequal(
                f"{name} is off by {average:.3g} on average, allowed {allowed:.3g}: "
                "it rounds what the form promises to keep in float32"
            )


def _picked(values: torch.Tensor, where: torch.Tensor | None) -> torch.Tensor:
    return values if where is None else values[where]


def _num_that_matter(values: torch.Tensor) -> float:
    """How many equal elements would spread as much: all of them where they are alike, one where one outweighs all."""
    squares = values.pow(2)
    return (squares.sum().pow(2) / squares.pow(2).sum()).nan_to_num(nan=0.0).item()


def _rms(values: torch.Tensor) -> float:
    return values.pow(2).mean().sqrt().item()
