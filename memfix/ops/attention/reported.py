"""The fix that looks right: a chunk of queries at a time, under plain autograd.

It is kept to show where it fails. Without gradients only the weights of one chunk are alive. In training, autograd
saves the weights of every chunk until backward: as much as naive holds.
"""

from __future__ import annotations

import torch

from ..call import takes
from ..derivatives import without_autocast
from .arguments import AttentionTensors, ChunkOptions
from .query_chunk import attend, chunks


@takes(AttentionTensors, ChunkOptions)
def reported_attention(
    tensors: AttentionTensors, options: ChunkOptions
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Equals ``softmax(q @ k.mT * scale) @ v``; holds ``B*G*R*Q*K*e`` bytes for backward."""
    outs, maps = [], []
    with without_autocast(tensors.q):  # the tensors already have autocast's dtype
        for rows, chunk in chunks(tensors, options.fitting(tensors)):
            out_BGRCV, weights_BGRCK = attend(chunk, rows, options)
            outs.append(out_BGRCV)
            if weights_BGRCK is not None:
                maps.append(weights_BGRCK)
    out_BGRQV = torch.cat(outs, dim=3)
    return (out_BGRQV, torch.cat(maps, dim=3).to(tensors.map_dtype)) if options.keep_map else out_BGRQV
