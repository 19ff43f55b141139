"""Which blocks of keys a query reads: equations 8 to 11, the same answer whatever the order of the sums.

Taking the best few is not continuous: two scores that rounding may order either way would make two right forms
differ by a whole block. So scores are computed in float64 from the inputs as they are, whatever their dtype, and
compared in float32. Scores that differ by float64's rounding alone are then equal, all but surely: to fall on
two sides of a rounding to float32 they would have to lie within about 1e-13 of it. Among equal scores the first
block is taken. Equal scores are not rare: where each of two heads gives all its weight to one block, both have 1.
"""

# N batch x key-value heads, C queries of a chunk, X queries of a chunk x query heads, D width of a head, M compressed
# blocks, S selection blocks, O compressed blocks that may share tokens with one selection block, n selected blocks

from __future__ import annotations

import torch

from .arguments import Blocks

_LARGEST = 2**31 - 1
NONE_SELECTED = -1


class SharedTokens:
    """For each selection block the compressed blocks that it meets, and how many tokens they have in common.

    Equation 9 counts strides in common where both block sizes are multiples of the stride (and counts
    blocks from one). Tokens in common are as many times the stride, rank alike, and need no multiples.
    """

    def __init__(self, blocks: Blocks, num_tokens: int, device: torch.device) -> None:
        block, stride, size = blocks.compress_block, blocks.compress_stride, blocks.select_block
        start_S1 = torch.arange(blocks.num_selectable(num_tokens), device=device)[:, None] * size
        offset_O = torch.arange(-(-(block + size) // stride), device=device)
        block_SO = (start_S1 - block).div(stride, rounding_mode="floor") + 1 + offset_O
        first_SO = torch.maximum(block_SO * stride, start_S1)
        end_SO = torch.minimum(block_SO * stride + block, start_S1 + size)
        # before the first block there is none, and none after the last that is complete
        last = blocks.num_compressed(num_tokens) - 1
        self.tokens_SO = (end_SO - first_SO).clamp(min=0) * ((block_SO >= 0) & (block_SO <= last))
        self.block_SO = block_SO.where(self.tokens_SO > 0, 0)

    def scores(self, weights_NCM: torch.Tensor, num_selectable: int) -> torch.Tensor:
        """``[N, C, S]``: the probabilities of compressed blocks, over the tokens that each shares."""
        block_SO, tokens_SO = self.block_SO[:num_selectable], self.tokens_SO[:num_selectable]
        shared = weights_NCM.index_select(-1, block_SO.flatten())
        return shared.view(*weights_NCM.shape[:2], *block_SO.shape).mul_(tokens_SO).sum(-1)


def probabilities_in_float64(
    q_NXD: torch.Tensor, compressed_k_NMD: torch.Tensor, hidden_XM: torch.Tensor, scale: float
) -> torch.Tensor:
    """Equation 8, ``[N, X, M]``. In place: it is the largest tensor of a chunk. Zeros where nothing is seen."""
    weights_NXM = torch.bmm(q_NXD.double(), compressed_k_NMD.mT).mul_(scale).masked_fill_(hidden_XM, -torch.inf)
    weights_NXM.sub_(weights_NXM.amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float64).min)).exp_()
    return weights_NXM.div_(weights_NXM.sum(-1, keepdim=True).clamp_(min=1))  # at least 1 where anything is seen


def select_blocks(scores_NCS: torch.Tensor, own_C1: torch.Tensor, num_selected: int) -> torch.Tensor:
    """``[N, C, n]`` int32: the query's own block, the first, the one before its own, then by score, then by place.

    With fewer blocks so far than ``num_selected`` the rest is ``NONE_SELECTED``.
    """
    block_S = torch.arange(scores_NCS.shape[-1], device=scores_NCS.device)
    # the bits of floats that are not negative are ordered as the floats are; the place goes below them
    rank_NCS = scores_NCS.float().view(torch.int32).long()
    rank_NCS.masked_fill_(block_S == own_C1 - 1, _LARGEST - 2)
    rank_NCS.masked_fill_(block_S == 0, _LARGEST - 1)
    rank_NCS.masked_fill_(block_S == own_C1, _LARGEST)
    rank_NCS.mul_(2**31).sub_(block_S).masked_fill_(block_S > own_C1, -(2**62))
    best = rank_NCS.topk(min(num_selected, block_S.shape[0]), dim=-1)
    # no real rank is below -2**31: a score of 0 less its place
    return best.indices.masked_fill_(best.values < -(2**31), NONE_SELECTED).int()
