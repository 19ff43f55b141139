"""Compare an answer with naive's: its error may be a small factor of naive's own, at worst and on average."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..laws import Tolerance

_IN_16_BITS = (torch.bfloat16, torch.float16)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ENOUGH_FOR_AN_AVERAGE = 16
_TERMS_BELOW_NORMAL = 64
_ROUNDINGS_OF_A_WIDE_SUM = 64
_ULPS_AROUND_ZERO = 64
_NUM_DECISIONS = 8  # each of two equal scores is then the larger one in all but one of 128 cases
_ROUNDINGS_WHERE_NAIVE_OVERFLOWS = 32  # naive gives no error of its own to compare with there


class Unequal(AssertionError):
    """The form's answer differs from naive's; the message says where and by how much."""


@dataclass(frozen=True)
class Answer:
    """Outputs and gradients by name; ``None`` for a gradient that did not arrive."""

    tensors: Mapping[str, torch.Tensor | None]
    dtypes: tuple[torch.dtype, ...]
    changes: frozenset[str] = frozenset()
    """Settings of the process, and random generators, that the call left changed."""
    views: frozenset[tuple[str, str]] = frozenset()
    """Outputs that share memory with an input or another output, each with its title."""

    def with_dtypes_of(self, naive: Answer, *, instead_of: torch.dtype) -> Answer:
        """Return this answer with naive's dtype for each output that kept its inputs' dtype, which autocast allows."""
        if len(self.dtypes) != len(naive.dtypes):
            return self
        pairs = zip(self.dtypes, naive.dtypes, strict=True)
        return replace(self, dtypes=tuple(theirs if own == instead_of else own for own, theirs in pairs))


@dataclass(frozen=True)
class Reference:
    """Naive's results at one call, with which the answers of forms are compared."""

    inputs: Mapping[str, torch.Tensor]
    """As they were drawn. Forms get copies."""
    naive: Answer
    """Naive's answer in the working dtype: its error is what rounding alone costs."""
    truth: Answer
    """Naive's answer in float64."""
    make_nearby: Callable[[float, int], Sequence[Answer]]
    """Makes so many float64 answers to inputs with this relative error. Called only if a form fails without them."""
    nudge: float
    """The relative error that sums may have."""
    scale: float = 1.0
    """The size of the largest input, or 1."""
    make_others: Callable[[], Sequence[Reference]] = tuple
    """Makes references at other values of the same shape. Called only if a form fails without them."""
    make_largest: Callable[[], Sequence[Answer]] = tuple
    """Makes two float64 answers with numbers above all others in place of NaNs, as ``sort`` and ``topk`` place a NaN.
    Called only if a form hides a NaN."""

    @functools.cached_property
    def expected(self) -> dict[str, _Expected | None]:
        """The expected tensors by name, None where naive gives none. Computed once for all forms."""
        pairs = ((name, true, self.naive.tensors[name]) for name, true in self.truth.tensors.items())
        return {
            name: None if true is None or rounded is None else _Expected(true, rounded.double())
            for name, true, rounded in pairs
        }

    def moved_error(self, name: str, share: float) -> float:
        """Return how far the truth moves if the inputs have the relative error ``share``."""
        expected = self.expected[name]
        assert expected is not None
        moved = [near for answer in self._nearby if (near := answer.tensors[name]) is not None]
        moved_by_nudge = max(_picked(near - expected.true, expected.finite).abs().max().item() for near in moved)
        return moved_by_nudge * share / self.nudge if self.nudge else 0.0

    def keeps_digits(self, name: str) -> bool:
        """Whether naive's error shows only roundings of its tensor's own dtype, which may be wider than the
        working dtype: a state that stays float32, or under autocast what no product made."""
        expected, naives = self.expected[name], self.naive.tensors[name]
        if expected is None or naives is None or not naives.is_floating_point():
            return False
        return expected.own_error <= _ROUNDINGS_OF_A_WIDE_SUM * torch.finfo(naives.dtype).eps * expected.magnitude

    @functools.cached_property
    def others(self) -> Sequence[Reference]:
        return self.make_others()

    @functools.cached_property
    def _nearby(self) -> Sequence[Answer]:
        return self.make_nearby(self.nudge, 2)


