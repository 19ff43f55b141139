"""One form at one drawn call: what the rooms of equality pass on to each other in place of a contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..contract import Contract
from ..laws import NAIVE
from .inputs import Draw, call_form, make_inputs, output_tensors

Tensors = Mapping[str, torch.Tensor]
_REFUSALS = ("second derivative", "differentiate twice")
"""What a refusal says where it does not name the op; the second are torch's words for ``once_differentiable``."""


@dataclass(frozen=True)
class FormCall:
    """A quarter of the calls of a dtype come second, after another call of the same shape, so that a cached answer is
    the wrong one. Another quarter repeats backward, where the op promises that. Each draw does both, in other dtypes.
    """

    contract: Contract
    form: str
    draw: Draw

    def of_naive(self) -> FormCall:
        return replace(self, form=NAIVE)

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
