"""What every form of native sparse attention demands of its arguments, and the sizes of its blocks."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from ..arguments import require_at_least_one, require_floating, require_same, require_shape, require_size

NUM_BRANCHES = 3  # in the order of the gates: compressed, selected, window

# of a call that the kernels take
WIDEST = 256
MOST_HEADS = 64
"""Of queries, for one key-value head."""
MOST_SHARED = 256
"""Tokens that a compressed and a selection block have in common: larger counts are no 16-bit floats."""
MOST_MET = 512
"""Compressed blocks that meet a selection block."""


@dataclass(frozen=True)
class Blocks:
    """Sizes in tokens, but ``num_selected`` in blocks. The paper's l, d, l', n and w."""

    compress_block: int
    compress_stride: int
    select_block: int
    num_selected: int
    window: int

    def __post_init__(self) -> None:
        for size in fields(self):
            require_at_least_one(size.name, getattr(self, size.name))
        if self.compress_stride > self.compress_block:
            raise ValueError(
                f"compress_stride must be at most compress_block ({self.compress_block}), or tokens are in no block; "
                f"got {self.compress_stride}"
            )

    def num_compressed(self, num_tokens: int) -> int:
        """Compressed blocks that are complete after ``num_tokens``."""
        return max(0, (num_tokens - self.compress_block) // self.compress_stride + 1)

    def num_selectable(self, num_tokens: int) -> int:
        """Selection blocks that have begun after ``num_tokens``."""
        return -(-num_tokens // self.select_block)


def require_nsa(
    q_BTGRD: torch.Tensor,
    k_BTGD: torch.Tensor,
    v_BTGD: torch.Tensor,
    gates_BTGR3: torch.Tensor,
    position_embedding_LD: torch.Tensor | None,
    blocks: Blocks,
    queries_per_chunk: int,
) -> None:
    """Refuse what cannot be computed, before anything is allocated."""
    require_shape("q", q_BTGRD, "B T G R D")
    require_shape("k", k_BTGD, "B T G D")
    require_shape("v", v_BTGD, "B T G D")
    require_shape("gates", gates_BTGR3, "B T G R 3")
    tensors = {"q": q_BTGRD, "k": k_BTGD, "v": v_BTGD, "gates": gates_BTGR3}
    if position_embedding_LD is not None:
        tensors["position_embedding"] = require_shape("position_embedding", position_embedding_LD, "L D")
    require_floating(**tensors)
    require_same("dtype", **{name: tensor.dtype for name, tensor in tensors.items()})
    require_same("device", **{name: tensor.device for name, tensor in tensors.items()})
    batch, num_tokens, groups, heads, width = q_BTGRD.shape
    for name, tensor in (("k", k_BTGD), ("v", v_BTGD)):
        require_size(name, tensor, (batch, num_tokens, groups, width))
    require_size("gates", gates_BTGR3, (batch, num_tokens, groups, heads, NUM_BRANCHES))
    if position_embedding_LD is not None:
        require_size("position_embedding", position_embedding_LD, (blocks.compress_block, width))
    if q_BTGRD.numel() == 0:
        raise ValueError(f"q must have at least one element, got shape {list(q_BTGRD.shape)}")
    require_at_least_one("queries_per_chunk", queries_per_chunk)


def takes_kernels(q_BTGRD: torch.Tensor, blocks: Blocks) -> bool:
    """Whether kernels compute this call; otherwise the form ``triton`` does what ``chunked`` does."""
    heads, width = q_BTGRD.shape[3:]
    shared = min(blocks.compress_block, blocks.select_block)
    met = blocks.compress_block + blocks.select_block
    return (
        q_BTGRD.dtype != torch.float64
        and width <= WIDEST
        and heads <= MOST_HEADS
        and shared <= MOST_SHARED
        and met <= MOST_MET * blocks.compress_stride
    )
