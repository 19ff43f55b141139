"""The draw that fixes one call of an op, and the input tensors that are made of it: layouts, values, patterns.

Rounding errors show where values of different sizes meet: a large sum to which small terms are added, two scores that
differ by little, a difference of two large sums. They average out among independent elements of one size. So whatever
the op, a tensor may also have a pattern:

- ``runs``: runs of large rows and of small rows along the longest axis;
- ``alike``: rows that differ from each other by little, so that their scores compete and their terms add up; not where
  values are extreme, since no digit of their differences would be left;
- for integers both mean the same: a few values are drawn most of the time.

A row is a vector along the last axis.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..contract import (
    LAYOUTS,
    PATTERNS,
    WORKING_DTYPES,
    Case,
    Contract,
    Cuts,
    FromFunction,
    Integers,
    Layout,
    LogUniform,
    Mask,
    Normal,
    ObjectSpec,
    Pattern,
    TensorSpec,
    Uniform,
)
from ..errors import ContractError, UsageError, did_you_mean

Upstream = Literal["dense", "expanded", "transposed", "masked", "partial"]
UPSTREAMS: tuple[Upstream, ...] = ("dense", "expanded", "transposed", "masked", "partial")
Mode = Literal["plain", "autocast", "autocast_float16", "twice", "no_grad", "inference"]
MODES: tuple[Mode, ...] = ("plain", "autocast", "autocast_float16", "twice", "no_grad", "inference")
WITHOUT_GRAPH: tuple[Mode, ...] = ("no_grad", "inference")
AUTOCASTS: Mapping[Mode, str] = {"autocast": "bfloat16", "autocast_float16": "float16"}
"""The dtype of each mode with autocast."""


@dataclass(frozen=True)
class Draw:
    """A case with everything else that fixes a call: values, their patterns, layouts, frozen inputs, and the gradient
    that arrives for its results (``gradients.py``).

    ``share`` is the share of elements that a ``sometimes`` value replaces, and of a mask that is True. Without one, as
    at the cases, nothing is replaced: a meter that knows no values and one that does then measure the same step.
    ``magnitude`` multiplies ``Normal`` inputs, in float16 by at most 8: products of larger ones overflow. It moves
    ``LogUniform`` inputs within their range: to ``low`` where it is large, to ``high`` where it is small.
    """

    case: Case
    seed: int = 0
    share: float | None = None
    magnitude: float = 1.0
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    patterns: Mapping[str, Pattern] = field(default_factory=dict)
    upstream: Upstream = "dense"
    spoiled: str | None = None
    """An input that has a NaN in every row."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Dtypes of inputs that differ from the declared ones (``TensorSpec.also_in``)."""
    mode: Mode = "plain"
    """``autocast``, ``autocast_float16``: the call is made under autocast to bfloat16, or to float16. ``twice``: its
    gradients are differentiated again. ``no_grad``, ``inference``: it is made without a graph, as in evaluation, by
    ``torch.no_grad`` or ``torch.inference_mode``."""

    @property
    def is_extreme(self) -> bool:
        """Whether its values are so large that their exponentials overflow in float32."""
        return self.magnitude > _MOST_IN_FLOAT16 and self.case.dtype != "float16"

    def spelled(self) -> str:
        """Return the draw as one line, which ``parsed`` reads back."""
        parts = [self.case.spelled(), f"seed={self.seed}"]
        parts += [f"share={self.share:g}"] if self.share is not None else []
        parts += [f"magnitude={self.magnitude:g}"] if self.magnitude != 1 else []
        parts += [f"layout.{name}={layout}" for name, layout in self.layouts.items() if layout != "contiguous"]
        parts += [f"pattern.{name}={pattern}" for name, pattern in self.patterns.items() if pattern != "even"]
        parts += [f"frozen={name}" for name in sorted(self.frozen)]
        parts += [f"upstream={self.upstream}"] if self.upstream != "dense" else []
        parts += [f"spoiled={self.spoiled}"] if self.spoiled is not None else []
        parts += [f"dtype.{name}={dtype}" for name, dtype in self.dtypes.items()]
        parts += [f"mode={self.mode}"] if self.mode != "plain" else []
        return ",".join(parts)

    @staticmethod
    def parsed(contract: Contract, text: str) -> Draw:
        """Read the draw that ``--at`` names, as ``spelled`` writes it."""
        settings: dict[str, Any] = {}
        own: dict[str, Any] = {}
        of_inputs: dict[str, dict[str, Any]] = {"layout": {}, "pattern": {}, "dtype": {}}
        frozen: set[str] = set()
        present: list[str] = []
        names = {spec.name for spec in contract.inputs}
        for part in re.split(r",(?![^(]*\))", text):  # a choice may be a tuple
            key, equals, value = part.strip().partition("=")
            if not equals:
                raise UsageError(f"--at is a list of name=value, got {part!r}")
            kind, dot, of_input = key.partition(".")
            named = of_input if dot else value if key in ("frozen", "present", "absent", "spoiled") else None
            if named is not None and named not in names:
                raise UsageError(f"--at: {contract.name} has no input {named!r}{did_you_mean(named, names)}")
            try:
                if dot and kind in of_inputs:
                    of_inputs[kind][of_input] = _READERS[f"{kind}."](value)
                elif key == "frozen":
                    frozen.add(value)
                elif key == "present":
                    present.append(value)
                elif key == "absent":  # an input that the case has
                    present.remove(value)
                elif key in _READERS:
                    own[key] = _READERS[key](value)
                elif key in contract.choices:
                    settings[key] = next(v for v in contract.choices[key] if str(v) == value)
                else:
                    settings[key] = value if key == "dtype" else int(value)
            except (ValueError, StopIteration):
                raise UsageError(f"--at: cannot read {part!r}") from None
        case = contract.case_of("drawn", {**settings, "present": present})
        own |= {f"{kind}s": values for kind, values in of_inputs.items()}
        return Draw(case, **own, frozen=frozenset(frozen))


