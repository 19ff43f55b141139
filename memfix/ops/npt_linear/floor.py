"""The floor below every train step of this layer: the products with its weight, and nothing of rank R."""

# N tokens, D width, F width of the result

from __future__ import annotations

import torch

from ..products import as_rows


@torch.no_grad()
def weight_products(
    hidden: torch.Tensor, weight_DF: torch.Tensor, a: torch.Tensor, b: torch.Tensor, modulation: torch.Tensor
) -> None:
    """``h W`` and ``G W^T``, and ``h^T G`` where the weight trains; ``G`` is the product itself, of the size of its
    gradient."""
    hidden_ND = as_rows(hidden)
    product_NF = torch.mm(hidden_ND, weight_DF)
    torch.mm(product_NF, weight_DF.T)
    if weight_DF.requires_grad:
        torch.mm(hidden_ND.T, product_NF)