class _Expected:
    """One tensor of the truth, and naive's error in it where both are finite."""

    own_error = magnitude = own_average = size = num_that_matter = 0.0
    """``size`` is the average magnitude."""
    finite: torch.Tensor | None

    def __init__(self, true: torch.Tensor, rounded: torch.Tensor) -> None:
        self.true, self.rounded, self.finite = true, rounded, None
        if not true.is_floating_point():
            return
        where = rounded.isfinite() & true.isfinite()
        self.finite = None if bool(where.all()) else where  # None if every element is finite
        if bool(where.any()):
            off, values = _picked(rounded - true, self.finite), _picked(true, self.finite)
            self.own_error, self.magnitude = off.abs().max().item(), values.abs().max().item()
            self.own_average, self.size = _rms(off), _rms(values)
            self.num_that_matter = _num_that_matter(values)


def sum_rounding(tolerance: Tolerance, dtype: torch.dtype) -> float:
    """Return the relative error that a sum may have, by the dtype that sums are kept in."""
    return tolerance.sum_ulps * torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def _operand_rounding(tolerance: Tolerance, dtype: torch.dtype) -> float:
    return tolerance.operand_ulps * torch.finfo(dtype).eps if dtype in _IN_16_BITS else 0.0


def compare(answer: Answer, reference: Reference, tolerance: Tolerance, dtype: torch.dtype) -> None:
    """Raise ``Unequal`` at the first tensor that is not as expected."""
    naive = reference.naive
    if len(answer.dtypes) != len(naive.dtypes):
        raise Unequal(f"returns {len(answer.dtypes)} tensors, naive {len(naive.dtypes)}")
    if answer.dtypes != naive.dtypes:
        own, naives = next(pair for pair in zip(answer.dtypes, naive.dtypes, strict=True) if pair[0] != pair[1])
        raise Unequal(f"returns {own}, naive {naives}")
    for setting in sorted(answer.changes - naive.changes):
        raise Unequal(f"leaves {setting} changed, which naive does not")
    for output, other in sorted(answer.views - naive.views):
        raise Unequal(f"its {output} shares memory with its {other}; naive's does not")
    for name, expected in reference.expected.items():
        if name not in answer.tensors:  # it belongs to a second backward or derivative, which the form refused
            continue
        got = answer.tensors[name]
        if expected is None:
            if got is not None and bool(got.ne(0).any()):
                raise Unequal(f"gives a {name}, naive gives none")
            continue
        if got is None:
            refuse = "; its backward must refuse it with an error, as torch's once_differentiable does"
            raise Unequal(f"gives no {name}{refuse if name.startswith('second derivative') else ''}")
        if got.shape != expected.true.shape:
            raise Unequal(f"{name} has shape {list(got.shape)}, naive's {list(expected.true.shape)}")
        if expected.true.is_floating_point():
            _compare_named(name, got.double(), reference, tolerance, dtype)
        else:
            _compare_decided(name, got, reference, dtype)


def _compare_decided(name: str, got: torch.Tensor, reference: Reference, dtype: torch.dtype) -> None:
    """Compare integers and truth values, such as indices of the largest scores. Each must be as naive decides: in the
    working dtype, in float64, or for inputs that differ by a rounding, since two scores may be equal but for that."""
    truth, naives = reference.truth.tensors[name], reference.naive.tensors[name]
    assert truth is not None
    assert naives is not None
    wrong = (got != naives) & (got != truth)
    if bool(wrong.any()):
        for other in reference.make_nearby(max(reference.nudge, torch.finfo(dtype).eps), _NUM_DECISIONS):
            near = other.tensors[name]
            assert near is not None
            wrong &= got != near
    if bool(wrong.any()):
        place = tuple(int(i) for i in wrong.nonzero()[0])
        raise Unequal(f"{name} is {got[place].item()} at {[*place]}, naive's is {naives[place].item()}")


