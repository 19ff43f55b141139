"""One form at one call: the object that equality and memory checks pass on, instead of a contract with its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..contract import Contract
from ..laws import NAIVE, Phase
from .finding import Finding, Status
from .inputs import Draw, StepOf, call_form, make_inputs, output_tensors, phases_of

Tensors = Mapping[str, torch.Tensor]
_REFUSALS = ("second derivative", "differentiate twice")
"""What a refusal says where it does not name the op; the second are torch's words for ``once_differentiable``."""


@dataclass(frozen=True)
class FormCall:
    """A form, and the draw that fixes its call.

    In equality checks a quarter of the calls of a dtype come second, after another call of the same shape, so that a
    cached answer is wrong. Another quarter repeats backward, where the op promises that. Each draw does both, in
    different dtypes.
    """

    contract: Contract
    form: str
    draw: Draw

    @staticmethod
    def at_case(contract: Contract, form: str, case: str) -> FormCall:
        return FormCall(contract, form, Draw(contract.cases[case]))

    def of(self, form: str) -> FormCall:
        """The same call of another form."""
        return replace(self, form=form)

    def shortened(self) -> FormCall:
        """The same call with short axes: a few chunks of two."""
        contract, case = self.contract, self.draw.case
        axes = contract.shape_dims()

        def short(dim: str) -> int:
            spec = contract.dims[dim]
            wanted = max(1, spec.low) * (4 if dim in axes else 2)
            return -(-wanted // spec.multiple_of) * spec.multiple_of

        dims = {dim: min(size, short(dim)) for dim, size in case.dims.items()}
        return replace(self, draw=replace(self.draw, case=replace(case, dims=dims)))

    @property
    def phases(self) -> tuple[Phase, ...]:
        return phases_of(self.contract)

    def step(self, phase: Phase) -> StepOf:
        """What a meter measures."""
        return StepOf(self.contract, self.form, self.draw, phase)

    def finding(self, check: str, status: Status, message: str, phase: Phase | None = None, **more: Any) -> Finding:
        """A finding about this form at this case."""
        case = self.draw.case.name
        return Finding(check, self.contract.name, self.form, status, message, case, phase, **more)

    def inputs(self, device: str, *, other: bool = False, values: bool = True) -> dict[str, torch.Tensor]:
        """The input tensors, or ``other`` ones of the same shape. Without ``values`` they are only laid out."""
        return make_inputs(self.contract, replace(self.draw, seed=self.draw.seed + other), device, values=values)

    def result(self, tensors: Tensors) -> Any:
        return call_form(self.contract, self.form, self.draw, tensors)

    def outputs(self, tensors: Tensors) -> list[torch.Tensor]:
        """The form's result as a list, under bfloat16 autocast where the draw says so."""
        device = next(iter(tensors.values())).device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.draw.mode == "autocast"):
            return output_tensors(self.result(tensors))

    @property
    def comes_second(self) -> bool:
        return self._turn == 0

    @property
    def num_backwards(self) -> int:
        return 2 if self._turn == 1 and self.contract.repeats_backward else 1

    @property
    def _turn(self) -> int:
        dtypes, dtype = [*self.contract.dtypes], self.draw.case.dtype
        return (self.draw.seed + (dtypes.index(dtype) if dtype in dtypes else 0)) % 4

    @property
    def rounded_to(self) -> torch.dtype:
        """The dtype whose roundings a form may make."""
        dtype: torch.dtype = torch.bfloat16 if self.draw.mode == "autocast" else getattr(torch, self.draw.case.dtype)
        return dtype

    def may_refuse_backward(self, number: int, error: RuntimeError) -> bool:
        """A form may refuse a second backward by the name of the op, unless its contract says that it repeats it."""
        return number > 0 and not self.contract.repeats_backward_of(self.form) and self.contract.name in str(error)

    def may_refuse_second_derivative(self, error: RuntimeError) -> bool:
        """A form may, in words. Naive may have none that torch knows: then there is nothing to compare with."""
        return self.form == NAIVE or any(words in str(error) for words in (self.contract.name, *_REFUSALS))
