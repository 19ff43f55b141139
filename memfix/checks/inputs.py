"""From a contract and a draw to tensors, calls and steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..contract import LAYOUTS, PATTERNS, WORKING_DTYPES, Case, Contract, Layout, Pattern
from ..errors import UsageError, did_you_mean
from ..laws import Phase
from ..meters.base import Step
from ..meters.stages import stage
from .values import make_values

Upstream = Literal["dense", "expanded", "transposed", "masked", "partial"]
UPSTREAMS: tuple[Upstream, ...] = ("dense", "expanded", "transposed", "masked", "partial")
Mode = Literal["plain", "autocast", "twice"]
MODES: tuple[Mode, ...] = ("plain", "autocast", "twice")


@dataclass(frozen=True)
class Draw:
    """A case with everything else that fixes a call: values, their patterns, layouts, frozen inputs, and the gradient
    that arrives for its results (``upstream.py``).

    ``share`` is how often a ``sometimes`` value stands, and how much of a mask is set; ``magnitude`` multiplies inputs
    that are drawn as normal, and draws log-uniform ones to the end of their range that it names, ``low`` where it is
    large. Without a share, as at the cases, no ``sometimes`` value stands: a meter that knows no
    values and one that does then measure the same step.
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
        settings: dict[str, Any] = {}
        layouts: dict[str, Layout] = {}
        patterns: dict[str, Pattern] = {}
        dtypes: dict[str, str] = {}
        frozen: set[str] = set()
        present: list[str] = []
        own: dict[str, Any] = {}
        readers: dict[str, Callable[[str], Any]] = {
            "seed": int, "share": float, "magnitude": float,
            "upstream": lambda value: UPSTREAMS[UPSTREAMS.index(value)], "spoiled": str,
            "mode": lambda value: MODES[MODES.index(value)],
        }  # fmt: skip
        names = {spec.name for spec in contract.inputs}
        for part in text.split(","):
            key, equals, value = part.strip().partition("=")
            if not equals:
                raise UsageError(f"--at is a list of name=value, got {part!r}")
            speaks_of_value = key in ("frozen", "present", "spoiled")
            kind, dot, of_input = key.partition(".")
            named = of_input if dot else value if speaks_of_value else None
            if named is not None and named not in names:
                raise UsageError(f"--at: {contract.name} has no input {named!r}{did_you_mean(named, names)}")
            try:
                if kind == "layout" and dot:
                    layouts[of_input] = LAYOUTS[LAYOUTS.index(value)]
                elif kind == "pattern" and dot:
                    patterns[of_input] = PATTERNS[PATTERNS.index(value)]
                elif kind == "dtype" and dot:
                    dtypes[of_input] = WORKING_DTYPES[WORKING_DTYPES.index(value)]
                elif key == "frozen":
                    frozen.add(value)
                elif key == "present":
                    present.append(value)
                elif key in readers:
                    own[key] = readers[key](value)
                elif key in contract.choices:
                    settings[key] = next(v for v in contract.choices[key] if str(v) == value)
                else:
                    settings[key] = value if key == "dtype" else int(value)
            except (ValueError, StopIteration):
                raise UsageError(f"--at: cannot read {part!r}") from None
        case = contract.case_of("drawn", {**settings, "present": present})
        return Draw(case, **own, layouts=layouts, frozen=frozenset(frozen), patterns=patterns, dtypes=dtypes)


def make_inputs(contract: Contract, draw: Draw, device: str, *, values: bool = True) -> dict[str, torch.Tensor]:
    """The input tensors by name, but for optional ones that the case leaves out.

    Without ``values`` they are only laid out, which is all that a fake device needs. Cumulative lengths, which shapes
    follow from, are there either way, and on the CPU.
    """
    generator = torch.Generator(device).manual_seed(draw.seed) if values else None
    tensors = {}
    for spec in contract.inputs:
        if spec.optional and spec.name not in draw.case.present:
            continue
        layout = draw.layouts.get(spec.name, "contiguous")
        size = spec.size(draw.case.dims)
        dtype = getattr(torch, draw.dtypes.get(spec.name) or spec.dtype_at(draw.case))
        if spec.cumulative is not None:
            tensors[spec.name] = _cuts(size[0], draw.case.dims[spec.cumulative], dtype, layout, draw.seed)
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


