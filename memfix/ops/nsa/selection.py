"""Selects the blocks of keys that a query reads: equations 8 to 11, with the same result for any order of the sums.

Taking the best few is not continuous: two scores that rounding may order either way would make two correct forms
differ by a whole block. So scores are computed in float64 from the inputs as they are, whatever their dtype, and
compared in float32. Scores that differ by float64's rounding alone then compare equal, almost surely: to round to
different float32 numbers they would have to lie within about 1e-13 of the border. Among equal scores the first block
is taken. Equal scores are not rare: where each of two heads gives all its weight to one block, both blocks have 1.
"""

# N batch x key-value heads, C queries of a chunk, X queries of a chunk x query heads, D width of a head, M compressed
# blocks, S selection blocks, O compressed blocks that may share tokens with one selection block, n selected blocks

from __future__ import annotations

import torch

from ..launches import num_tiles
from .arguments import Blocks

_LARGEST = 2**31 - 1
NONE_SELECTED = -1


class SharedTokens:
    """For each selection block the compressed blocks that overlap it, and how many tokens they have in common.

    Equation 9 counts common strides, for block sizes that are multiples of the stride (and numbers blocks from one).
    Common tokens are these times the stride, rank blocks alike, and are defined for any sizes.
    """

    def __init__(self, blocks: Blocks, num_tokens: int, device: torch.device) -> None:
        block, stride, size = blocks.compress_block, blocks.compress_stride, blocks.select_block
        start_S1 = torch.arange(blocks.num_selectable(num_tokens), device=device)[:, None] * size
        offset_O = torch.arange(num_tiles(block + size, stride), device=device)
        block_SO = (start_S1 - block).div(stride, rounding_mode="floor") + 1 + offset_O
        first_SO = torch.maximum(block_SO * stride, start_S1)
        end_SO = torch.minimum(block_SO * stride + block, start_S1 + size)
        # drop the blocks before the first and after the last complete one, which do not exist
        last = blocks.num_compressed(num_tokens) - 1
        self.tokens_SO = (end_SO - first_SO).clamp(min=0) * ((block_SO >= 0) & (block_SO <= last))
        self.block_SO = block_SO.where(self.tokens_SO > 0, 0)

    def scores(self, weights_NCM: torch.Tensor, num_selectable: int) -> torch.Tensor:
        """Return ``[N, C, S]``: sums of the probabilities of compressed blocks, weighted by the tokens they share."""
        block_SO, tokens_SO = self.block_SO[:num_selectable], self.tokens_SO[:num_selectable]
        shared = weights_NCM.index_select(-1, block_SO.flatten())
        return shared.view(*weights_NCM.shape[:2], *block_SO.shape).mul_(tokens_SO).sum(-1)


def probabilities_in_float64(
    q_NXD: torch.Tensor, compressed_k_NMD: torch.Tensor, hidden_XM: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the probabilities of equation 8, ``[N, X, M]``, zeros where nothing is seen. They are the largest tensor
    of a chunk, so they are computed in place."""
    weights_NXM = torch.bmm(q_NXD.double(), compressed_k_NMD.mT).mul_(scale).masked_fill_(hidden_XM, -torch.inf)
    weights_NXM.sub_(weights_NXM.amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float64).min)).exp_()
    return weights_NXM.div_(weights_NXM.sum(-1, keepdim=True).clamp_(min=1))  # at least 1 where anything is seen


def select_blocks(scores_NCS: torch.Tensor, own_C1: torch.Tensor, num_selected: int) -> torch.Tensor:
    """Return ``[N, C, n]`` int32: the query's own block, the first, the one before its own, then by score and place.

    Where fewer than ``num_selected`` blocks have begun, the rest is ``NONE_SELECTED``.
    """
    block_S = torch.arange(scores_NCS.shape[-1], device=scores_NCS.device)
    # the bits of non-negative floats are ordered as the floats are; a block's place goes into the bits below
    rank_NCS = scores_NCS.float().view(torch.int32).long()
    rank_NCS.masked_fill_(block_S == own_C1 - 1, _LARGEST - 2)
    rank_NCS.masked_fill_(block_S == 0, _LARGEST - 1)
    rank_NCS.masked_fill_(block_S == own_C1, _LARGEST)
    rank_NCS.mul_(2**31).sub_(block_S).masked_fill_(block_S > own_C1, -(2**62))
    best = rank_NCS.topk(min(num_selected, block_S.shape[0]), dim=-1)
    # an existing block has a rank of -2**31 at least: a score of 0 minus its place
    return best.indices.masked_fill_(best.values < -(2**31), NONE_SELECTED).int()
