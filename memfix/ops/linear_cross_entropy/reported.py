"""The fix as the incident report shipped it: a loop over 4096-token chunks under plain autograd.

It is kept to show that it fails. Without gradients it is small. In training, autograd saves every
chunk's log-probabilities until backward, so one full ``[N, V]`` tensor is alive after all.
"""

# N tokens, D width, V vocabulary

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..call import takes
from .full_logits import full_logits_loss, joined
from .options import LossTensors, Options
from .targets import require_targets_in_range


@dataclass(frozen=True, kw_only=True)
class ReportedOptions(Options):
    """The options of the loss, with the chunk size of the report."""

    rows_per_chunk: int | None = 4096


@takes(LossTensors, ReportedOptions)
def reported_linear_cross_entropy(tensors: LossTensors, options: Options) -> torch.Tensor:
    """Equals ``F.cross_entropy(hidden @ weight.T + bias, target)``; holds ``N*V*e`` bytes for backward."""
    hidden_ND, target_N = tensors.hidden_ND, tensors.target_N
    require_targets_in_range(target_N, tensors.vocabulary, options.ignore_index)
    rows = options.rows_of(hidden_ND.shape[0])
    # slices, as in the report: their backward differs from that of ``split``, which the other forms use
    chunks = (slice(start, start + rows) for start in range(0, hidden_ND.shape[0], rows))
    parts = (full_logits_loss(tensors.of_rows(hidden_ND[chunk], target_N[chunk]), options) for chunk in chunks)
    return joined(parts, tensors, options)
