"""The fix as the incident report shipped it: the weights of one position at a time, under plain autograd.

It is kept to show that it fails. Without gradients only one position's weights are alive. In training, autograd saves
the weights of every position until backward, as in naive.
"""

# B batch, S tokens of a sequence, D width, F width of the result, R rank

from __future__ import annotations

import torch

from ..arguments import require_int, require_shape
from .arguments import NptTensors


def reported_npt_linear(
    hidden_BSD: torch.Tensor,
    weight_DF: torch.Tensor,
    a_DR: torch.Tensor,
    b_RF: torch.Tensor,
    modulation_BSR: torch.Tensor,
) -> torch.Tensor:
    """Equals ``hidden @ (weight + einsum("bsr,dr,rf->bsdf", modulation, a, b))``; holds ``B*S*D*F*e`` for backward."""
    hidden_BSD, weight_DF, a_DR, b_RF, modulation_BSR = NptTensors(
        hidden_BSD, weight_DF, a_DR, b_RF, modulation_BSR
    ).checked()
    require_shape("hidden", hidden_BSD, "B S D")
    positions = zip(hidden_BSD.unsqueeze(2).unbind(1), modulation_BSR.unsqueeze(2).unbind(1), strict=True)
    outputs = [
        torch.bmm(hidden_B1D, weight_DF + _weight_delta(modulation_B1R, a_DR, b_RF))
        for hidden_B1D, modulation_B1R in positions
    ]
    return torch.cat(outputs, dim=1)


def compute_weight_delta(
    modulation_BSR: torch.Tensor, token_idx: int, a_DR: torch.Tensor, b_RF: torch.Tensor
) -> torch.Tensor:
    """Return the delta of the weight at one position of every sequence, ``[B, D, F]``: the report's function."""
    require_shape("modulation", modulation_BSR, "B S R")
    num_tokens = modulation_BSR.shape[1]
    if require_int("token_idx", token_idx, at_least=0) >= num_tokens:
        raise ValueError(f"token_idx must be below the number of tokens, {num_tokens}, got {token_idx}")
    return _weight_delta(modulation_BSR[:, token_idx].unsqueeze(1), a_DR, b_RF)


def _weight_delta(modulation_B1R: torch.Tensor, a_DR: torch.Tensor, b_RF: torch.Tensor) -> torch.Tensor:
    return (modulation_B1R * a_DR) @ b_RF
