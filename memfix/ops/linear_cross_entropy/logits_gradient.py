"""The gradient of a chunk's logits, as the products that consume it need it."""

# C tokens of a chunk, D width, V vocabulary, H classes of a part of it

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ..products import product_into, sum_dtype

_ROWS_OF_A_SUM = 512
"""Rows per sum: from 1024 rows on, CUDA sums columns in parts, in a workspace of up to twice the matrix in float32."""


class LogitsGradient(Protocol):
    """``G``, ``[C, V]``, stored in full or as factors. Valid until the next chunk."""

    def into_hidden(self, out_CD: torch.Tensor, *, alpha: float) -> None:
        """Write ``out = alpha * G @ weight``."""

    def summed(self) -> torch.Tensor:
        """Return ``G.sum(0)`` in float32 or wider: the gradient of the bias."""


@dataclass(frozen=True)
class DenseGradient:
    """``G`` as one matrix."""

    matrix_CV: torch.Tensor
    weight_VD: torch.Tensor

    def into_hidden(self, out_CD: torch.Tensor, *, alpha: float) -> None:
        product_into(out_CD, self.matrix_CV, self.weight_VD, alpha=alpha)

    def into_weight(
        self, out_HD: torch.Tensor, classes: slice, hidden_CD: torch.Tensor, *, alpha: float, add: bool
    ) -> None:
        """Write ``out = alpha * G[:, classes].T @ hidden``, or with ``add`` add it to ``out``."""
        product_into(out_HD, self.matrix_CV[:, classes].T, hidden_CD, alpha=alpha, add=add)

    def summed(self) -> torch.Tensor:
        first, *rest = self.matrix_CV.split(_ROWS_OF_A_SUM)
        dtype = sum_dtype(first.dtype)
        total_V = first.sum(0, dtype=dtype)
        for rows in rest:
            total_V += rows.sum(0, dtype=dtype)
        return total_V
