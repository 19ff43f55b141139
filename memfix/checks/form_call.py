"""One form at one call: its inputs, what it returns for them, and the steps that a meter measures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..contract import Contract, Integers
from ..laws import NAIVE, Phase
from ..meters.base import Step
from ..meters.stages import stage
from .finding import Finding, Status
from .inputs import AUTOCASTS, Draw, make_inputs
from .variants import variants

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class FormCall:
    """A form, and the draw that fixes its call.

    In equality checks a quarter of a dtype's calls come second: another call with the same tensors runs first, whose
    values then change in place, so that a cached answer is wrong. Another quarter repeats the backward. In the others
    the inputs are no leaves of the graph. Each draw does all three, in different dtypes.
    """

    contract: Contract
    form: str
    draw: Draw

    @staticmethod
    def at_case(contract: Contract, form: str, case: str) -> FormCall:
        """Return the call at a case, or at a variant of the smallest one."""
        draw = Draw(contract.cases[case]) if case in contract.cases else variants(contract)[case]
        return FormCall(contract, form, draw)

    def of(self, form: str) -> FormCall:
        """The same call of another form."""
        return replace(self, form=form)

    @property
    def phases(self) -> tuple[Phase, ...]:
        return phases_of(self.contract)

    def step(self, phase: Phase) -> StepOf:
        """Return what a meter measures: it builds the step of one phase."""
        return StepOf(self.contract, self.form, self.draw, phase)

    def finding(self, check: str, status: Status, message: str, phase: Phase | None = None, **more: Any) -> Finding:
        """A finding about this form at this case."""
        case = self.draw.case.name
        return Finding(check, self.contract.name, self.form, status, message, case, phase, **more)

    @property
    def command(self) -> str:
        """The command that checks this call again."""
        return f"memfix check {self.contract.name} --form {self.form} --at {self.draw.spelled()}"

    def inputs(self, device: str, *, other: bool = False, values: bool = True) -> dict[str, torch.Tensor]:
        """The input tensors, or ``other`` ones of the same shape, now and then with all of a mask set.

        Without ``values`` they are only laid out.
        """
        sets_all = other and self.draw.share is not None and self.draw.seed // 4 % 2 == 0
        share = 1.0 if sets_all else self.draw.share
        draw = replace(self.draw, seed=self.draw.seed + other, share=share)
        return make_inputs(self.contract, draw, device, values=values)

    def result(self, tensors: Tensors) -> Any:
        inputs = (tensors.get(spec.name) for spec in self.contract.inputs)
        left_out = self.left_to_defaults
        # a number is a new object in each call, as a caller's is, so that a cache by its id is soon wrong
        options = {
            name: value * 1.0 if type(value) is float else value
            for name, value in self.contract.options(self.form, self.draw.case).items()
            if name not in left_out
        }
        with refusing_exit():
            return self.contract.function(self.form)(*inputs, **options)

    def outputs(self, tensors: Tensors) -> list[torch.Tensor]:
        """The form's result as a list, under autocast or without a graph where the draw says so."""
        device, mode = next(iter(tensors.values())).device.type, self.draw.mode
        with (
            torch.autocast(device, self.rounded_to, enabled=mode in AUTOCASTS),
            torch.inference_mode() if mode == "inference" else torch.set_grad_enabled(mode != "no_grad"),
        ):
            return output_tensors(self.result(tensors))

    @property
    def left_to_defaults(self) -> list[str]:
        """The choices that this call leaves out: those with naive's default, which must be the form's default too. Half
        of the draws leave out what they can."""
        if self.draw.seed % 2 == 0:
            return []
        own, naives = (self.contract.defaults(form) for form in (self.form, NAIVE))
        chosen = self.draw.case.choices
        return [name for name in chosen if name in own and name in naives and _same(chosen[name], naives[name])]

    @property
    def comes_second(self) -> bool:
        return self._turn == 0

    def before(self) -> FormCall:
        """The call that runs before one that comes second: every other time with the next value of each choice, so that
        a cache that ignores a choice, or knows a number by its id, is wrong; and every other time in inference mode, so
        that a table that it makes cannot be saved for backward."""
        draw, values = self.draw, self.contract.choices
        case, choices = draw.case, dict(draw.case.choices)
        if draw.seed // 8 % 2:
            choices = {name: several[several.index(choices[name]) - 1] for name, several in values.items()}
        mode = "inference" if draw.mode == "plain" and draw.seed // 16 % 2 else draw.mode
        return replace(self, draw=replace(draw, case=replace(case, choices=choices), mode=mode))

    @property
    def takes_leaves(self) -> bool:
        return self._turn < 2

    @property
    def num_backwards(self) -> int:
        return 2 if self._turn == 1 else 1

    @property
    def _turn(self) -> int:
        dtypes, dtype = [*self.contract.dtypes], self.draw.case.dtype
        return (self.draw.seed + (dtypes.index(dtype) if dtype in dtypes else 0)) % 4

    @property
    def rounded_to(self) -> torch.dtype:
        """The dtype whose roundings a form may make."""
        dtype: torch.dtype = getattr(torch, AUTOCASTS.get(self.draw.mode, self.draw.case.dtype))
        return dtype


