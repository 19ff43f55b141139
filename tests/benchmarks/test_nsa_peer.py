"""What flash-linear-attention's ``parallel_nsa`` is given, by a stand-in that computes what it is documented to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.peers.nsa import repeats, with_form_signature
from memfix.ops.nsa.naive import naive_nsa

SIZES: dict[str, Any] = {
    "compress_block": 4, "compress_stride": 4, "select_block": 4, "num_selected": 3, "window": 1, "scale": 0.3
}  # fmt: skip


def parallel_nsa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, g_cmp: torch.Tensor, g_slc: torch.Tensor,
    g_swa: torch.Tensor, block_counts: int, block_size: int, window_size: int, scale: float | None,
) -> torch.Tensor:  # fmt: skip
    """``[B, T, HQ, D]`` with ``HQ`` a multiple of 16 times the heads of k; no window branch where its size is 0."""
    groups = k.shape[2]
    assert q.shape[2] % (16 * groups) == 0
    gates = torch.stack([g_cmp, g_slc, g_swa if window_size else torch.zeros_like(g_swa)], dim=-1)
    return naive_nsa(
        q.unflatten(2, (groups, -1)), k, v, gates.unflatten(2, (groups, -1)), compress_block=block_size,
        compress_stride=block_size, select_block=block_size, num_selected=block_counts, window=max(1, window_size),
        scale=scale,
    ).flatten(2, 3)  # fmt: skip


def inputs(heads: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 30, 2, heads, 8), torch.randn(2, 30, 2, 8), torch.randn(2, 30, 2, 8)
    return [tensor.double().requires_grad_() for tensor in (q, k, v, torch.rand(2, 30, 2, heads, 3))]


@pytest.mark.parametrize("heads", [4, 16, 3])
@pytest.mark.parametrize("window", [1, 5])
def test_peer_computes_what_naive_computes(heads: int, window: int) -> None:
    results = []
    for form in (with_form_signature(parallel_nsa), naive_nsa):
        tensors = inputs(heads)
        out = form(*tensors, **{**SIZES, "window": window})
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    for ours, naive in zip(*results, strict=True):
        torch.testing.assert_close(ours, naive)


def test_heads_are_repeated_no_more_than_it_asks_for() -> None:
    assert [repeats(heads) for heads in (1, 3, 4, 16, 24, 32)] == [16, 16, 4, 1, 2, 1]


@pytest.mark.parametrize("change", [{"compress_stride": 2}, {"select_block": 8}])
def test_blocks_of_two_sizes_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="parallel_nsa has one size of blocks, and no position embedding"):
        with_form_signature(parallel_nsa)(*inputs(4), **{**SIZES, **change})


def test_a_position_embedding_is_refused() -> None:
    with pytest.raises(ValueError, match="no position embedding"):
        with_form_signature(parallel_nsa)(*inputs(4), torch.zeros(4, 8), **SIZES)
