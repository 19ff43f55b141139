"""The loss as a module that holds the classifier."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn


class LinearCrossEntropy(nn.Module):
    """``nn.Linear(width, vocabulary)`` followed by ``nn.CrossEntropyLoss``, without the logits between them.

    ``LinearCrossEntropy(width, vocabulary)`` makes its own weight, as ``nn.Linear`` does, and with ``bias=True`` a
    bias. A ``tied_weight``, such as the parameter of an embedding, is used instead of an own weight: it then gets the
    sum of both gradients, and appears once in ``parameters()`` of the model. ``class_weight`` is a buffer, in the dtype
    of the weight. The other keywords are those of :func:`memfix.ops.linear_cross_entropy.linear_cross_entropy`.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    class_weight: torch.Tensor | None

    def __init__(
        self,
        width: int,
        vocabulary: int,
        *,
        bias: bool = False,
        tied_weight: nn.Parameter | None = None,
        class_weight: torch.Tensor | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        if tied_weight is not None:
            if tuple(tied_weight.shape) != (vocabulary, width):
                raise ValueError(
                    f"tied_weight must be [vocabulary, width], here [{vocabulary}, {width}], "
                    f"got shape {list(tied_weight.shape)}"
                )
            made = {"device": tied_weight.device, "dtype": tied_weight.dtype}
        self.weight = nn.Parameter(torch.empty(vocabulary, width, **made)) if tied_weight is None else tied_weight
        self.register_parameter("bias", nn.Parameter(torch.empty(vocabulary, **made)) if bias else None)
        self.register_buffer("class_weight", None if class_weight is None else class_weight.to(self.weight))
        self.options = options
        self._is_tied = tied_weight is not None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise weight and bias as ``nn.Linear`` does, but leave a tied weight as it is."""
        if not self._is_tied:
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.weight.shape[1])
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        from . import linear_cross_entropy

        return linear_cross_entropy(
            hidden, self.weight, target, bias=self.bias, class_weight=self.class_weight, **self.options
        )

    def extra_repr(self) -> str:
        vocabulary, width = self.weight.shape
        shown = [f"width={width}", f"vocabulary={vocabulary}", f"bias={self.bias is not None}"]
        return ", ".join([*shown, *(f"{name}={value!r}" for name, value in self.options.items())])
