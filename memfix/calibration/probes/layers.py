"""Layers: norms, pooling, resizing, losses, distances, cells and convolutions, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from ...meters.base import Step
from .registry import probe

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def _image(device: str, shape: tuple[int, ...], dtype: torch.dtype, layout: str = "contiguous") -> torch.Tensor:
    """A leaf that wants a gradient; ``transposed`` swaps the last two axes of its strides."""
    image = torch.rand(shape, dtype=dtype, device=device)
    if layout == "channels_last":
        image = image.to(memory_format=torch.channels_last)
    if layout == "transposed":
        image = image.transpose(-1, -2).contiguous().transpose(-1, -2)
    return image.requires_grad_()


def _forward_and_backward(layer: Callable[..., Any], *inputs: torch.Tensor, dense_gradient: bool = True) -> Step:
    """``dense_gradient``: else the gradient arrives expanded, as that of a sum does."""

    def step() -> None:
        result = layer(*inputs)
        result = result[0] if isinstance(result, tuple) else result
        result.backward(torch.ones_like(result)) if dense_gradient else result.sum().backward()

    return step


# ---------------------------------------------------------------- norms
@probe(rows=(100, 65_536, 65_537, 131_072), columns=(48, 1024, 2112))
def _layer_norm(device: str, rows: int, columns: int) -> Step:
    return _forward_and_backward(
        nn.LayerNorm(columns, dtype=bf16, device=device), _image(device, (rows, columns), bf16)
    )


@probe(rows=(4096, 131_072))
def _layer_norm_of_an_expanded_gradient(device: str, rows: int) -> Step:
    layer = nn.LayerNorm(1024, dtype=bf16, device=device)
    return _forward_and_backward(layer, _image(device, (rows, 1024), bf16), dense_gradient=False)


@probe(dtype=(f16, f32, f64), bias=(True, False))
def _layer_norm_of_odd_rows(device: str, dtype: torch.dtype, bias: bool) -> Step:
    layer = nn.LayerNorm(33, bias=bias, dtype=dtype, device=device)
    return _forward_and_backward(layer, _image(device, (70_001, 33), dtype))


@probe(rows=(4096, 70_000), dtype=(bf16, f32), layout=("contiguous", "transposed"))
def _rms_norm(device: str, rows: int, dtype: torch.dtype, layout: str) -> Step:
    layer = nn.RMSNorm(1000, dtype=dtype, device=device)
    return _forward_and_backward(layer, _image(device, (rows, 1000), dtype, layout))


@probe(pixels=(1, 14), dtype=(bf16, f32, f64))
def _group_norm(device: str, pixels: int, dtype: torch.dtype) -> Step:
    layer = nn.GroupNorm(8, 96, dtype=dtype, device=device)
    return _forward_and_backward(layer, _image(device, (130, 96, pixels, pixels), dtype))


@probe(layout=("contiguous", "channels_last"))
def _group_norm_without_weights(device: str, layout: str) -> Step:
    layer = nn.GroupNorm(8, 96, affine=False, device=device)
    return _forward_and_backward(layer, _image(device, (32, 96, 13, 15), f32, layout))


@probe(shape=((64, 96, 28, 28), (3, 5, 7, 9)), dtype=(bf16, f16, f32), layout=("contiguous", "channels_last"))
def _batch_norm(device: str, shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Step:
    return _forward_and_backward(nn.BatchNorm2d(shape[1], device=device), _image(device, shape, dtype, layout))


@probe(dtype=(bf16, f16, f32), layout=("contiguous", "channels_last"))
def _batch_norm_for_evaluation(device: str, dtype: torch.dtype, layout: str) -> Step:
    layer = nn.BatchNorm2d(96, device=device).eval()
    return _forward_and_backward(layer, _image(device, (64, 96, 28, 28), dtype, layout))


@probe(rows=(1792, 1793, 50_000), dtype=(bf16, f32))
def _batch_norm_of_rows(device: str, rows: int, dtype: torch.dtype) -> Step:
    return _forward_and_backward(nn.BatchNorm1d(64, device=device), _image(device, (rows, 64), dtype))


@probe(affine=(True, False), dtype=(bf16, f32))
def _instance_norm(device: str, affine: bool, dtype: torch.dtype) -> Step:
    x = _image(device, (16, 24, 31, 33), dtype)
    return _forward_and_backward(nn.InstanceNorm2d(24, affine=affine, dtype=dtype, device=device), x)


@probe(rows=(512, 1000))
def _weight_norm(device: str, rows: int) -> Step:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(256, rows, device=device))
    return _forward_and_backward(layer, _image(device, (64, 256), f32))


# ---------------------------------------------------------------- pooling, resizing, padding
_POOLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": lambda x: F.max_pool2d(x, 3, 2, 1),
    "average": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "adaptive_max": lambda x: F.adaptive_max_pool2d(x, 7),
    "adaptive_average": lambda x: F.adaptive_avg_pool2d(x, 7),
}
_RESIZES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "smaller": lambda x: F.interpolate(x, size=(20, 20), mode="bilinear", antialias=True),
}
_WINDOWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "reflect": lambda x: F.pad(x, (1, 2, 3, 4), mode="reflect"),
    "replicate": lambda x: F.pad(x, (1, 2, 3, 4), mode="replicate"),
    "unfold": lambda x: F.unfold(x, 3, padding=1),
    "fold": lambda x: F.fold(x.reshape(16, 24 * 4, -1), (28, 29), 2),
    "shuffle": lambda x: F.pixel_shuffle(x, 2),
}


@probe(kind=tuple(_POOLS), layout=("contiguous", "channels_last", "transposed"))
def _pool(device: str, kind: str, layout: str) -> Step:
    return _forward_and_backward(_POOLS[kind], _image(device, (16, 24, 56, 54), f32, layout))


@probe(kind=tuple(_POOLS))
def _pool_of_an_expanded_gradient(device: str, kind: str) -> Step:
    return _forward_and_backward(_POOLS[kind], _image(device, (16, 24, 56, 54), f32), dense_gradient=False)


@probe(kind=tuple(_RESIZES), layout=("contiguous", "channels_last", "transposed"))
def _resize(device: str, kind: str, layout: str) -> Step:
    return _forward_and_backward(_RESIZES[kind], _image(device, (16, 24, 56, 54), f32, layout), dense_gradient=False)


@probe(kind=tuple(_WINDOWS))
def _window(device: str, kind: str) -> Step:
    return _forward_and_backward(_WINDOWS[kind], _image(device, (16, 24, 56, 54), f32))


@probe(kind=("unfold", "reflect", "replicate"))
def _window_of_transposed(device: str, kind: str) -> Step:
    return _forward_and_backward(_WINDOWS[kind], _image(device, (16, 24, 56, 54), f32, "transposed"))


@probe(align_corners=(True, False))
def _grid_sample(device: str, align_corners: bool) -> Step:
    grid = torch.rand(16, 31, 33, 2, device=device)
    x = _image(device, (16, 24, 56, 54), f32)
    return _forward_and_backward(lambda image: F.grid_sample(image, grid, align_corners=align_corners), x)


# ---------------------------------------------------------------- losses and distances
_LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mse": F.mse_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "binary": F.binary_cross_entropy,
    "binary_logits": F.binary_cross_entropy_with_logits,
}


@probe(kind=tuple(_LOSSES), dtype=(bf16, f32))
def _loss(device: str, kind: str, dtype: torch.dtype) -> Step:
    target = torch.rand(3_000_001, dtype=dtype, device=device)
    loss = _LOSSES[kind]
    return _forward_and_backward(lambda x: loss(x, target), _image(device, (3_000_001,), dtype))


@probe(rows=(20, 200), p=(1.0, 2.0))
def _distances(device: str, rows: int, p: float) -> Step:
    other = torch.rand(3, 300, 40, device=device)
    return _forward_and_backward(lambda x: torch.cdist(x, other, p=p), _image(device, (3, rows, 40), f32))


# ---------------------------------------------------------------- recurrent cells
@probe(cell=("LSTMCell", "GRUCell"), dtype=(f16, f32))
def _cell(device: str, cell: str, dtype: torch.dtype) -> Step:
    layer = getattr(nn, cell)(96, 256, dtype=dtype, device=device)
    return _forward_and_backward(layer, _image(device, (8192, 96), dtype))


# ---------------------------------------------------------------- convolutions
@probe(channels=(16, 64), dtype=(bf16, f16, f32), dense=(True, False))
def _depthwise_convolution(device: str, channels: int, dtype: torch.dtype, dense: bool) -> Step:
    layer = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, dtype=dtype, device=device)
    return _forward_and_backward(layer, _image(device, (16, channels, 56, 54), dtype), dense_gradient=dense)


@probe(kernel=((1, 1), (3, 1), (3, 2)), dtype=(bf16, f32), layout=("contiguous", "channels_last"))
def _convolution(device: str, kernel: tuple[int, int], dtype: torch.dtype, layout: str) -> Step:
    size, stride = kernel
    layer = nn.Conv2d(64, 128, size, stride=stride, padding=size // 2, dtype=dtype, device=device)
    if layout == "channels_last":
        layer.weight.data = layer.weight.data.to(memory_format=torch.channels_last)
    return _forward_and_backward(layer, _image(device, (16, 64, 56, 56), dtype, layout))


@probe(
    channels=((64, 64), (64, 128), (128, 64)),
    dtype=(bf16, f32),
    layout=("contiguous", "channels_last"),
    dense=(True, False),
)
def _convolution_of_large_images(
    device: str, channels: tuple[int, int], dtype: torch.dtype, layout: str, dense: bool
) -> Step:
    layer = nn.Conv2d(*channels, 3, padding=1, bias=False, dtype=dtype, device=device)
    with_bias = nn.Conv2d(*channels, 3, padding=1, dtype=dtype, device=device)
    for one in (layer, with_bias):
        if layout == "channels_last":
            one.weight.data = one.weight.data.to(memory_format=torch.channels_last)
    image = _image(device, (32, channels[0], 128, 128), dtype, layout)
    return _forward_and_backward(lambda x: layer(x) + with_bias(x), image, dense_gradient=dense)


@probe(kind=("Conv1d", "Conv3d", "ConvTranspose2d"))
def _convolution_in_other_dimensions(device: str, kind: str) -> Step:
    pixels = {"Conv1d": (1000,), "Conv3d": (9, 20, 20), "ConvTranspose2d": (31, 33)}[kind]
    layer = getattr(nn, kind)(16, 32, 3, device=device)
    return _forward_and_backward(layer, _image(device, (8, 16, *pixels), f32))
