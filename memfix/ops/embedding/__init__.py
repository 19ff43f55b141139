"""Embedding lookup without a one-hot matrix."""

from __future__ import annotations

import torch

from ..dispatch import Dispatcher

DISPATCHER = Dispatcher("embedding", __name__, forms=("gather",), otherwise="gather")
FORMS = DISPATCHER.names


def embedding(ids: torch.Tensor, weight_VD: torch.Tensor, *, form: str = "auto") -> torch.Tensor:
    """Equals ``F.one_hot(ids, V).to(weight.dtype) @ weight`` for ``ids`` of any shape.

    The gradient of the weight is summed in float32 or wider, so that rounding errors in bfloat16 do not
    accumulate over frequent tokens. Peak above inputs: the output in forward; for a train step see the form.
    """
    rows: torch.Tensor = DISPATCHER.function(form, weight_VD)(ids.reshape(-1), weight_VD)
    return rows.reshape(*ids.shape, -1)
