"""The attention of one chunk of queries, which ``reported`` and ``query_chunks`` share, and the map, made in chunks."""

# B batch, G key-value heads, R query heads of each, C queries of a chunk, K keys, D width of a head, V width of a
# value, N = B*G

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from .arguments import AttentionOptions, AttentionTensors, ChunkOptions
from .visible import Visible, causal_mask, visible


def chunks(tensors: AttentionTensors, options: ChunkOptions) -> Iterator[tuple[slice, AttentionTensors]]:
    """Yield the rows of each chunk, and the tensors with these rows; heads of keys and values are folded into N."""
    num_queries, size = tensors.q.shape[3], options.queries_per_chunk
    assert size is not None
    folded = tensors._replace(k=tensors.k.flatten(0, 1), v=tensors.v.flatten(0, 1))
    for start in range(0, num_queries, size):
        rows = slice(start, min(start + size, num_queries))
        yield rows, folded._replace(q=rows_of(tensors.q, rows), **_masks_of(tensors, rows))


def rows_of(tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return these rows, or the one row that broadcasts to all."""
    return tensor if tensor.shape[-2] == 1 else tensor[..., rows, :]


def _masks_of(tensors: AttentionTensors, rows: slice) -> dict[str, torch.Tensor]:
    masks = {"mask": tensors.mask, "bias": tensors.bias}
    return {name: rows_of(mask, rows) for name, mask in masks.items() if mask is not None}


def seen_in(chunk: AttentionTensors, rows: slice, options: AttentionOptions) -> Visible:
    causal_CK = causal_mask(rows, chunk.k.shape[1], chunk.k.device) if options.causal else None
    return visible(chunk.mask, chunk.bias, causal_CK)


def weights_of(q_BGRCD: torch.Tensor, k_NKD: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Return the softmax of one chunk's scores, ``[B, G, R, C, K]``."""
    q_NrD = q_BGRCD.reshape(k_NKD.shape[0], -1, k_NKD.shape[2])
    # scaled after the product: scores of similar keys differ by less than the rounding of a scaled q
    scores_BGRCK = torch.bmm(q_NrD, k_NKD.mT).mul_(scale).view(*q_BGRCD.shape[:4], -1)
    if mask is not None and mask.dtype == torch.bool:
        scores_BGRCK.masked_fill_(~mask, -torch.inf)
    elif mask is not None:
        scores_BGRCK += mask
    return scores_BGRCK.softmax(-1)


def attend(chunk: AttentionTensors, rows: slice, options: AttentionOptions) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the result of one chunk and, with ``keep_map``, its weights before dropout."""
    seen = seen_in(chunk, rows, options)
    weights_BGRCK = weights_of(chunk.q, chunk.k, seen.mask, options.scale_of(chunk.q))
    kept_BGRCK = F.dropout(weights_BGRCK, options.dropout) if options.dropout else weights_BGRCK
    out_NrV = torch.bmm(kept_BGRCK.view(chunk.k.shape[0], -1, chunk.k.shape[1]), chunk.v)
    out_BGRCV = seen.zero_blind(out_NrV.view(*chunk.q.shape[:4], -1))
    return out_BGRCV, seen.zero_blind(weights_BGRCK.detach()) if options.keep_map else None


@torch.no_grad()
def map_of(tensors: AttentionTensors, options: AttentionOptions) -> torch.Tensor:
    """Return the weights of all keys for all queries, ``[B, G, R, Q, K]``, before dropout and without a graph."""
    own = ChunkOptions(causal=options.causal, scale=options.scale).fitting(tensors)
    map_BGRQK = tensors.q.new_empty(*tensors.q.shape[:4], tensors.k.shape[2], dtype=tensors.map_dtype)
    for rows, chunk in chunks(tensors, own):
        seen = seen_in(chunk, rows, own)
        weights_BGRCK = weights_of(chunk.q, chunk.k, seen.mask, own.scale_of(chunk.q))
        map_BGRQK[..., rows, :] = seen.zero_blind(weights_BGRCK)
    return map_BGRQK
