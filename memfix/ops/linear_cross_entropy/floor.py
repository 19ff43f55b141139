"""The lower bound of the time of a train step of this loss: its three matrix products, and nothing else."""

# N tokens, D width, V vocabulary, C tokens of a piece

from __future__ import annotations

import torch


@torch.no_grad()
def three_products(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    target_N: torch.Tensor,
    bias_V: torch.Tensor | None = None,
    class_weight_V: torch.Tensor | None = None,
    *,
    rows_per_piece: int | None = None,
) -> None:
    """Compute ``x W^T``, ``G W`` and ``G^T x``, with the logits ``x W^T`` in place of their gradient ``G``.

    With ``rows_per_piece`` the ``[N, V]`` product is made in pieces, and ``G^T x`` is summed in place.
    """
    if rows_per_piece is None:
        product_NV = torch.mm(hidden_ND, weight_VD.T)
        torch.mm(product_NV, weight_VD)
        torch.mm(product_NV.T, hidden_ND)
        return
    grad_hidden_ND, grad_weight_VD = torch.empty_like(hidden_ND), torch.empty_like(weight_VD)
    for start in range(0, hidden_ND.shape[0], rows_per_piece):
        hidden_CD = hidden_ND[start : start + rows_per_piece]
        product_CV = torch.mm(hidden_CD, weight_VD.T)
        torch.mm(product_CV, weight_VD, out=grad_hidden_ND[start : start + rows_per_piece])
        torch.addmm(grad_weight_VD, product_CV.T, hidden_CD, beta=float(start > 0), out=grad_weight_VD)