def _one_of(known: Sequence[Any]) -> Callable[[str], Any]:
    return lambda value: known[known.index(value)]


_READERS: dict[str, Callable[[str], Any]] = {
    "seed": int, "share": float, "magnitude": float, "spoiled": str,
    "upstream": _one_of(UPSTREAMS), "mode": _one_of(MODES),
    "layout.": _one_of(LAYOUTS), "pattern.": _one_of(PATTERNS), "dtype.": _one_of(WORKING_DTYPES),
}  # fmt: skip


# ---------------------------------------------------------------- tensors
def make_inputs(contract: Contract, draw: Draw, device: str, *, values: bool = True) -> dict[str, Any]:
    """Return the inputs by name, without the optional ones that the case leaves out.

    Without ``values`` they are only laid out, which is all that a fake device needs. ``Cuts`` have their values either
    way, because shapes follow from them, and lie on the CPU.
    """
    generator = torch.Generator(device).manual_seed(draw.seed) if values else None
    present = (spec for spec in contract.inputs if not spec.optional or spec.name in draw.case.present)
    return {spec.name: make_input(spec, draw, device, generator) for spec in present}


def make_input(spec: TensorSpec, draw: Draw, device: str, generator: torch.Generator | None) -> Any:
    """Make one input of a call. Without a ``generator`` a tensor stays uninitialised, unless it holds ``Cuts``."""
    if isinstance(spec, ObjectSpec):
        return spec.made(draw.case.dims, draw.seed)
    layout, size = draw.layouts.get(spec.name, "contiguous"), spec.size(draw.case.dims)
    dtype = getattr(torch, draw.dtypes.get(spec.name) or spec.dtype_at(draw.case))
    if isinstance(spec.values, Cuts):
        with _disable_current_modes():
            cuts = _cuts(size[0], draw.case.dims[spec.values.dim], draw.seed)
            return laid_out(size, dtype, "cpu", layout).copy_(cuts)
    tensor = laid_out(size, dtype, device, layout)
    if generator is not None:
        tensor.copy_(make_values(spec, draw, dtype, generator))
        if spec.name == draw.spoiled and tensor.numel():
            (tensor.select(-1, draw.seed % tensor.shape[-1]) if tensor.dim() else tensor).fill_(torch.nan)
    return tensor.requires_grad_(spec.grad and spec.name not in draw.frozen)