def _same(one: object, other: object) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, (bool, int, float, str)) and one == other)


def phases_of(contract: Contract) -> tuple[Phase, ...]:
    """Return the phases that have a step of their own: without gradients only the forward."""
    return ("forward", "held", "train") if any(spec.grad for spec in contract.inputs) else ("forward",)


@contextlib.contextmanager
def refusing_exit() -> Iterator[None]:
    """Raise an error for a form that calls ``sys.exit``, which would end the gate, even with 0."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code!r})") from error


def read_to_end(result: Any) -> Any:
    """Return the result, or None for an iterator, which is read as a loop would: an item lives until the next."""
    if not isinstance(result, Iterator):
        return result
    for _ in result:
        pass
    return None


def output_tensors(result: Any) -> list[torch.Tensor]:
    """Return a form's result, a tensor or a tuple of them, as a list."""
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    for output in outputs:
        if not isinstance(output, torch.Tensor):
            raise TypeError(f"a form must return a tensor or a tuple of tensors, got {type(output).__name__}")
    return outputs


# ---------------------------------------------------------------- what a meter measures
@dataclass(frozen=True)
class StepOf:
    """Builds the step that a meter measures: one form, one case, one phase. Plain data that can be pickled."""

    contract: Contract
    form: str
    draw: Draw
    phase: Phase

    def __call__(self, device: str) -> Step:
        return _Steps(FormCall(self.contract, self.form, self.draw), device).by_phase()[self.phase]


@dataclass(frozen=True)
class StepsOf:
    """Builds the steps of several phases on the same fake inputs. Each is run once, without a warm-up.

    A train step marks the point where its forward ends (``HELD``), so that ``held`` needs no run of its own.
    """

    call: FormCall
    phases: Sequence[Phase]

    def __call__(self, device: str) -> Iterator[Step]:
        steps = _Steps(self.call, device)
        by_phase = {**steps.by_phase(), "train": steps.first_train}
        for phase in self.phases:
            yield by_phase[phase]
            steps.drop_upstreams()  # upstream gradients count as inputs, so they live until the step is measured


HELD = "held"
"""The mark of a train step between its forward and its backward."""


class _Steps:
    """The step of each phase of a form, and the tensors that the steps run on."""

    def __init__(self, call: FormCall, device: str) -> None:
        from torch._subclasses.fake_tensor import FakeTensor

        self._call = call
        is_fake = isinstance(torch.empty(0, device=device), FakeTensor)
        self._tensors = call.inputs(device, values=not is_fake)
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
        return self._call.result(self._tensors)

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
        """State the range of real integers to the simulation: results that follow from it are then no assumption."""
        from ..meters.simulated.tracking import state_range

        draw = self._call.draw
        for spec in self._call.contract.inputs:
            is_replaced = spec.sometimes is not None and draw.share
            if spec.name in self._tensors and isinstance(spec.values, Integers) and not is_replaced:
                state_range(self._tensors[spec.name], *spec.values.range_at(draw.case.dims))