def _compare_named(
    name: str, got: torch.Tensor, reference: Reference, tolerance: Tolerance, dtype: torch.dtype
) -> None:
    """Compare one tensor with roundings of the working dtype, or of naive's wider one where naive keeps its digits."""
    expected, naives = reference.expected[name], reference.naive.tensors[name]
    assert expected is not None
    compared_in = partial(
        _compare_tensor, name, got, expected, partial(reference.moved_error, name), tolerance, dtype,
        scale=reference.scale,
    )  # fmt: skip
    # rounded operands cause errors in every tensor, also in those that naive keeps wider
    is_wider = naives is not None and naives.is_floating_point() and naives.dtype.itemsize > dtype.itemsize
    if naives is None or not is_wider or tolerance.operand_ulps or not reference.keeps_digits(name):
        compared_in(dtype)
    elif naives.numel() >= _ENOUGH_FOR_AN_AVERAGE:
        compared_in(naives.dtype)
    else:
        compared_in(dtype)
        try:
            compared_in(naives.dtype)
        except Unequal:  # few elements may be near the truth by luck
            if all(other.keeps_digits(name) for other in reference.others):
                raise


def require_same_nans(answer: Answer, reference: Reference) -> None:
    """Raise ``Unequal`` where naive's answer is NaN and the form's is finite. A form may have more NaNs than naive."""
    for name, expected in reference.expected.items():
        got = answer.tensors.get(name)
        if expected is None or got is None:
            continue
        hidden = got.isfinite() & expected.true.isnan() & expected.rounded.isnan()
        if bool(hidden.any()):  # a NaN may decide what is left out, and its value then does not matter there
            one, other = (answer.tensors[name] for answer in reference.make_largest())
            hidden &= torch.as_tensor(one != other)
        if bool(hidden.any()):
            place = [int(i) for i in hidden.nonzero()[0]]
            raise Unequal(f"hides a NaN of its input: {name} is {got[tuple(place)]:.6g} at {place}, naive's is NaN")


def _compare_tensor(
    name: str,
    got: torch.Tensor,
    expected: _Expected,
    moved_error: Callable[[float], float],
    tolerance: Tolerance,
    dtype: torch.dtype,
    kept: torch.dtype,
    scale: float,
) -> None:
    finite = expected.finite
    if finite is not None:
        _compare_where_naive_overflows(name, got, expected, dtype)
        if not bool(finite.any()):
            return
    off = _picked(got - expected.true, finite)
    if not off.numel():
        return
    sums, info = sum_rounding(tolerance, kept), torch.finfo(dtype)
    # the smallest subnormal of the dtype, or many of them: a sum may have subnormal terms
    num_smallest = 1 if dtype in _IN_16_BITS else _TERMS_BELOW_NORMAL
    slack = sums * expected.magnitude + num_smallest * info.smallest_normal * info.eps
    # a sum of terms that cancel: without this, nothing but 0 would be near enough to a truth of 0
    absolute_ulps = max(tolerance.absolute_ulps, _ULPS_AROUND_ZERO if _is_zero(expected, kept, scale) else 0)
    slack += absolute_ulps * torch.finfo(torch.promote_types(kept, torch.float32)).eps * scale
    if _complaint(got, off, expected, slack, tolerance, kept) is None:
        return
    slack += moved_error(sums + _operand_rounding(tolerance, dtype))
    complaint = _complaint(got, off, expected, slack, tolerance, kept)
    if complaint is not None:
        raise Unequal(f"{name} is off by {complaint}")


def _is_zero(expected: _Expected, dtype: torch.dtype, scale: float) -> bool:
    """Whether the truth is 0, but for float64's own rounding: then naive has no digit of it in the working dtype."""
    float32, float64 = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps
    if expected.magnitude > _ULPS_AROUND_ZERO * float64 * scale:
        return False
    # in float64 naive's error is the one of float32, scaled
    part = min(1.0, torch.finfo(dtype).eps / float32)
    return expected.own_error >= expected.magnitude / 2 * part