def laid_out(size: tuple[int, ...], dtype: torch.dtype, device: str | torch.device, layout: Layout) -> torch.Tensor:
    """Return an uninitialised tensor of ``size``: ``strided`` with a gap after every element and before the first;
    ``sliced`` as a slice of a wider tensor, whose rows are contiguous, and from three axes on with the two axes before
    the last swapped, like attention heads.
    """
    if layout == "transposed" and len(size) > 1:
        return torch.empty(size[::-1], dtype=dtype, device=device).permute(*range(len(size))[::-1])
    if layout == "strided" and size:
        return torch.empty((*size[:-1], 2 * size[-1] + 1), dtype=dtype, device=device)[..., 1::2]
    if layout == "sliced" and size:
        swapped = (*size[:-3], *size[-3:-1][::-1], size[-1] + 2)
        tensor = torch.empty(swapped, dtype=dtype, device=device)[..., 1:-1]
        return tensor.transpose(-3, -2) if len(size) > 2 else tensor
    return torch.empty(size, dtype=dtype, device=device)


# ---------------------------------------------------------------- values
_SHARE_OF_A_MASK = 0.3
_MOST_IN_FLOAT16 = 8.0
_SMALL = 1 / 32  # the size of small rows
_ROUNDINGS_APART = 1  # what rows that are alike differ by, in roundings of their dtype
_RUN = 8  # rows, on average
_LOG_POWER = 8.0  # draws a log-uniform value to the large end of its range; its inverse to the small one
_INTEGER_POWER = 4  # of 50 values the first then comes up in 4 of 10 places
_MOST_COMPARED = 1 << 20  # elements of a function's values that are made twice, to see whether they are the same


