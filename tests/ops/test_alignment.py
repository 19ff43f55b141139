"""Rows at any address: a slice of a wider tensor begins where vector loads and TMA cannot read."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memfix.ops.alignment import begins_aligned, has_aligned_rows, with_aligned_rows
from memfix.ops.attention import attention
from memfix.ops.attention.naive import naive_attention
from memfix.ops.linear_cross_entropy import linear_cross_entropy
from memfix.ops.linear_cross_entropy.naive import naive_linear_cross_entropy


def wide(*size: int) -> torch.Tensor:
    return torch.arange(torch.Size(size).numel(), dtype=torch.bfloat16).reshape(size)


@pytest.mark.parametrize(
    ("rows", "begins", "is_aligned"),
    [
        (wide(4, 16), True, True),
        (wide(4, 32)[:, 8:24], True, True),
        (wide(4, 3, 16).transpose(0, 1), True, True),
        (wide(4, 32)[:, 1:17], False, False),
        (wide(1, 17)[:, 1:], False, False),
        (wide(17)[1:], False, False),
        (wide(4, 18)[:, :16], True, False),
        (wide(4, 32)[:, ::2], True, False),
    ],
)
@pytest.mark.parametrize("is_fake", [False, True])
def test_rows_are_copied_unless_they_begin_at_multiples_of_16_bytes(
    rows: torch.Tensor, begins: bool, is_aligned: bool, is_fake: bool
) -> None:
    given = FakeTensorMode().from_tensor(rows) if is_fake else rows
    assert (begins_aligned(given), has_aligned_rows(given)) == (begins, is_aligned)
    aligned = with_aligned_rows(given)
    assert has_aligned_rows(aligned)
    assert (aligned is given) == is_aligned
    assert is_fake or torch.equal(aligned, rows)


@pytest.mark.gpu(use="beside")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_attention_takes_slices_at_any_address(dtype: torch.dtype) -> None:
    def sliced(*size: int) -> torch.Tensor:
        return torch.randn(*size[:-1], size[-1] + 2, device="cuda", dtype=dtype)[..., 1:-1]

    q, k, v = sliced(2, 3, 33, 16), sliced(2, 3, 40, 16), sliced(2, 3, 40, 16)
    torch.testing.assert_close(
        attention(q, k, v, form="sdpa"), naive_attention(q.unsqueeze(2), k, v).squeeze(2), atol=2e-2, rtol=2e-2
    )


@pytest.mark.gpu(use="beside")
@pytest.mark.parametrize("num_tokens", [1, 300])
def test_a_loss_takes_hidden_rows_at_any_address(num_tokens: int) -> None:
    hidden = torch.randn(num_tokens * 64 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(num_tokens, 64)
    weight = torch.randn(500, 64, device="cuda", dtype=torch.bfloat16) / 8
    target = torch.randint(500, (num_tokens,), device="cuda")
    loss = linear_cross_entropy(hidden, weight, target, form="triton")
    torch.testing.assert_close(loss, naive_linear_cross_entropy(hidden, weight, target), atol=2e-2, rtol=2e-2)