def _cuts(number: int, total: int, dtype: torch.dtype, layout: Layout, seed: int) -> torch.Tensor:
    """``number`` sorted integers from 0 to ``total``, real ones even on a fake device; the same on every device."""
    with _disable_current_modes():
        generator = torch.Generator("cpu").manual_seed(seed)
        inner = torch.randint(0, total + 1, (max(0, number - 2),), generator=generator).sort().values
        cuts = laid_out((number,), dtype, "cpu", layout)
        return cuts.copy_(torch.cat([torch.tensor([0]), inner, torch.tensor([total])]))


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
        steps: dict[Phase, Step] = _Steps(self.contract, self.form, self.draw, device).by_phase()
        return steps[self.phase]


@dataclass(frozen=True)
class StepsOf:
    """Builds the steps of several phases on the same fake inputs, each to be run once, without a warm-up.

    A train step marks the point where its forward ends (``HELD``), so that nothing has to run for ``held`` alone.
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
            steps.drop_upstreams()  # which were inputs, and so stay until the step is measured


HELD = "held"
"""The mark of a train step between its forward and its backward."""


class _Steps:
    """What a form does in each phase, with the tensors that it does it to."""

    def __init__(self, contract: Contract, form: str, draw: Draw, device: str) -> None:
        from torch._subclasses.fake_tensor import FakeTensor

        self._contract, self._form, self._draw = contract, form, draw
        is_fake = isinstance(torch.empty(0, device=device), FakeTensor)
        self._tensors = make_inputs(contract, draw, device, values=not is_fake)
        self._upstreams: list[torch.Tensor] = []
        self._as_inputs: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        if is_fake:
            from ..meters.simulated.tracking import existing_before

            self._as_inputs = existing_before
            self._state_what_real_ones_would_be()

    def by_phase(self) -> dict[Phase, Step]:
        return {"forward": self.forward, "held": self.held, "train": self.train}

    def forward(self) -> object:
        with torch.no_grad():
            return call_form(self._contract, self._form, self._draw, self._tensors)

    def held(self) -> object:
        return call_form(self._contract, self._form, self._draw, self._tensors)

    def train(self) -> None:
        self._backward(self._differentiable_outputs())

    def first_train(self) -> None:
        outputs = self._differentiable_outputs()
        stage(HELD)
        self._backward(outputs)

    def drop_upstreams(self) -> None:
        self._upstreams = []

    def _differentiable_outputs(self) -> list[torch.Tensor]:
        return [tensor for tensor in output_tensors(self.held()) if tensor.requires_grad]

    def _backward(self, outputs: list[torch.Tensor]) -> None:
        if not self._upstreams:  # counted as an input, though its shape is only known after the forward
            with self._as_inputs():
                self._upstreams = [torch.ones_like(output) for output in outputs]
        torch.autograd.backward(outputs, self._upstreams)
        for tensor in self._tensors.values():
            tensor.grad = None

    def _state_what_real_ones_would_be(self) -> None:
        """Integers in the range that they would be drawn from: what follows from it is then no assumption."""
        from ..meters.simulated.assumptions import state_range

        for spec in self._contract.inputs:
            is_drawn_from_range = spec.high is not None and (spec.sometimes is None or not self._draw.share)
            if spec.name in self._tensors and not spec.is_floating and is_drawn_from_range:
                high = self._draw.case.dims[spec.high] if isinstance(spec.high, str) else spec.high
                state_range(self._tensors[spec.name], int(spec.low or 0), int(high or 0))


def phases_of(contract: Contract) -> tuple[Phase, ...]:
    """A contract without gradients has only a forward."""
    return ("forward", "held", "train") if any(spec.grad for spec in contract.inputs) else ("forward",)


def phases_beside(phases: Sequence[Phase]) -> list[Phase]:
    """What is read beside ``phases`` without a step of its own; an entry of 0 bytes is left out."""
    return ["saved", "kept"] if "train" in phases else ["kept"]
