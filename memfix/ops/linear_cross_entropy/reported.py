"""The fix as the incident report shipped it: a loop over 4096-token chunks under plain autograd.

It is kept to be shown failing. Without gradients it is small. In training, autograd holds every
chunk's log-probabilities until backward, so one full ``[N, V]`` tensor is alive after all.
"""

# N tokens, D width, V vocabulary

from __future__ import annotations

import torch

from .arguments import require_linear_cross_entropy
from .full_logits import full_logits_loss, joined
from .targets import require_targets_in_range
from .terms import Terms


def reported_linear_cross_entropy(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    target_N: torch.Tensor,
    bias_V: torch.Tensor | None = None,
    class_weight_V: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    rows_per_chunk: int = 4096,
) -> torch.Tensor:
    """Equals ``F.cross_entropy(hidden @ weight.T + bias, target)``; holds ``N*V*e`` bytes for backward."""
    terms = Terms(
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        softcap=softcap,
        z_loss=z_loss,
    )
    require_linear_cross_entropy(hidden_ND, weight_VD, target_N, bias_V, class_weight_V, rows_per_chunk)
    require_targets_in_range(target_N, weight_VD.shape[0], ignore_index)
    of_a_chunk = "none" if reduction == "none" else "sum"
    # a loop of its own: slices, as the report wrote them, have another backward than the split of the other forms
    chunks = (slice(start, start + rows_per_chunk) for start in range(0, hidden_ND.shape[0], rows_per_chunk))
    parts = (
        full_logits_loss(hidden_ND[chunk], weight_VD, target_N[chunk], bias_V, class_weight_V, terms, of_a_chunk)
        for chunk in chunks
    )
    return joined(parts, target_N, class_weight_V, terms)
