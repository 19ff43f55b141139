"""Native sparse attention against dense attention, the paper's equations, and what selection promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import memfix.ops.nsa as op
from memfix.ops.nsa import naive, nsa
from memfix.ops.nsa.arguments import Blocks
from memfix.ops.nsa.chunked import chunked_nsa
from memfix.ops.nsa.selection import SharedTokens, select_blocks

SIZES: dict[str, Any] = {"compress_block": 4, "compress_stride": 2, "select_block": 6, "num_selected": 3, "window": 7}
COMPRESSED, SELECTED, WINDOW = range(3)


def inputs(num_tokens: int = 40, dtype: torch.dtype = torch.float64, magnitude: float = 1.0) -> list[torch.Tensor]:
    """q of 6 heads, k and v of 2, gates: all leaves."""
    torch.manual_seed(0)
    q = magnitude * torch.randn(2, num_tokens, 6, 8)
    k = magnitude * torch.randn(2, num_tokens, 2, 8)
    v, gates = torch.randn(2, num_tokens, 2, 8), torch.rand(2, num_tokens, 6, 3)
    return [tensor.to(dtype).requires_grad_() for tensor in (q, k, v, gates)]


def only(branch: int, gates: torch.Tensor) -> torch.Tensor:
    return F.one_hot(torch.tensor(branch), 3).to(gates.dtype).expand_as(gates)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    by_head = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(*by_head, is_causal=True, enable_gqa=True).transpose(1, 2)


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gates: torch.Tensor) -> list[torch.Tensor]:
    return [q.unflatten(2, (2, 3)), k, v, gates.unflatten(2, (2, 3))]


@pytest.mark.parametrize(
    ("branch", "sizes"),
    [(SELECTED, {"num_selected": 100}), (WINDOW, {"window": 100})],
    ids=["every block selected", "window of everything"],
)
def test_a_branch_that_sees_every_key_is_dense_causal_attention(branch: int, sizes: dict[str, int]) -> None:
    q, k, v, gates = inputs()
    out = nsa(q, k, v, only(branch, gates), **{**SIZES, **sizes}, queries_per_chunk=9)
    torch.testing.assert_close(out, dense(q, k, v))


def test_compressed_branch_of_blocks_of_one_token_is_dense_causal_attention() -> None:
    q, k, v, gates = inputs()
    sizes = {**SIZES, "compress_block": 1, "compress_stride": 1}
    out = nsa(q, k, v, only(COMPRESSED, gates), **sizes, queries_per_chunk=9)
    torch.testing.assert_close(out, dense(q, k, v))


def test_query_without_a_complete_block_gets_nothing_from_the_compressed_branch() -> None:
    q, k, v, gates = inputs()
    out = nsa(q, k, v, only(COMPRESSED, gates), **SIZES)
    out.sum().backward()
    first = SIZES["compress_block"] - 1
    assert not out[:, :first].any()
    assert out[:, first:].any(-1).all()
    for tensor in (q, k, v):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()


def test_position_embedding_weighs_the_places_of_a_block() -> None:
    q, k, v, gates = inputs()
    embedding = torch.full((4, 8), -1.0, dtype=torch.float64)
    embedding[2] = 3.0  # (1 + 3) / 4: the third token of each block stands for it
    out = nsa(q, k, v, only(COMPRESSED, gates), **SIZES, position_embedding=embedding)
    third_k, third_v = (tensor[:, 2::2][:, :19].transpose(1, 2) for tensor in (k, v))
    expected = F.scaled_dot_product_attention(q[:, -1:].transpose(1, 2), third_k, third_v, enable_gqa=True)
    torch.testing.assert_close(out[:, -1:], expected.transpose(1, 2))


def test_no_query_sees_a_later_token() -> None:
    q, k, v, gates = inputs()
    before = nsa(q, k, v, gates, **SIZES, queries_per_chunk=9)
    changed = [torch.cat([tensor[:, :23], 5 * tensor[:, 23:]], dim=1) for tensor in (q, k, v)]
    after = nsa(*changed, gates, **SIZES, queries_per_chunk=9)
    torch.testing.assert_close(after[:, :23], before[:, :23])


def test_chunks_of_one_query_give_the_same_as_one_chunk() -> None:
    tensors = inputs(num_tokens=13)
    results = []
    for queries_per_chunk in (1, 13):
        out = nsa(*tensors, **SIZES, queries_per_chunk=queries_per_chunk)
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


# ---------------------------------------------------------------- selection
def test_shared_tokens_are_the_sum_of_equation_9() -> None:
    blocks = Blocks(compress_block=32, compress_stride=16, select_block=64, num_selected=16, window=512)
    shared = SharedTokens(blocks, 512, torch.device("cpu"))
    weights = torch.rand(1, 1, blocks.num_compressed(512), dtype=torch.float64)
    from_one = F.pad(weights[0, 0], (1, 0))  # the paper counts blocks from one
    for j, score in enumerate(shared.scores(weights, 8)[0, 0], start=1):
        terms = [4 * j - m - n for m in range(4) for n in range(2)]
        expected = sum(from_one[i] for i in terms if 1 <= i < len(from_one))
        torch.testing.assert_close(score, 16 * expected)


@pytest.mark.parametrize(
    ("num_selected", "expected"), [(1, [7]), (2, [7, 0]), (3, [7, 0, 6]), (5, [7, 0, 6, 3, 1]), (6, [7, 0, 6, 3, 1, 2])]
)
def test_own_first_and_previous_block_come_before_the_best_scores(num_selected: int, expected: list[int]) -> None:
    scores = torch.tensor([[[0.0, 0.5, 0.5, 0.9, 0.1, 0.0, 0.0, 0.0, 9.0]]], dtype=torch.float64)
    assert select_blocks(scores, torch.tensor([[7]]), num_selected)[0, 0].tolist() == expected


def test_scores_that_differ_by_rounding_are_equal_and_the_first_block_is_taken() -> None:
    scores = torch.tensor([[[0.0, 1.0 - 1e-15, 1.0, 1.0 + 1e-15, 0.0, 0.0]]], dtype=torch.float64)
    assert select_blocks(scores, torch.tensor([[5]]), 4)[0, 0].tolist() == [5, 0, 4, 1]


def test_blocks_that_are_not_there_are_marked() -> None:
    scores = torch.zeros(1, 1, 4, dtype=torch.float64)
    assert select_blocks(scores, torch.tensor([[1]]), 4)[0, 0].tolist() == [1, 0, -1, -1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("magnitude", [0.0, 1.0, 8.0, 30.0])
def test_selects_the_blocks_that_naive_selects(
    dtype: torch.dtype, magnitude: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From scores that are all equal to scores where one block has all the weight."""
    masks: list[torch.Tensor] = []
    honest = naive._selected

    def noted(*arguments: Any) -> torch.Tensor:
        masks.append(honest(*arguments))
        return masks[-1]

    monkeypatch.setattr(naive, "_selected", noted)
    tensors = grouped(*inputs(num_tokens=150, dtype=dtype, magnitude=magnitude))
    naive.naive_nsa(*tensors, **SIZES)
    out = chunked_nsa(*tensors, **SIZES, queries_per_chunk=32)
    assert out.grad_fn is not None
    selected = out.grad_fn.saved_tensors[-1].long()  # type: ignore[attr-defined]
    mask = torch.zeros(*selected.shape[:2], masks[0].shape[-1] + 1, dtype=torch.bool)
    mask.scatter_(-1, selected.where(selected >= 0, masks[0].shape[-1]), True)
    assert torch.equal(mask[..., :-1], masks[0].flatten(0, 1))


