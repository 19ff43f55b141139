"""A draw fixes one call of an op: makes its input tensors, calls a form on them, and builds the steps of a meter."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..contract import LAYOUTS, PATTERNS, WORKING_DTYPES, Case, Contract, Cuts, Integers, Layout, ObjectSpec, Pattern
from ..errors import UsageError, did_you_mean
from ..laws import Phase
from ..meters.base import Step
from ..meters.stages import stage
from .values import make_cuts, make_values

Upstream = Literal["dense", "expanded", "transposed", "masked", "partial"]
UPSTREAMS: tuple[Upstream, ...] = ("dense", "expanded", "transposed", "masked", "partial")
Mode = Literal["plain", "autocast", "twice"]
MODES: tuple[Mode, ...] = ("plain", "autocast", "twice")


@dataclass(frozen=True)
class Draw:
    """A case with everything else that fixes a call: values, their patterns, layouts, frozen inputs, and the gradient
    that arrives for its results (``upstream.py``).

    ``share`` is the share of elements that a ``sometimes`` value replaces, and of a mask that is True. Without one, as
    at the cases, nothing is replaced: a meter that knows no values and one that does then measure the same step.
    ``magnitude`` multiplies ``Normal`` inputs. ``LogUniform`` ones it moves within their range: to ``low`` where it is
    large, to ``high`` where it is small.
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
    """The dtypes of inputs that do not have their own (``TensorSpec.also_in``)."""
    mode: Mode = "plain"
    """``autocast``: the call is made under bfloat16 autocast. ``twice``: its gradients are differentiated again."""

    def spelled(self) -> str:
        """The draw on one line; ``parsed`` reads it back."""
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
        """The draw that ``--at`` names, as ``spelled`` writes it."""
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
                elif key == "absent":  # of what a case has
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


def make_inputs(contract: Contract, draw: Draw, device: str, *, values: bool = True) -> dict[str, Any]:
    """The inputs by name, without the optional ones that the case leaves out.

    Without ``values`` they are only laid out, which is all that a fake device needs. ``Cuts`` have their values either
    way, because shapes follow from them, and lie on the CPU.
    """
    generator = torch.Generator(device).manual_seed(draw.seed) if values else None
    tensors: dict[str, Any] = {}
    for spec in contract.inputs:
        if spec.optional and spec.name not in draw.case.present:
            continue
        if isinstance(spec, ObjectSpec):
            tensors[spec.name] = spec.made(draw.case.dims, draw.seed)
            continue
        layout = draw.layouts.get(spec.name, "contiguous")
        size = spec.size(draw.case.dims)
        dtype = getattr(torch, draw.dtypes.get(spec.name) or spec.dtype_at(draw.case))
        if isinstance(spec.values, Cuts):
            with _disable_current_modes():
                cuts = make_cuts(size[0], draw.case.dims[spec.values.dim], draw.seed)
                tensors[spec.name] = laid_out(size, dtype, "cpu", layout).copy_(cuts)
            continue
        tensor = laid_out(size, dtype, device, layout)
        if generator is not None:
            made = make_values(
                spec, draw.case, dtype, generator,
                share=draw.share, magnitude=draw.magnitude, pattern=draw.patterns.get(spec.name, "even"),
            )  # fmt: skip
            tensor.copy_(made)
            if spec.name == draw.spoiled and tensor.numel():
                (tensor.select(-1, draw.seed % tensor.shape[-1]) if tensor.dim() else tensor).fill_(torch.nan)
        tensors[spec.name] = tensor.requires_grad_(spec.grad and spec.name not in draw.frozen)
    return tensors


def laid_out(size: tuple[int, ...], dtype: torch.dtype, device: str | torch.device, layout: Layout) -> torch.Tensor:
    """An empty tensor of ``size``; ``strided`` leaves a gap after every element and before the first."""
    if layout == "transposed" and len(size) > 1:
        return torch.empty(size[::-1], dtype=dtype, device=device).permute(*range(len(size))[::-1])
    if layout == "strided" and size:
        return torch.empty((*size[:-1], 2 * size[-1] + 1), dtype=dtype, device=device)[..., 1::2]
    return torch.empty(size, dtype=dtype, device=device)