def make_values(spec: TensorSpec, draw: Draw, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return the elements of an input, as ``TensorSpec`` and ``Draw`` say; floating ones are not yet rounded."""
    case, share, pattern = draw.case, draw.share, draw.patterns.get(spec.name, "even")
    size = spec.size(case.dims)
    made: dict[str, Any] = {"generator": generator, "device": generator.device}
    chance = torch.rand(size, **made)
    values = spec.values
    if isinstance(values, Mask):
        return chance < (_SHARE_OF_A_MASK if share is None else share)
    if isinstance(values, Integers):
        tensor = _integers(*values.range_at(case.dims), size, dtype, made, pattern)
    elif isinstance(values, FromFunction):
        own = torch.Generator().manual_seed(generator.initial_seed() + zlib.crc32(spec.name.encode()))
        tensor = _from_function(spec, values, size, own, case.dims, dtype).to(generator.device)
    else:
        made["dtype"] = torch.float64 if dtype == torch.float64 else torch.float32
        magnitude = min(draw.magnitude, _MOST_IN_FLOAT16) if case.dtype == "float16" else draw.magnitude
        tensor = _floats(values, case.dims, size, made, magnitude, pattern)
        if pattern == "alike" and not draw.is_extreme:
            tensor = _alike(tensor, _ROUNDINGS_APART * torch.finfo(dtype).eps)
    if spec.sometimes is not None:
        value = case.choices[spec.sometimes] if isinstance(spec.sometimes, str) else spec.sometimes
        tensor = tensor.masked_fill(chance < (share or 0), value)
    return tensor


def _cuts(number: int, total: int, seed: int) -> torch.Tensor:
    """Return ``number`` sorted integers from 0 to ``total``."""
    generator = torch.Generator("cpu").manual_seed(seed)
    inner = torch.randint(0, total + 1, (max(0, number - 2),), generator=generator).sort().values
    return torch.cat([torch.tensor([0]), inner, torch.tensor([total])])


def _integers(
    low: int, high: int, size: tuple[int, ...], dtype: torch.dtype, made: dict[str, Any], pattern: Pattern
) -> torch.Tensor:
    if pattern == "even":
        return torch.randint(low, high, size, dtype=dtype, **made)
    place = torch.rand(size, dtype=torch.float64, **made) ** _INTEGER_POWER
    return (low + place * (high - low)).floor().to(dtype)


def _floats(
    values: object, dims: Mapping[str, int], size: tuple[int, ...], made: dict[str, Any], magnitude: float,
    pattern: Pattern,
) -> torch.Tensor:  # fmt: skip
    match values:
        case Normal(scale, fan_in):
            deviation = magnitude * (scale if fan_in is None else scale / math.sqrt(dims[fan_in]))
            return _patterned(deviation * torch.randn(size, **made), 0.0, pattern, made)
        case Uniform(low, high):
            drawn = torch.rand(size, **made)
            return _patterned(low + (high - low) * drawn, min(max(0.0, low), high), pattern, made)
        case LogUniform(low, high):
            drawn = torch.rand(size, **made)
            power: torch.Tensor | float = magnitude
            if pattern == "runs":
                power = torch.where(_large_rows(size, made), _LOG_POWER, 1 / _LOG_POWER)
            return low * (math.log(high / low) * drawn**power).exp()
    raise AssertionError(f"no values are made for {values!r}")


def _from_function(
    spec: TensorSpec, values: FromFunction, size: tuple[int, ...], generator: torch.Generator,
    dims: Mapping[str, int], dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Return the function's tensor, if it has the right shape and dtype, and is the same in a second call."""

    def refuse(reason: str) -> NoReturn:
        raise ContractError(f"input {spec.name!r}: {values!r} must return {reason}")

    state = generator.get_state()
    tensor = values.function(size, generator, dict(dims))
    if not isinstance(tensor, torch.Tensor) or tensor.shape != size:
        got = f"shape {[*tensor.shape]}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        refuse(f"a tensor of shape {[*size]}, got {got}")
    kind = _kind_of(dtype)
    if _kind_of(tensor.dtype) != kind:
        refuse(f"{kind} values for an input of {dtype}, got {tensor.dtype}")
    if kind == "integer" and not torch.equal(tensor.to(dtype).to(tensor.dtype), tensor):
        refuse(f"values that {dtype} can hold, got {tensor.min()} to {tensor.max()}")
    if tensor.numel() <= _MOST_COMPARED:
        again = values.function(size, generator.set_state(state), dict(dims))
        if not torch.allclose(tensor, again, rtol=0, atol=0, equal_nan=True):
            refuse("the same values for the same seed; take all random numbers from its generator")
    return tensor.detach()


def _kind_of(dtype: torch.dtype) -> str:
    return "bool" if dtype == torch.bool else "floating" if dtype.is_floating_point else "integer"


def _patterned(values: torch.Tensor, least: float, pattern: Pattern, made: dict[str, Any]) -> torch.Tensor:
    """Apply the pattern ``runs``: small rows are near ``least``, the value of smallest magnitude in the range."""
    if pattern == "runs":
        return torch.where(_large_rows(tuple(values.shape), made), values, least + _SMALL * (values - least))
    return values


def _alike(values: torch.Tensor, share: float) -> torch.Tensor:
    """Move all rows towards the first, to a ``share`` of their distance from it."""
    if not values.numel():
        return values
    first = values[(0,) * max(1, values.dim() - 1)] if values.dim() else values
    return first + share * (values - first)


def _large_rows(size: tuple[int, ...], made: dict[str, Any]) -> torch.Tensor:
    """Return which rows are large, ``[..., 1]``: in runs along the longest axis of rows, other runs in each line."""
    if not size:
        return torch.ones(size, dtype=torch.bool, device=made["device"])
    rows = (*size[:-1], 1) if len(size) > 1 else size
    axis = max(range(max(1, len(rows) - 1)), key=lambda axis: rows[axis])
    changes = torch.rand(rows, **made) < 1 / _RUN
    first = changes.narrow(axis, 0, min(1, rows[axis]))
    first.copy_(torch.rand(first.shape, **made) < 0.5)
    return changes.cumsum(axis) % 2 == 0
