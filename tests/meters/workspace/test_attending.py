"""What attention kernels take and give back, on tensors that only have a shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memfix.meters.simulated.gpus import H200, get_gpu
from memfix.meters.simulated.workspace import Call, NoRule, hidden_buffers

aten = torch.ops.aten
BF16 = torch.bfloat16
MiB = 1 << 20


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def expanded(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """The gradient of a sum."""
    return meta(dtype=dtype).expand(shape)


def transposed(B: int, H: int, L: int, D: int) -> torch.Tensor:
    """Heads as a projection leaves them: ``BLHD`` in memory."""
    return meta(B, L, H, D).transpose(1, 2)


def hidden(operator: Any, *args: Any, gpu: Any = H200, **kwargs: Any) -> int:
    return sum(hidden_buffers(Call(gpu, operator, args, kwargs, None)))


# ---------------------------------------------------------------- flash
def flash(query: torch.Tensor, key: torch.Tensor, dropout: float = 0.0) -> int:
    return hidden(aten._scaled_dot_product_flash_attention.default, query, key, key, dropout, False, False)


def flash_backward(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, out: torch.Tensor) -> int:
    operator = aten._scaled_dot_product_flash_attention_backward.default
    lengths = query.shape[2], key.shape[2]
    sums = meta(*query.shape[:3], dtype=torch.float32)
    seed = meta(2, dtype=torch.int64)
    return hidden(operator, grad, query, key, key, out, sums, None, None, *lengths, 0.0, True, seed, seed)


def test_flash_splits_keys_where_queries_are_few_as_an_h200_does() -> None:
    assert flash(meta(1, 2, 512, 64), meta(1, 2, 512, 64)) == 532_480
    assert flash(meta(2, 16, 4096, 64), meta(2, 16, 4096, 64)) == 0


def test_flash_with_dropout_splits_nothing_and_draws_a_seed_and_an_offset() -> None:
    assert flash(meta(1, 2, 512, 64), meta(1, 2, 512, 64), dropout=0.5) == 16


def test_one_query_of_grouped_heads_is_run_as_several_queries() -> None:
    # 4 sequences x 2 key heads are 8 blocks for 264 places: 32 splits of 128 keys each, one block of keys
    assert flash(meta(4, 16, 1, 128), meta(4, 2, 4096, 128)) == 32 * 4 * 16 * (4 + 128 * 4)


@pytest.mark.parametrize(
    ("shape", "key_heads", "expected"),
    [
        ((2, 16, 4096, 64), 16, 67_633_152),
        ((2, 16, 4096, 64), 4, 101_187_584),
        ((1, 16, 8192, 128), 16, 134_742_016),
        ((1, 2, 512, 64), 2, 528_384),
    ],
)
def test_flash_backward_of_contiguous_heads_hides_what_an_h200_shows(shape: Any, key_heads: int, expected: int) -> None:
    key = meta(shape[0], key_heads, *shape[2:])
    assert flash_backward(expanded(*shape), meta(*shape), key, meta(*shape)) == expected


def test_flash_backward_of_projected_heads_copies_nothing_as_on_an_h200() -> None:
    heads = transposed(2, 16, 4096, 64)
    assert flash_backward(heads, heads, heads, heads) == 34_078_720
    shorter = transposed(2, 16, 2048, 64)
    assert flash_backward(shorter, shorter, shorter, shorter) == 17_039_360


def test_flash_backward_rounds_lengths_and_widths_up() -> None:
    heads = transposed(1, 2, 129, 136)
    assert flash_backward(heads, heads, heads, heads) == 256 * 2 * 4 * (1 + 192)


def test_deterministic_flash_backward_keeps_a_sum_for_every_split() -> None:
    heads = transposed(1, 2, 128, 64)
    torch.use_deterministic_algorithms(True)
    try:
        assert flash_backward(heads, heads, heads, heads) == 128 * 2 * 4 * (1 + 66 * 64)
    finally:
        torch.use_deterministic_algorithms(False)


def test_flash_over_several_lengths_leaves_room_between_them() -> None:
    query, lengths = meta(1000, 8, 64), meta(4, dtype=torch.int32)
    assert (
        hidden(aten._flash_attention_forward.default, *[query] * 3, lengths, lengths, 500, 500, 0.0, True, False) == 0
    )
    seed = meta(2, dtype=torch.int64)
    sums = meta(8, 1000, dtype=torch.float32)
    taken = hidden(
        aten._flash_attention_backward.default, *[query] * 5, sums, lengths, lengths, 500, 500, 0.0, True, seed, seed
    )
    assert taken == (1000 + 3 * 128) * 8 * 4 * (1 + 64)


# ---------------------------------------------------------------- efficient
def efficient_backward(grad: torch.Tensor, heads: torch.Tensor, gpu: Any = H200, dropout: float = 0.0) -> int:
    operator = aten._scaled_dot_product_efficient_attention_backward.default
    sums, seed = meta(*heads.shape[:3], dtype=torch.float32), meta(dtype=torch.int64)
    wanted = [True, True, True, False]
    return hidden(operator, grad, *[heads] * 3, None, heads, sums, seed, seed, dropout, wanted, gpu=gpu)


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((2, 16, 4096, 64), BF16, 50_888_704),
        ((1, 16, 8192, 128), BF16, 101_203_968),
        ((2, 16, 4096, 64), torch.float32, 68_157_440),
    ],
)
def test_efficient_backward_hides_what_an_h200_shows(shape: Any, dtype: torch.dtype, expected: int) -> None:
    assert efficient_backward(expanded(*shape, dtype=dtype), meta(*shape, dtype=dtype)) == expected


def test_efficient_backward_of_wide_heads_adds_up_keys_in_memory() -> None:
    heads = transposed(2, 4, 200, 192)
    tiles_of_queries = 2 * 3 * (16 + 128 * 64 * 4)
    sums_of_keys = 4 * 64 * (256 + 256) * 4  # four splits of 64 keys, widths rounded to 128
    assert efficient_backward(heads, heads) == 2 * 4 * 200 * 4 + 8 * (tiles_of_queries + sums_of_keys)


def test_efficient_attention_of_wide_heads_adds_up_its_output_in_float32() -> None:
    operator = aten._scaled_dot_product_efficient_attention.default
    assert hidden(operator, *[meta(2, 4, 100, 192)] * 3, None, True) == 2 * 4 * 100 * 192 * 4
    assert hidden(operator, *[meta(2, 4, 100, 128)] * 3, None, True) == 0
    assert hidden(operator, *[meta(2, 4, 100, 192, dtype=torch.float32)] * 3, None, True) == 0


def test_efficient_backward_is_not_known_where_shared_memory_is_small() -> None:
    heads = transposed(2, 4, 256, 128)
    message = r"^efficient attention backward with heads 128 wide on L4: its kernel is not known$"
    with pytest.raises(NoRule, match=message):
        efficient_backward(heads, heads, gpu=get_gpu("L4"))
    narrow = transposed(2, 4, 256, 96)
    assert efficient_backward(narrow, narrow, gpu=get_gpu("L4")) == 2 * 4 * (256 * 4 + 2 * 2 * (16 + 128 * 64 * 4))


# ---------------------------------------------------------------- cuDNN
def cudnn_backward(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, **options: Any) -> int:
    operator = aten._scaled_dot_product_cudnn_attention_backward.default
    sums, seed = meta(*query.shape[:3], 1, dtype=torch.float32), meta(dtype=torch.int64)
    lengths = query.shape[2], key.shape[2]
    dropout, bias = options.get("dropout", 0.0), options.get("bias")
    return hidden(
        operator, grad, query, key, key, query, sums, seed, seed, bias, None, None, *lengths, dropout, True,
        gpu=options.get("gpu", H200),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "key_heads", "expected"),
    [
        ((2, 16, 4096, 64), 16, 50_856_192),
        ((2, 16, 4096, 64), 4, 84_410_624),
        ((1, 16, 8192, 128), 16, 101_187_840),
    ],
)
def test_cudnn_backward_hides_what_an_h200_shows(shape: Any, key_heads: int, expected: int) -> None:
    key = meta(shape[0], key_heads, *shape[2:])
    assert cudnn_backward(expanded(*shape), meta(*shape), key) == expected


def test_cudnn_backward_copies_no_gradient_whose_heads_are_dense() -> None:
    assert cudnn_backward(transposed(2, 16, 4096, 64), *[transposed(2, 16, 4096, 64)] * 2) == 34_078_976
    assert cudnn_backward(transposed(4, 16, 2048, 64), *[transposed(4, 16, 2048, 64)] * 2) == 34_078_976


def cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gpu: Any = H200) -> int:
    return hidden(aten._scaled_dot_product_cudnn_attention.default, query, key, value, None, True, gpu=gpu)


@pytest.mark.parametrize("shape", [(2, 16, 4096, 64), (2, 16, 1000, 96), (1, 1, 2, 8)])
def test_cudnn_forward_takes_256_bytes(shape: Any) -> None:
    assert cudnn(*[meta(*shape)] * 3) == 256


def test_cudnn_forward_of_one_query_is_not_known() -> None:
    key = meta(2, 16, 4096, 64)
    with pytest.raises(NoRule, match=r"^attention of one query by cuDNN, which splits the keys as it sees fit$"):
        cudnn(meta(2, 16, 1, 64), key, key)
    assert cudnn(meta(2, 16, 2, 64), key, key) == 256


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 16, 4096, 96), {}),
        ((2, 16, 1000, 64), {}),
        ((2, 16, 1, 64), {}),
        ((2, 16, 4096, 64), {"dropout": 0.125}),
        ((2, 16, 4096, 64), {"bias": meta(4096, 4096)}),
    ],
)
def test_cudnn_backward_is_one_formula_for_any_width_and_length(shape: Any, options: dict[str, Any]) -> None:
    heads = meta(*shape)
    B, H, L, D = shape
    assert cudnn_backward(heads, heads, heads, **options) == B * H * L * (D + 1) * 4 + 256


def test_cudnn_is_known_on_hopper_and_for_values_as_wide_as_keys_only() -> None:
    heads = meta(2, 16, 4096, 64)
    beyond = r"^workspace of aten\._scaled.*\.default beyond the shapes that were measured$"
    with pytest.raises(NoRule, match=beyond):
        cudnn_backward(heads, heads, heads, gpu=get_gpu("A100"))
    with pytest.raises(NoRule, match=beyond):
        cudnn(heads, heads, heads, gpu=get_gpu("A100"))
    with pytest.raises(NoRule, match=beyond):
        cudnn(heads, heads, meta(2, 16, 4096, 128))