def call_form(contract: Contract, form: str, draw: Draw, tensors: Mapping[str, torch.Tensor]) -> Any:
    inputs = (tensors.get(spec.name) for spec in contract.inputs)
    return contract.function(form)(*inputs, **contract.options(form, draw.case))


def read_to_end(result: Any) -> Any:
    """The result, or None after an iterator was read as a loop over batches does: an item lives until the next."""
    if not isinstance(result, Iterator):
        return result
    for _ in result:
        pass
    return None


def output_tensors(result: Any) -> list[torch.Tensor]:
    """A form's result as a list: one tensor, or a tuple of them."""
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    for output in outputs:
        if not isinstance(output, torch.Tensor):
            raise TypeError(f"a form must return a tensor or a tuple of tensors, got {type(output).__name__}")
    return outputs


@dataclass(frozen=True)
class StepOf:
    """Builds the step that a meter measures: one form, one case, one phase. Plain data, so it travels to a child."""

    contract: Contract
    form: str
    draw: Draw
    phase: Phase

    def __call__(self, device: str) -> Step:
        return _Steps(self.contract, self.form, self.draw, device).by_phase()[self.phase]


@dataclass(frozen=True)
class StepsOf:
    """Builds the steps of several phases on the same fake inputs. Each is run once, without a warm-up.

    A train step marks the point where its forward ends (``HELD``), so that ``held`` needs no run of its own.
    """

    contract: Contract
    form: str
    draw: Draw
    phases: Sequence[Phase]

    def __call__(self, device: str) -> Iterator[Step]:
        steps = _Steps(self.contract, self.form, self.draw, device)
        by_phase = {**steps.by_phase(), "train": steps.first_train}
        for phase in self.phases:
            yield by_phase[phase]
            steps.drop_upstreams()  # they count as inputs, and so have to live until the step is measured


HELD = "held"
"""The mark of a train step between its forward and its backward."""


class _Steps:
    """The step of each phase of a form, and the tensors that the steps run on."""

    def __init__(self, contract: Contract, form: str, draw: Draw, device: str) -> None:
        from torch._subclasses.fake_tensor import FakeTensor

        self._contract, self._form, self._draw = contract, form, draw
        is_fake = isinstance(torch.empty(0, device=device), FakeTensor)
        self._tensors = make_inputs(contract, draw, device, values=not is_fake)
        self._upstreams: list[torch.Tensor] = []
        self._as_inputs: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        if is_fake:
            from ..meters.simulated.tracking import counted_as_inputs

            self._as_inputs = counted_as_inputs
            self._state_ranges_of_integers()

    def by_phase(self) -> dict[Phase, Step]:
        return {"forward": self.forward, "held": self.held, "train": self.train}

    def forward(self) -> object:
        with torch.no_grad():
            return read_to_end(self.held())

    def held(self) -> object:
        return call_form(self._contract, self._form, self._draw, self._tensors)

    def train(self) -> None:
        self._backward(output_tensors(self.held()))

    def first_train(self) -> None:
        outputs = output_tensors(self.held())
        stage(HELD)
        self._backward(outputs)

    def drop_upstreams(self) -> None:
        self._upstreams = []

    def _backward(self, results: list[torch.Tensor]) -> None:
        """Run the backward. Results without a gradient stay alive as well, as a caller keeps them."""
        outputs = [tensor for tensor in results if tensor.requires_grad]
        if not self._upstreams:  # counted as an input, though its shape is only known after the forward
            with self._as_inputs():
                self._upstreams = [torch.ones_like(output) for output in outputs]
        torch.autograd.backward(outputs, self._upstreams)
        for tensor in self._tensors.values():
            tensor.grad = None

    def _state_ranges_of_integers(self) -> None:
        """State the range from which real integers would be drawn: what follows from it is then no assumption."""
        from ..meters.simulated.tracking import state_range

        for spec in self._contract.inputs:
            is_replaced = spec.sometimes is not None and self._draw.share
            if spec.name in self._tensors and isinstance(spec.values, Integers) and not is_replaced:
                state_range(self._tensors[spec.name], *spec.values.range_at(self._draw.case.dims))


def phases_of(contract: Contract) -> tuple[Phase, ...]:
    """A contract without gradients has only a forward."""
    return ("forward", "held", "train") if any(spec.grad for spec in contract.inputs) else ("forward",)
