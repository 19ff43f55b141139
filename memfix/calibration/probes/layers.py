"""Layers: norms, pooling, resizing, losses, distances, cells and convolutions, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from .registry import Step, bf16, f16, f32, f64, probe


def _image(device: str, shape: tuple[int, ...], dtype: torch.dtype, layout: str = "contiguous") -> torch.Tensor:
    """A leaf that requires a gradient. The layout ``transposed`` swaps the strides of the last two axes."""
    image = torch.rand(shape, dtype=dtype, device=device)
    if layout == "channels_last":
        image = image.to(memory_format=torch.channels_last)
    if layout == "transposed":
        image = image.transpose(-1, -2).contiguous().transpose(-1, -2)
    return image.requires_grad_()


def _forward_and_backward(layer: Callable[..., Any], *inputs: torch.Tensor, dense_gradient: bool = True) -> Step:
    """Run a layer forward and backward. Without ``dense_gradient`` the upstream gradient is an expanded scalar."""

    def step() -> None:
        result = layer(*inputs)
        result = result[0] if isinstance(result, tuple) else result
        result.backward(torch.ones_like(result)) if dense_gradient else result.sum().backward()

    return step


def _layer(
    device: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    kind: Callable[..., nn.Module],
    /,
    *sizes: Any,
    layout: str = "contiguous",
    dense_gradient: bool = True,
    **options: Any,
) -> Step:
    """Run the layer ``kind(*sizes, **options)`` on an image of ``shape``, forward and backward."""
    layer = kind(*sizes, device=device, **options)
    return _forward_and_backward(layer, _image(device, shape, dtype, layout), dense_gradient=dense_gradient)


# ---------------------------------------------------------------- norms
_FORMATS = ("contiguous", "channels_last")

probe("layer_norm", rows=(100, 65_536, 65_537, 131_072), columns=(48, 1024, 2112))(
    lambda device, rows, columns: _layer(device, (rows, columns), bf16, nn.LayerNorm, columns, dtype=bf16)
)
probe("layer_norm_of_an_expanded_gradient", rows=(4096, 131_072))(
    lambda device, rows: _layer(device, (rows, 1024), bf16, nn.LayerNorm, 1024, dtype=bf16, dense_gradient=False)
)
probe("layer_norm_of_odd_rows", dtype=(f16, f32, f64), bias=(True, False))(
    lambda device, dtype, bias: _layer(device, (70_001, 33), dtype, nn.LayerNorm, 33, bias=bias, dtype=dtype)
)
probe("rms_norm", rows=(4096, 70_000), dtype=(bf16, f32), layout=("contiguous", "transposed"))(
    lambda device, rows, dtype, layout: _layer(
        device, (rows, 1000), dtype, nn.RMSNorm, 1000, dtype=dtype, layout=layout
    )
)
probe("group_norm", pixels=(1, 14), dtype=(bf16, f32, f64))(
    lambda device, pixels, dtype: _layer(device, (130, 96, pixels, pixels), dtype, nn.GroupNorm, 8, 96, dtype=dtype)
)
probe("group_norm_without_weights", layout=_FORMATS)(
    lambda device, layout: _layer(device, (32, 96, 13, 15), f32, nn.GroupNorm, 8, 96, affine=False, layout=layout)
)
probe("batch_norm", shape=((64, 96, 28, 28), (3, 5, 7, 9)), dtype=(bf16, f16, f32), layout=_FORMATS)(
    lambda device, shape, dtype, layout: _layer(device, shape, dtype, nn.BatchNorm2d, shape[1], layout=layout)
)


@probe(dtype=(bf16, f16, f32), layout=_FORMATS)
def _batch_norm_for_evaluation(device: str, dtype: torch.dtype, layout: str) -> Step:
    layer = nn.BatchNorm2d(96, device=device).eval()
    return _forward_and_backward(layer, _image(device, (64, 96, 28, 28), dtype, layout))


probe("batch_norm_of_rows", rows=(1792, 1793, 50_000), dtype=(bf16, f32))(
    lambda device, rows, dtype: _layer(device, (rows, 64), dtype, nn.BatchNorm1d, 64)
)


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


_LAYOUTS = ("contiguous", "channels_last", "transposed")


def _of_images(device: str, layer: Callable[..., Any], layout: str = "contiguous", *, dense: bool = True) -> Step:
    return _forward_and_backward(layer, _image(device, (16, 24, 56, 54), f32, layout), dense_gradient=dense)


probe("pool", kind=tuple(_POOLS), layout=_LAYOUTS)(
    lambda device, kind, layout: _of_images(device, _POOLS[kind], layout)
)
probe("pool_of_an_expanded_gradient", kind=tuple(_POOLS))(
    lambda device, kind: _of_images(device, _POOLS[kind], dense=False)
)
probe("resize", kind=tuple(_RESIZES), layout=_LAYOUTS)(
    lambda device, kind, layout: _of_images(device, _RESIZES[kind], layout, dense=False)
)
probe("window", kind=tuple(_WINDOWS))(lambda device, kind: _of_images(device, _WINDOWS[kind]))
probe("window_of_transposed", kind=("unfold", "reflect", "replicate"))(
    lambda device, kind: _of_images(device, _WINDOWS[kind], "transposed")
)


@probe(align_corners=(True, False))
def _grid_sample(device: str, align_corners: bool) -> Step:
    grid = torch.rand(16, 31, 33, 2, device=device)
    return _of_images(device, lambda image: F.grid_sample(image, grid, align_corners=align_corners))


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
    return _forward_and_backward(lambda x: _LOSSES[kind](x, target), _image(device, (3_000_001,), dtype))


@probe(rows=(20, 200), p=(1.0, 2.0))
def _distances(device: str, rows: int, p: float) -> Step:
    other = torch.rand(3, 300, 40, device=device)
    return _forward_and_backward(lambda x: torch.cdist(x, other, p=p), _image(device, (3, rows, 40), f32))


# ---------------------------------------------------------------- recurrent cells and convolutions
probe("cell", cell=("LSTMCell", "GRUCell"), dtype=(f16, f32))(
    lambda device, cell, dtype: _layer(device, (8192, 96), dtype, getattr(nn, cell), 96, 256, dtype=dtype)
)


@probe(channels=(16, 64), dtype=(bf16, f16, f32), dense=(True, False))
def _depthwise_convolution(device: str, channels: int, dtype: torch.dtype, dense: bool) -> Step:
    layer = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, dtype=dtype, device=device)
    return _forward_and_backward(layer, _image(device, (16, channels, 56, 54), dtype), dense_gradient=dense)


def _conv2d(device: str, layout: str, *sizes: int, **options: Any) -> nn.Conv2d:
    layer = nn.Conv2d(*sizes, device=device, **options)
    if layout == "channels_last":
        layer.weight.data = layer.weight.data.to(memory_format=torch.channels_last)
    return layer


@probe(kernel=((1, 1), (3, 1), (3, 2)), dtype=(bf16, f32), layout=_FORMATS)
def _convolution(device: str, kernel: tuple[int, int], dtype: torch.dtype, layout: str) -> Step:
    size, stride = kernel
    layer = _conv2d(device, layout, 64, 128, size, stride=stride, padding=size // 2, dtype=dtype)
    return _forward_and_backward(layer, _image(device, (16, 64, 56, 56), dtype, layout))


@probe(channels=((64, 64), (64, 128), (128, 64)), dtype=(bf16, f32), layout=_FORMATS, dense=(True, False))
def _convolution_of_large_images(
    device: str, channels: tuple[int, int], dtype: torch.dtype, layout: str, dense: bool
) -> Step:
    plain, biased = (_conv2d(device, layout, *channels, 3, padding=1, bias=b, dtype=dtype) for b in (False, True))
    image = _image(device, (32, channels[0], 128, 128), dtype, layout)
    return _forward_and_backward(lambda x: plain(x) + biased(x), image, dense_gradient=dense)


_PIXELS = {"Conv1d": (1000,), "Conv3d": (9, 20, 20), "ConvTranspose2d": (31, 33)}
probe("convolution_in_other_dimensions", kind=tuple(_PIXELS))(
    lambda device, kind: _layer(device, (8, 16, *_PIXELS[kind]), f32, getattr(nn, kind), 16, 32, 3)
)
