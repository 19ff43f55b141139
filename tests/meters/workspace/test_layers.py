"""What the kernels of layers take and give back: norms, pooling, losses and cells, by shape alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rules_on_meta import hidden, meta

from memfix.meters.simulated.gpus import H200
from memfix.meters.simulated.workspace import Call, Estimated, NoRule, Range, hidden_buffers, storage_bytes

aten = torch.ops.aten
bf16, f16, f64 = torch.bfloat16, torch.float16, torch.float64
last = torch.channels_last


def expanded(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """As the gradient of a sum arrives."""
    return meta(1, dtype=dtype).expand(size)


def hidden_and_stored(operator: Any, *args: Any) -> tuple[list[int], int | None]:
    """What the kernel takes, and the memory that its result lies in, where that is more than the result."""
    result = operator(*args)
    return hidden_buffers(Call(H200, operator, args, {}, result)), storage_bytes(Call(H200, operator, args, {}, result))


def layer_norm_backward(grad: torch.Tensor, wanted: tuple[bool, ...] = (True, True, True)) -> list[int]:
    rows, columns = grad.shape
    x, weight = meta(rows, columns, dtype=grad.dtype), meta(columns, dtype=grad.dtype)
    stats = meta(rows, 1)
    return hidden(
        aten.native_layer_norm_backward.default, grad, x, [columns], stats, stats, weight, weight, list(wanted)
    )


# ---------------------------------------------------------------- layer and RMS norm, as measured on an H200
def test_layer_norm_backward_of_many_rows_hides_what_an_h200_shows() -> None:
    assert sum(layer_norm_backward(expanded(131_072, 1024, dtype=bf16))) == 281_020_448


@pytest.mark.parametrize(("rows", "columns"), [(16_384, 2048), (4096, 1024)])
def test_layer_norm_backward_of_fewer_rows_copies_the_gradient_only(rows: int, columns: int) -> None:
    assert layer_norm_backward(expanded(rows, columns, dtype=bf16)) == [rows * columns * 2]
    assert layer_norm_backward(meta(rows, columns, dtype=bf16)) == []


def test_rms_norm_backward_hides_what_an_h200_shows() -> None:
    x, weight = meta(32_768, 4096, dtype=bf16), meta(4096, dtype=bf16)
    grad = expanded(32_768, 4096, dtype=bf16)
    operator = aten._fused_rms_norm_backward.default
    assert hidden(operator, grad, x, [4096], meta(32_768, 1), weight, [True, True]) == [268_435_456]


# ---------------------------------------------------------------- layer and RMS norm, by rule
def test_rows_are_split_over_blocks_above_65536_only() -> None:
    assert layer_norm_backward(meta(65_536, 64)) == []
    matrix = 2049 * 64 * 4
    assert layer_norm_backward(meta(65_537, 64))[:3] == [matrix, matrix, 64 * 4]


def test_rows_are_not_split_where_the_columns_fill_half_of_the_gpu() -> None:
    assert layer_norm_backward(meta(65_537, 66 * 32)) == []
    assert layer_norm_backward(meta(65_537, 66 * 32 - 1)) != []


def test_only_wanted_parameter_gradients_are_summed() -> None:
    everything = layer_norm_backward(meta(65_537, 64))
    assert layer_norm_backward(meta(65_537, 64), (True, True, False)) == everything[1:]
    assert layer_norm_backward(meta(65_537, 64), (True, False, False)) == []


def test_many_rows_normalized_over_two_dimensions_are_not_known() -> None:
    x, weight, stats = meta(65_537, 4, 16), meta(4, 16), meta(65_537, 1, 1)
    operator = aten.native_layer_norm_backward.default
    with pytest.raises(NoRule, match=r"of 65,537 rows normalized over 2 dimensions$"):
        hidden(operator, x, x, [4, 16], stats, stats, weight, weight, [True, True, True])


def test_layer_norm_copies_what_is_not_contiguous() -> None:
    weight = meta(64)
    assert hidden(aten.native_layer_norm.default, meta(10, 64), [64], weight, weight, 1e-5) == []
    assert hidden(aten.native_layer_norm.default, meta(64, 10).t(), [64], weight, None, 1e-5) == [2560]
    assert hidden(aten._fused_rms_norm.default, meta(64, 10).t(), [64], weight, 1e-5) == [2560]


# ---------------------------------------------------------------- group norm
@pytest.mark.parametrize(
    ("dtype", "affine", "pixels", "expected"),
    [
        (torch.float32, True, 49, [4 * 32 * 4] * 2),
        (torch.float32, False, 49, []),
        (torch.float32, True, 1, []),
        (bf16, True, 49, [4 * 32 * 4] * 2),
        (bf16, True, 1, []),
        (f64, True, 49, [4 * 32 * 8] * 2),
    ],
)
def test_group_norm(dtype: torch.dtype, affine: bool, pixels: int, expected: list[int]) -> None:
    weight = meta(32, dtype=dtype) if affine else None
    x = meta(4, 32, pixels, dtype=dtype)
    assert hidden(aten.native_group_norm.default, x, weight, weight, 4, 32, pixels, 8, 1e-5) == expected


def test_group_norm_backward_holds_five_statistics() -> None:
    x, stats, weight = meta(4, 32, 49), meta(4, 8), meta(32)
    operator = aten.native_group_norm_backward.default
    args = (x, x, stats, stats, weight, 4, 32, 49, 8)
    assert sorted(hidden(operator, *args, [True, True, True])) == [128, 128, 512, 512, 512]
    assert hidden(operator, *args, [False, True, True]) == [512, 512]
    one_pixel = (meta(4, 32), meta(4, 32), stats, stats, weight, 4, 32, 1, 8)
    assert hidden(operator, *one_pixel, [True, True, True]) == [512, 512, 128, 128]
    assert hidden(operator, *one_pixel, [False, True, True]) == [512, 512]


# ---------------------------------------------------------------- batch norm
def batch_norm(x: torch.Tensor, weight: torch.Tensor | None, training: bool = True) -> list[int]:
    running = meta(x.shape[1])
    return hidden(aten.native_batch_norm.default, x, weight, weight, running, running, training, 0.1, 1e-5)


def test_batch_norm_of_channels_first_hides_nothing_as_on_an_h200() -> None:
    x, weight = meta(32, 64, 128, 128), meta(64)
    assert batch_norm(x, weight) == []
    empty = meta(0, dtype=torch.uint8)
    assert hidden(aten.cudnn_batch_norm.default, x, weight, weight, weight, weight, True, 0.1, 1e-5) == []
    backward = aten.cudnn_batch_norm_backward.default
    assert hidden(backward, x, x, weight, weight, weight, weight, weight, 1e-5, empty) == []


def cudnn_batch_norm(x: torch.Tensor, training: bool = True) -> list[int]:
    weight = meta(x.shape[1])
    return hidden(aten.cudnn_batch_norm.default, x, weight, weight, weight, weight, training, 0.1, 1e-5)


def test_batch_norm_by_cudnn_in_channels_last_is_not_known() -> None:
    message = r"^batch norm of channels last, whose workspace cuDNN chooses, shape \[4, 8, 16, 16\]$"
    with pytest.raises(NoRule, match=message):
        cudnn_batch_norm(meta(4, 8, 16, 16).to(memory_format=last))


def test_batch_norm_of_a_tensor_in_neither_layout_is_not_known() -> None:
    with pytest.raises(NoRule, match=r"^batch norm by cuDNN of a tensor that is not contiguous, shape"):
        cudnn_batch_norm(meta(4, 8, 16, 16).transpose(2, 3))
    with pytest.raises(NoRule, match=r"^batch norm of a tensor that is not contiguous, shape \[4, 8, 16, 16\]$"):
        batch_norm(meta(4, 8, 16, 16, dtype=bf16).transpose(2, 3), meta(8))


def test_batch_norm_for_evaluation_takes_nothing() -> None:
    assert cudnn_batch_norm(meta(4, 8, 16, 16), training=False) == []
    assert cudnn_batch_norm(meta(4, 8, 16, 16).to(memory_format=last), training=False) == []
    assert batch_norm(meta(4, 8, 16, 16, dtype=bf16), meta(8), training=False) == []


def test_batch_norm_by_cudnn_copies_the_gradient_of_a_sum() -> None:
    x, weight, empty = meta(4, 8, 16, 16), meta(8), meta(0, dtype=torch.uint8)
    backward = aten.cudnn_batch_norm_backward.default
    args = (weight, weight, weight, weight, weight, 1e-5, empty)
    assert hidden(backward, x, expanded(4, 8, 16, 16), *args) == [x.numel() * 4]


def test_bfloat16_channels_last_meets_in_staging_buffers() -> None:
    """2 x 64 rows of 64 channels fit few blocks; 32 x 128 x 128 rows take the most, 128."""
    weight = meta(64)
    assert batch_norm(meta(2, 64, 8, 8, dtype=bf16).to(memory_format=last), weight) == []
    assert batch_norm(meta(32, 64, 128, 128, dtype=bf16).to(memory_format=last), weight) == [4 * 64 * 128 * 4, 2 * 4]
    assert batch_norm(meta(1792, 64), weight) == []
    assert batch_norm(meta(1793, 64), weight) == [4 * 64 * 8 * 4, 2 * 4]


def test_batch_norm_backward_of_channels_last_holds_two_sums_per_channel() -> None:
    x = meta(32, 64, 16, 16, dtype=bf16).to(memory_format=last)
    weight = meta(64)
    args = (weight, weight, weight, weight, weight, True, 1e-5, [True, True, True])
    assert hidden(aten.native_batch_norm_backward.default, x, x, *args) == [256, 256]
    grad = expanded(32, 64, 16, 16, dtype=bf16)
    assert hidden(aten.native_batch_norm_backward.default, grad, x, *args) == [256, 256]
    first = meta(32, 64, 16, 16, dtype=bf16)
    assert hidden(aten.native_batch_norm_backward.default, grad, first, *args) == []
    assert hidden(aten.native_batch_norm_backward.default, x.transpose(2, 3), first, *args) == [x.numel() * 2]


# ---------------------------------------------------------------- pooling, resizing, padding
def test_pooling_takes_both_layouts_and_copies_the_rest() -> None:
    x = meta(4, 8, 16, 16)
    pool = aten.max_pool2d_with_indices.default
    assert hidden(pool, x, [2, 2]) == []
    assert hidden(pool, x.to(memory_format=last), [2, 2]) == []
    assert hidden(pool, x.transpose(2, 3), [2, 2]) == [x.numel() * 4]


def test_pooling_backward_copies_the_gradient_into_the_layout_of_the_input() -> None:
    x, grad = meta(4, 8, 16, 16), meta(4, 8, 8, 8)
    backward = aten.avg_pool2d_backward.default
    args = ([2, 2], [2, 2], [0, 0], False, True, None)
    assert hidden(backward, grad, x, *args) == []
    assert hidden(backward, grad, x.to(memory_format=last), *args) == [grad.numel() * 4]
    assert hidden(backward, expanded(4, 8, 8, 8), x, *args) == [grad.numel() * 4]


def test_what_resizing_copies_is_known_in_two_layouts_only() -> None:
    x = meta(4, 8, 16, 16)
    assert hidden(aten.upsample_nearest2d.default, x.to(memory_format=last), [32, 32]) == []
    grad = expanded(4, 8, 32, 32)
    backward = aten.upsample_bilinear2d_backward.default
    assert hidden(backward, grad, [32, 32], [4, 8, 16, 16], False) == [grad.numel() * 4]
    bicubic = aten.upsample_bicubic2d_backward.default
    assert hidden(bicubic, grad, [32, 32], [4, 8, 16, 16], False) == [grad.numel() * 4]
    assert hidden(bicubic, meta(4, 8, 32, 32), [32, 32], [4, 8, 16, 16], False) == []
    with pytest.raises(NoRule, match=r"of a self that is not contiguous, shape \[4, 8, 16, 16\]$"):
        hidden(aten.upsample_bicubic2d.default, x.transpose(2, 3), [32, 32], False)


def test_a_strided_image_that_is_resized_may_be_copied_and_its_result_too() -> None:
    x = meta(4, 8, 16, 16).transpose(2, 3)
    with pytest.raises(Estimated) as estimate:
        hidden(aten._upsample_bilinear2d_aa.default, x, [32, 32], False, outputs=meta(4, 8, 32, 32))
    assert estimate.value.bytes == Range(0, 4 * 8 * 16 * 16 * 4, 4 * 8 * 16 * 16 * 4 * 5)


def test_unfolding_outgrows_a_result_as_large_as_the_input() -> None:
    x, result_bytes = meta(4, 8, 16, 16), 4 * 8 * 9 * 14 * 14 * 4
    unfold, args = aten.im2col.default, ([3, 3], [1, 1], [0, 0], [1, 1])
    assert hidden_and_stored(unfold, x, *args) == ([x.numel() * 4], result_bytes)
    assert hidden_and_stored(unfold, x.transpose(2, 3), *args) == ([x.numel() * 4] * 2, result_bytes)


def test_folding_leaves_its_result_in_memory_as_large_as_the_input() -> None:
    columns, args = meta(4, 8 * 9, 14 * 14), ([16, 16], [3, 3], [1, 1], [0, 0], [1, 1])
    assert hidden_and_stored(aten.col2im.default, columns, *args) == ([], columns.numel() * 4)
    assert hidden_and_stored(aten.col2im.default, meta(4, 14 * 14, 8 * 9).transpose(1, 2), *args) == (
        [columns.numel() * 4],
        columns.numel() * 4,
    )


def test_grid_sampling_by_cudnn_is_known_for_contiguous_tensors_only() -> None:
    x, grid = meta(4, 8, 16, 16).transpose(2, 3), meta(4, 5, 5, 2)
    assert hidden(aten.grid_sampler_2d.default, x, grid, 0, 0, False) == []
    assert hidden(aten.cudnn_grid_sampler.default, meta(4, 8, 16, 16), grid) == []
    with pytest.raises(NoRule, match=r"of a self that is not contiguous, shape \[4, 8, 16, 16\]$"):
        hidden(aten.cudnn_grid_sampler.default, x, grid)
    with pytest.raises(NoRule, match=r"of a grad_output that is not contiguous, shape \[4, 8, 5, 5\]$"):
        hidden(aten.cudnn_grid_sampler_backward.default, meta(4, 8, 16, 16), grid, expanded(4, 8, 5, 5))


# ---------------------------------------------------------------- losses and distances
@pytest.mark.parametrize("operator", [aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default])
def test_a_reduced_loss_is_first_made_element_by_element(operator: Any) -> None:
    x = meta(1024, 1024)
    assert hidden(operator, x, x, 1) == [4 << 20, 512, 4]
    assert hidden(operator, x, x, 0) == []


def test_binary_cross_entropy_is_reduced_into_another_number() -> None:
    x, large = meta(10), meta(1024, 1024)
    assert hidden(aten.binary_cross_entropy.default, x, x, None, 0) == []
    assert hidden(aten.binary_cross_entropy.default, x, x, None, 1) == [4]
    assert hidden(aten.binary_cross_entropy.default, large, large, None, 1) == [4, 512, 4]


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_some_losses_lie_in_the_memory_of_every_elements_loss(reduction: int) -> None:
    x, row = meta(20, 30, dtype=bf16), meta(30, dtype=bf16)
    assert storage_bytes(Call(H200, aten.mse_loss.default, (x, x, reduction), {}, None)) == 1200
    assert storage_bytes(Call(H200, aten.mse_loss.default, (x, row, reduction), {}, None)) == 1200
    assert storage_bytes(Call(H200, aten.smooth_l1_loss.default, (x, x, reduction), {}, None)) == 1200
    assert storage_bytes(Call(H200, aten.binary_cross_entropy.default, (x, x, None, reduction), {}, None)) == 1200
    assert storage_bytes(Call(H200, aten.huber_loss.default, (x, x, reduction), {}, None)) is None


def test_distances_backward_make_a_gradient_for_every_pair() -> None:
    x, y, distances = meta(3, 20, 7), meta(3, 10, 7), meta(3, 20, 10)
    assert hidden(aten._cdist_backward.default, distances, x, y, 1.0, distances) == [3 * 10 * 20 * 7 * 4]
    assert hidden(aten._pdist_backward.default, meta(190), meta(20, 7), 2.0, meta(190)) == [19 * 20 * 7 * 4]
    assert hidden(aten._cdist_forward.default, x, y, 1.0, None) == []


# ---------------------------------------------------------------- recurrent cells
def test_bias_gradients_of_a_cell_are_sums_over_the_batch() -> None:
    states = meta(8192, 256)
    backward = aten._thnn_fused_lstm_cell_backward_impl.default
    same = hidden(aten.sum.dim_IntList, meta(8192, 1024), [0])
    assert same != []
    assert hidden(backward, states, states, states, states, meta(8192, 1024), True) == same
    assert hidden(backward, states, states, states, states, meta(8192, 1024), False) == []
    gru = aten._thnn_fused_gru_cell_backward.default
    assert hidden(gru, states, meta(8192, 1280), True) == hidden(aten.sum.dim_IntList, meta(8192, 768), [0])
