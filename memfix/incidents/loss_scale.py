"""The scale of a float16 loss: as large as gradients allow, so that small ones are not rounded to zero."""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROWS_AFTER = 2000  # steps in a row without an overflow


@dataclass
class LossScale:
    """A loss scale that halves at each overflow and doubles after ``GROWS_AFTER`` steps without one, as in
    ``torch.amp.GradScaler``.

    An overflow shows in the gradients' norm, which a step computes anyway and which covers all shards of the model.
    """

    scale: float = 65_536.0
    finite_steps: int = 0
    """Steps since the scale last changed."""

    def unscale(self, model: torch.nn.Module) -> None:
        """Divide all gradients by the scale."""
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        torch._foreach_mul_(gradients, 1 / self.scale)

    def update(self, *, overflowed: bool) -> None:
        """Change the scale after a step."""
        self.finite_steps = 0 if overflowed else self.finite_steps + 1
        if overflowed:
            self.scale /= 2
        elif self.finite_steps == GROWS_AFTER:
            self.scale, self.finite_steps = 2 * self.scale, 0
