"""What all forms do first: refuse bad arguments, and take the dtype of autocast."""

# N tokens, D width, F width of the result, R rank

from __future__ import annotations

from typing import NamedTuple

import torch

from ..arguments import require_floating, require_same, require_shape, require_tensor


class NptTensors(NamedTuple):
    """The tensors of a call, as callers name them."""

    hidden: torch.Tensor
    weight: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    modulation: torch.Tensor

    def checked(self) -> NptTensors:
        """These tensors, in the dtype of autocast where that is on, as torch does it for a matrix product.

        Refuses what cannot be computed, before anything is allocated.
        """
        for name in ("hidden", "modulation"):
            require_tensor(name, getattr(self, name))
        require_shape("weight", self.weight, "D F")
        require_shape("a", self.a, "D R")
        require_shape("b", self.b, "R F")
        require_floating(**self._asdict())
        require_same("device", **{name: tensor.device for name, tensor in self._asdict().items()})
        self._check_sizes()
        device = self.hidden.device.type
        is_wide = any(tensor.dtype == torch.float64 for tensor in self)
        if not is_wide and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            return NptTensors(*(tensor.to(torch.get_autocast_dtype(device)) for tensor in self))
        require_same("dtype", **{name: tensor.dtype for name, tensor in self._asdict().items()})
        return self

    def _check_sizes(self) -> None:
        hidden, weight, a, b, modulation = self
        if hidden.dim() == 0 or modulation.dim() == 0 or hidden.shape[:-1] != modulation.shape[:-1]:
            raise ValueError(
                "modulation must have the leading dims of hidden, "
                f"got {list(modulation.shape)} for hidden {list(hidden.shape)}"
            )
        require_same("rank R", a=a.shape[1], b=b.shape[0], modulation=modulation.shape[-1])
        require_same("width D", hidden=hidden.shape[-1], weight=weight.shape[0], a=a.shape[0])
        require_same("number of columns F", weight=weight.shape[1], b=b.shape[1])
        if a.shape[1] == 0:
            raise ValueError("a and b must have a rank R of at least 1, got 0; for a plain linear layer take torch's")
        if hidden.numel() == 0 or weight.numel() == 0:
            raise ValueError(
                "hidden and weight must have at least one element, "
                f"got shapes {list(hidden.shape)} and {list(weight.shape)}"
            )


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """``[N, ...]``: one row a token."""
    return tensor.reshape(-1, tensor.shape[-1])
