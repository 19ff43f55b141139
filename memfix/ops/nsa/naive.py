"""The reference: native sparse attention as three dense attentions with masks, every query against every key."""

# B batch, T tokens, G key-value heads, R query heads of each, D width of a head, L places of a compression block,
# M compressed blocks, S selection blocks, K keys of a branch

from __future__ import annotations

import torch


def naive_nsa(
    q_BTGRD: torch.Tensor,
    k_BTGD: torch.Tensor,
    v_BTGD: torch.Tensor,
    gates_BTGR3: torch.Tensor,
    position_embedding_LD: torch.Tensor | None = None,
    *,
    compress_block: int,
    compress_stride: int,
    select_block: int,
    num_selected: int,
    window: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Return ``sum(gate * attention(q, keys, values))`` over compressed, selected and the last ``window`` keys.

    Equations 5 and 7 to 12 of Yuan et al. 2025 (arXiv 2502.11089), as read in this folder's ``__init__``.
    Scores are ``[B, G, R, T, T]`` for the selected and the window branch, in the working dtype and in float32.
    """
    num_tokens = q_BTGRD.shape[1]
    scale = q_BTGRD.shape[-1] ** -0.5 if scale is None else scale
    query_T1 = torch.arange(num_tokens, device=q_BTGRD.device)[:, None]
    key_T = torch.arange(num_tokens, device=q_BTGRD.device)

    compressed_k_BMGD = _compress(k_BTGD, position_embedding_LD, compress_block, compress_stride)
    compressed_v_BMGD = _compress(v_BTGD, position_embedding_LD, compress_block, compress_stride)
    start_M = torch.arange(compressed_k_BMGD.shape[1], device=q_BTGRD.device) * compress_stride
    complete_TM = start_M + compress_block - 1 <= query_T1
    with torch.no_grad():  # which blocks are selected is not differentiated
        scores_BGTS = _selection_scores(
            q_BTGRD.double(),
            _compress(
                k_BTGD.double(),
                None if position_embedding_LD is None else position_embedding_LD.double(),
                compress_block,
                compress_stride,
            ),
            complete_TM,
            _shared_tokens(start_M, compress_block, select_block, num_tokens),
            scale,
        )
        selected_BGTS = _selected(scores_BGTS, query_T1 // select_block, num_selected)
    causal_TT = key_T <= query_T1
    selected_BGTT = selected_BGTS.repeat_interleave(select_block, -1)[..., :num_tokens] & causal_TT
    window_TT = causal_TT & (key_T > query_T1 - window)

    branches = (
        _attend(q_BTGRD, compressed_k_BMGD, compressed_v_BMGD, complete_TM, scale),
        _attend(q_BTGRD, k_BTGD, v_BTGD, selected_BGTT[:, :, None], scale),
        _attend(q_BTGRD, k_BTGD, v_BTGD, window_TT, scale),
    )
    gated = [gates_BTGR3[..., i, None] * branch_BTGRD for i, branch_BTGRD in enumerate(branches)]
    return gated[0] + gated[1] + gated[2]


def _compress(
    x_BTGD: torch.Tensor, position_embedding_LD: torch.Tensor | None, block: int, stride: int
) -> torch.Tensor:
    """Return one vector per block: the mean of its tokens, each weighted by place and channel."""
    if x_BTGD.shape[1] < block:
        return x_BTGD[:, :0]
    blocks_BMGDL = x_BTGD.unfold(1, block, stride)
    if position_embedding_LD is not None:
        blocks_BMGDL = blocks_BMGDL * (1 + position_embedding_LD).T
    return blocks_BMGDL.mean(-1)


def _attend(
    q_BTGRD: torch.Tensor, k_BKGD: torch.Tensor, v_BKGD: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return softmax attention to the keys where ``seen``; a query that sees none gets zeros."""
    scores_BGRTK = torch.einsum("btgrd,bkgd->bgrtk", q_BTGRD, k_BKGD) * scale
    scores_BGRTK = scores_BGRTK.masked_fill(~seen, torch.finfo(scores_BGRTK.dtype).min)
    wide = torch.promote_types(scores_BGRTK.dtype, torch.float32)
    weights_BGRTK = scores_BGRTK.softmax(-1, dtype=wide).to(scores_BGRTK.dtype).masked_fill(~seen, 0)
    return torch.einsum("bgrtk,bkgd->btgrd", weights_BGRTK, v_BKGD)


def _shared_tokens(start_M: torch.Tensor, compress_block: int, select_block: int, num_tokens: int) -> torch.Tensor:
    """Count the tokens that each compressed block has in common with each selection block."""
    select_S = torch.arange(-(-num_tokens // select_block), device=start_M.device) * select_block
    first_MS = torch.maximum(start_M[:, None], select_S)
    end_MS = torch.minimum(start_M[:, None] + compress_block, select_S + select_block)
    return (end_MS - first_MS).clamp(min=0)


def _selection_scores(
    q_BTGRD: torch.Tensor,
    compressed_k_BMGD: torch.Tensor,
    complete_TM: torch.Tensor,
    shared_MS: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return the score of every selection block: the probabilities of compressed blocks, summed over the heads of a
    group, and weighted by the tokens that they share with the selection block."""
    scores_BGRTM = torch.einsum("btgrd,bmgd->bgrtm", q_BTGRD, compressed_k_BMGD) * scale
    scores_BGRTM = scores_BGRTM.masked_fill(~complete_TM, torch.finfo(scores_BGRTM.dtype).min)
    weights_BGRTM = scores_BGRTM.softmax(-1).masked_fill(~complete_TM, 0)
    return weights_BGRTM.sum(2) @ shared_MS.to(weights_BGRTM.dtype)


def _selected(scores_BGTS: torch.Tensor, own_T1: torch.Tensor, num_selected: int) -> torch.Tensor:
    """Return a mask of the best blocks: the query's own, the first, the one before its own, then by score and place."""
    block_S = torch.arange(scores_BGTS.shape[-1], device=scores_BGTS.device)
    largest = torch.finfo(torch.float32).max
    # scores that differ by float64's rounding alone become equal; of equal scores the first block is taken
    rank_BGTS = scores_BGTS.float()
    rank_BGTS = rank_BGTS.masked_fill(block_S == own_T1 - 1, largest / 2)
    rank_BGTS = rank_BGTS.masked_fill(block_S == 0, largest)
    rank_BGTS = rank_BGTS.masked_fill(block_S == own_T1, torch.inf)
    rank_BGTS = rank_BGTS.masked_fill(block_S > own_T1, -1)
    best_BGTn = rank_BGTS.sort(dim=-1, descending=True, stable=True).indices[..., :num_selected]
    chosen_BGTS = torch.zeros_like(rank_BGTS, dtype=torch.bool).scatter(-1, best_BGTn, True)
    return chosen_BGTS & (block_S <= own_T1)