# ---------------------------------------------------------------- the function that users call
def test_peaked_scores_in_bfloat16_are_not_rounded() -> None:
    """Scores of tens, as a trained model has them: bfloat16 keeps 8 bits of each, and softmax shows what it drops."""
    narrow = inputs(dtype=torch.bfloat16, magnitude=6.0)
    wide = [tensor.detach().double().requires_grad_() for tensor in narrow]
    out, true = (nsa(*tensors, **SIZES) for tensors in (narrow, wide))
    out.backward(torch.ones_like(out))
    true.backward(torch.ones_like(true))
    pairs = [(out, true), *((a.grad, b.grad) for a, b in zip(narrow, wide, strict=True))]
    for got, expected in pairs:
        assert got is not None
        assert expected is not None
        assert (got.double() - expected).norm() / expected.norm() < 4e-3


def test_autocast_changes_nothing() -> None:
    tensors = inputs(dtype=torch.float32)
    expected = nsa(*tensors, **SIZES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = nsa(*tensors, **SIZES)
    assert torch.equal(out, expected)


def test_second_derivative_is_refused_in_words() -> None:
    tensors = inputs(num_tokens=9)
    with pytest.raises(RuntimeError, match="nsa has no second derivative"):
        torch.autograd.grad(nsa(*tensors, **SIZES).sum(), tensors[0], create_graph=True)


def test_default_chunk_keeps_its_largest_tensor_within_the_bound() -> None:
    q = torch.empty(1, 131_072, 32, 80, dtype=torch.bfloat16, device="meta")
    blocks = Blocks(compress_block=32, compress_stride=16, select_block=64, num_selected=16, window=512)
    queries = op._fitting_chunk(q, 8, blocks)
    gathered_bytes = 8 * 16 * 64 * 80 * 4
    assert queries * gathered_bytes <= op.CHUNK_BYTES < (queries + 1) * gathered_bytes
    assert op._fitting_chunk(q[:, :20], 8, blocks) == 20


def test_calls_that_do_not_fit_together_are_refused() -> None:
    q, k, v, gates = inputs(num_tokens=9)
    with pytest.raises(ValueError, match="the number of heads of q must be a multiple of k's, got 5 and 2"):
        nsa(q[:, :, :5], k, v, gates[:, :, :5], **SIZES)
    with pytest.raises(ValueError, match="gates must have a row for each of 6 heads of q, got 4"):
        nsa(q, k, v, gates[:, :, :4], **SIZES)
    with pytest.raises(ValueError, match=r"gates must have shape .* to go with q, got \[2, 9, 2, 3, 2\]"):
        nsa(q, k, v, gates[..., :2], **SIZES)
    with pytest.raises(ValueError, match="form must be one of auto, chunked, triton, got 'flash'"):
        nsa(q, k, v, gates, **SIZES, form="flash")
    with pytest.raises(ValueError, match="queries_per_chunk must be at least 1, got 0"):
        nsa(q, k, v, gates, **SIZES, queries_per_chunk=0)
