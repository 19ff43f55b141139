"""The factored form with its own Triton kernels for the low-rank products, where torch's kernels are slow.

On an H200 with 2048 tokens, width 4096, 11,008 columns, rank 16 and bfloat16, the two products with the weight take
513 us in a CUDA graph. A train step takes 1.12 to 1.15 times that with these kernels, and 1.16 to 1.20 times with
torch's. Without a graph their launches take longer on the host: in a model of such layers ``factored`` is as fast or
faster.
"""

# N tokens, C columns of a wide tensor, R rank

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..dispatch import require_kernels
from ..launches import launch, next_power_of_two
from .arguments import NptTensors
from .factored import TORCH, LowRank, RankTensors, apply_factored


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of the kernels. The defaults were the fastest of those tried on an H200."""

    tokens_read: int = 16
    columns_read: int = 512
    elements_read: int = 16_384
    """Elements of the narrow operand per tile: it limits the columns read at a time at high ranks."""
    tokens_written: int = 32
    columns_written: int = 128
    tokens_per_program: int = 512
    """Tokens that a program writes with the same columns of the narrow operand."""


TILES = Tiles()
_LARGEST_RANK = 128  # for higher ranks torch's kernels are fast


def triton_npt_linear(
    hidden: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, modulation: torch.Tensor
) -> torch.Tensor:
    """Equals ``hidden @ weight + ((hidden @ a) * modulation) @ b``, with kernels for 16-bit dtypes and ranks up to 128.

    Peak above inputs: that of ``factored``.
    """
    tensors = NptTensors(hidden, weight, a, b, modulation).checked()
    require_kernels(tensors.hidden, instead="factored")
    has_kernels = tensors.hidden.itemsize == 2 and a.shape[1] <= _LARGEST_RANK
    return apply_factored(KERNELS if has_kernels else TORCH, tensors)


def _project_down(
    hidden_ND: torch.Tensor, a_DR: torch.Tensor, modulation_NR: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    down_NR = hidden_ND.new_empty(modulation_NR.shape, dtype=torch.float32)
    scaled_NR = hidden_ND.new_empty(modulation_NR.shape)
    _narrow(hidden_ND, a_DR, modulation_NR, down_NR, scaled_NR)
    return down_NR, scaled_NR


def _project_back(
    upstream_NF: torch.Tensor, b_FR: torch.Tensor, modulation_NR: torch.Tensor, down_NR: torch.Tensor
) -> RankTensors:
    made = RankTensors(*(upstream_NF.new_empty(down_NR.shape) for _ in RankTensors._fields))
    _narrow(upstream_NF, b_FR, modulation_NR, down_NR, *made)
    return made


def _narrow(
    wide_NC: torch.Tensor,
    narrow_CR: torch.Tensor,
    modulation_NR: torch.Tensor,
    down_NR: torch.Tensor,
    scaled_NR: torch.Tensor,
    grad_down_NR: torch.Tensor | None = None,
    grad_modulation_NR: torch.Tensor | None = None,
) -> None:
    from .kernels import narrow_product

    (num_tokens, width), rank = wide_NC.shape, narrow_CR.shape[1]
    tile = _tile_of(rank)
    launch(
        narrow_product, (-(-num_tokens // TILES.tokens_read),),
        wide_NC, *wide_NC.stride(), narrow_CR, *narrow_CR.stride(), modulation_NR, *modulation_NR.stride(),
        down_NR, scaled_NR, grad_down_NR, grad_modulation_NR, num_tokens, width, rank,
        IS_BACKWARD=grad_down_NR is not None, TOKENS=TILES.tokens_read,
        COLUMNS=min(TILES.columns_read, TILES.elements_read // tile), RANK=tile, num_warps=2, num_stages=4,
    )  # fmt: skip


def _project_up(out_NC: torch.Tensor, scaled_NR: torch.Tensor, narrow_RC: torch.Tensor) -> None:
    from .kernels import wide_product

    (num_tokens, width), rank = out_NC.shape, narrow_RC.shape[0]
    grid = (-(-width // TILES.columns_written), -(-num_tokens // TILES.tokens_per_program))
    launch(
        wide_product, grid,
        scaled_NR, narrow_RC, *narrow_RC.stride(), out_NC, num_tokens, width, rank, TILES.tokens_per_program,
        TOKENS=TILES.tokens_written, COLUMNS=TILES.columns_written, RANK=_tile_of(rank), num_warps=4, num_stages=3,
    )  # fmt: skip


def _tile_of(rank: int) -> int:
    """Return the rank rounded up to a power of two, at least 16 as tensor cores require."""
    return max(16, next_power_of_two(rank))


KERNELS = LowRank(_project_down, _project_back, _project_up)
