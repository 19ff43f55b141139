"""The reference: the weight of every token is made in full before it is used."""

# B batch, S tokens of a sequence, D width, F width of the result, R rank

from __future__ import annotations

import torch


def naive_npt_linear(
    hidden_BSD: torch.Tensor,
    weight_DF: torch.Tensor,
    a_DR: torch.Tensor,
    b_RF: torch.Tensor,
    modulation_BSR: torch.Tensor,
) -> torch.Tensor:
    """``hidden @ (weight + delta)``, where ``delta = einsum("bsr,dr,rf->bsdf", modulation, a, b)``.

    Each einsum has two operands: with three, the order would depend on whether opt_einsum is installed.
    """
    delta_BSDF = torch.einsum("bsdr,rf->bsdf", modulation_BSR.unsqueeze(-2) * a_DR, b_RF)
    return torch.einsum("bsd,bsdf->bsf", hidden_BSD, weight_DF + delta_BSDF)
