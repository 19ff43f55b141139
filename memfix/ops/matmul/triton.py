"""A product by a Triton kernel with one tile per program, on tensor cores, without explicit threads or barriers."""

# M rows, N columns, K terms

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..dispatch import require_kernels
from ..launches import launch, num_tiles
from .differentiable import differentiable_product


@dataclass(frozen=True)
class Tile:
    """Rows, columns and terms of a program's tiles. Rows stay below 64: see ``memfix.ops.kernels.product``."""

    rows: int
    columns: int
    terms: int


TILE = Tile(rows=32, columns=128, terms=32)


def triton_matmul(left_MK: torch.Tensor, right_KN: torch.Tensor) -> torch.Tensor:
    """Equals ``left_MK @ right_KN``. Tensor cores sum three products of TF32, which together have the digits of
    float32. It allocates only the output."""
    return differentiable_product(_multiply, left_MK, right_KN)


def _multiply(left_MK: torch.Tensor, right_KN: torch.Tensor) -> torch.Tensor:
    require_kernels(left_MK, instead="tiled")
    from .kernels import product_tile

    (M, K), N = left_MK.shape, right_KN.shape[1]
    out_MN = left_MK.new_empty(M, N)
    if out_MN.numel():
        launch(
            product_tile, (num_tiles(N, TILE.columns), num_tiles(M, TILE.rows)),
            left_MK, right_KN, out_MN, M, N, K, *left_MK.stride(), *right_KN.stride(),
            ROWS=TILE.rows, COLUMNS=TILE.columns, TERMS=TILE.terms,
        )  # fmt: skip
    return out_MN