def _complaint(
    got: torch.Tensor,
    off: torch.Tensor,
    expected: _Expected,
    slack: float,
    tolerance: Tolerance,
    dtype: torch.dtype,
) -> str | None:
    """Return how far the tensor is off and what is allowed, or None where it is near enough."""
    eps, own_error, own_average, size = torch.finfo(dtype).eps, expected.own_error, expected.own_average, expected.size
    allowed = tolerance.factor * own_error + tolerance.ulps * eps * expected.magnitude + slack
    worst = off.abs().max().item()
    if not worst <= allowed:
        where = _where(got, expected)
        return f"{worst:.3g} at {where}; allowed {allowed:.3g} (naive's own error {own_error:.3g})"
    # where few elements outweigh the rest, naive's average error can be small by luck, as that of one element
    if expected.num_that_matter < _ENOUGH_FOR_AN_AVERAGE:
        return None
    average = _rms(off)
    # a quarter of an eps: about what one rounding of the result costs
    allowed = tolerance.rms_factor * (own_average + eps / 4 * size) + slack
    if not average <= allowed:
        allowed_and_why = f"allowed {allowed:.3g}: it rounds more often than naive"
        return f"{average:.3g} on average, naive by {own_average:.3g}, {allowed_and_why}"
    if tolerance.rms_ulps is not None and dtype in _IN_16_BITS:
        # below the normal numbers of the dtype each term of a product is off by up to half of eps * tiny
        allowed = tolerance.rms_ulps * eps * size + _TERMS_BELOW_NORMAL * eps * torch.finfo(dtype).tiny + slack
        if not average <= allowed:
            allowed_and_why = f"allowed {allowed:.3g}: it rounds what the form promises to keep in float32"
            return f"{average:.3g} on average, {allowed_and_why}"
    return None


def _where(got: torch.Tensor, expected: _Expected) -> str:
    """Describe the element with the largest error: its index, its value and the truth."""
    off = (got - expected.true).nan_to_num(nan=float("inf")).abs()
    flat = (off if expected.finite is None else off.masked_fill(~expected.finite, -1)).argmax()
    index = [int(i) for i in torch.unravel_index(flat, got.shape)]
    return f"{index}: {got.flatten()[flat]:.6g}, truth {expected.true.flatten()[flat]:.6g}"


def _compare_where_naive_overflows(name: str, got: torch.Tensor, expected: _Expected, dtype: torch.dtype) -> None:
    """Where naive is not finite in the working dtype, a form may do the same, or give the truth. Where naive overflows
    and the truth is finite, a form may overflow to another infinity or to NaN: it depends on the order of its sums."""
    true, rounded, finite = expected.true, expected.rounded, expected.finite
    assert finite is not None
    as_naive = (got == rounded) | (got.isnan() & rounded.isnan())
    is_near = (got - true).abs() <= _ROUNDINGS_WHERE_NAIVE_OVERFLOWS * torch.finfo(dtype).eps * true.abs()
    as_truth = (got == true) | (is_near & true.isfinite())
    overflows_too = true.isfinite() & ~got.isfinite()
    if not bool((as_naive | as_truth | overflows_too)[~finite].all()):
        raise Unequal(f"{name} is neither naive's nor the truth where naive is not finite")


def _picked(values: torch.Tensor, where: torch.Tensor | None) -> torch.Tensor:
    return values if where is None else values[where]


def _num_that_matter(values: torch.Tensor) -> float:
    """Return the effective number of elements: all of them where they are alike, 1 where one outweighs the rest."""
    squares = values.pow(2)
    return (squares.sum().pow(2) / squares.pow(2).sum()).nan_to_num(nan=0.0).item()


def _rms(values: torch.Tensor) -> float:
    return values.pow(2).mean().sqrt().item()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype hold the same values, bit by bit: a NaN equals itself."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    bits = _BITS[a.itemsize]
    return torch.equal(a.view(bits), b.view(bits))
