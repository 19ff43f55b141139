"""The first step of all forms: refuse bad arguments, and cast to autocast's dtype."""

# N tokens, D width, F width of the result, R rank

from __future__ import annotations

from typing import NamedTuple

import torch

from ..arguments import require_floating, require_same, require_shape, require_tensor
from ..products import autocast_dtype


class NptTensors(NamedTuple):
    """The tensors of a call, named as the arguments of callers."""

    hidden: torch.Tensor
    weight: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    modulation: torch.Tensor

    def checked(self) -> NptTensors:
        """Return these tensors, cast to autocast's dtype if it is on, as torch does for a matrix product.

        Refuses invalid tensors before anything is allocated.
        """
        require_tensor("hidden", self.hidden)
        require_tensor("modulation", self.modulation)
        require_shape("weight", self.weight, "D F")
        require_shape("a", self.a, "D R")
        require_shape("b", self.b, "R F")
        named = self._asdict()
        require_floating(**named)
        require_same("device", **{name: tensor.device for name, tensor in named.items()})
        self._check_sizes()
        cast = autocast_dtype(*self)
        if cast is not None:
            return NptTensors(*(tensor.to(cast) for tensor in self))
        require_same("dtype", **{name: tensor.dtype for name, tensor in named.items()})
        return self

    def _check_sizes(self) -> None:
        hidden, weight, a, b, modulation = (tensor.shape for tensor in self)
        if not hidden or not modulation or hidden[:-1] != modulation[:-1]:
            raise ValueError(
                f"modulation must have the leading dims of hidden, got {list(modulation)} for hidden {list(hidden)}"
            )
        require_same("rank R", a=a[1], b=b[0], modulation=modulation[-1])
        require_same("width D", hidden=hidden[-1], weight=weight[0], a=a[0])
        require_same("number of columns F", weight=weight[1], b=b[1])
        if a[1] == 0:
            raise ValueError("a and b must have a rank R of at least 1, got 0; for a plain linear layer take torch's")
        if 0 in hidden or 0 in weight:
            raise ValueError(
                f"hidden and weight must have at least one element, got shapes {list(hidden)} and {list(weight)}"
            )
