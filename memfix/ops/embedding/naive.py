"""The reference: an embedding as a matrix product with one-hot rows."""

# N ids, V vocabulary, D width

from __future__ import annotations

import torch
import torch.nn.functional as F


def naive_embedding(ids_N: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """``one_hot(ids) @ weight``. The one-hot matrix is ``N*V`` int64, and again in the working dtype."""
    one_hot_NV = F.one_hot(ids_N.long(), weight_VD.shape[0]).to(weight_VD.dtype)
    return one_hot_NV @ weight_VD
