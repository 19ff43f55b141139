"""Embedding lookup without a one-hot matrix."""

from __future__ import annotations

import torch

from ..dispatch import Dispatcher

DISPATCHER = Dispatcher("embedding", __name__, forms=("gather",), otherwise="gather")
FORMS = DISPATCHER.names


def embedding(ids: torch.Tensor, weight_VD: torch.Tensor, *, form: str = "auto") -> torch.Tensor:
    """Equals ``F.one_hot(ids, V).to(weight.dtype) @ weight`` for ``ids`` of any shape.

    The gradient of the weight is summed in float32 or wider, so a token that occurs often loses
    nothing to rounding in bfloat16. Memory above the inputs is the output in forward; see the form for train.
    """
    rows: torch.Tensor = DISPATCHER.function(form, weight_VD)(ids.reshape(-1), weight_VD)
    return rows.reshape(*ids.shape, -1)
