"""The lower bound of the time of a train step of this layer: the products with its weight, and no low-rank term."""

# N tokens, D width, F width of the result

from __future__ import annotations

import torch

from ..products import as_rows


@torch.no_grad()
def weight_products(
    hidden: torch.Tensor, weight_DF: torch.Tensor, a: torch.Tensor, b: torch.Tensor, modulation: torch.Tensor
) -> None:
    """Compute ``h W`` and ``G W^T``, and ``h^T G`` if the weight trains, with the product ``h W`` in place of its
    gradient ``G``."""
    hidden_ND = as_rows(hidden)
    product_NF = torch.mm(hidden_ND, weight_DF)
    torch.mm(product_NF, weight_DF.T)
    if weight_DF.requires_grad:
        torch.mm(hidden_ND.T, product_NF)
