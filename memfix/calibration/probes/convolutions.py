"""Convolutions of well-known models, whose workspace cuDNN chooses: the output and each gradient on its own."""

from __future__ import annotations

import torch

from ...meters.simulated.workspace.memory_formats import CHANNELS_LAST
from .registry import Step, bf16, f16, f32, probe

aten = torch.ops.aten

# shape of the image without the batch, shape of the weight, stride, padding, dilation
_LAYERS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, int, int]] = {
    "resnet_stem": ((3, 224, 224), (64, 3, 7, 7), 2, 3, 1),
    "resnet_56": ((64, 56, 56), (64, 64, 3, 3), 1, 1, 1),
    "resnet_28": ((128, 28, 28), (128, 128, 3, 3), 1, 1, 1),
    "resnet_14": ((256, 14, 14), (256, 256, 3, 3), 1, 1, 1),
    "resnet_7": ((512, 7, 7), (512, 512, 3, 3), 1, 1, 1),
    "resnet_down": ((64, 56, 56), (128, 64, 3, 3), 2, 1, 1),
    "resnet_shortcut": ((64, 56, 56), (128, 64, 1, 1), 2, 0, 1),
    "resnet_narrow": ((256, 56, 56), (64, 256, 1, 1), 1, 0, 1),
    "resnet_widen": ((512, 7, 7), (2048, 512, 1, 1), 1, 0, 1),
    "resnext": ((128, 56, 56), (128, 4, 3, 3), 1, 1, 1),
    "convnext_depthwise": ((96, 56, 56), (96, 1, 7, 7), 1, 3, 1),
    "convnext_down": ((96, 56, 56), (192, 96, 2, 2), 2, 0, 1),
    "patches_16": ((3, 224, 224), (768, 3, 16, 16), 16, 0, 1),
    "unet_64": ((64, 128, 128), (64, 64, 3, 3), 1, 1, 1),
    "unet_joined": ((640, 32, 32), (320, 640, 3, 3), 1, 1, 1),
    "mobilenet_depthwise": ((144, 56, 56), (144, 1, 3, 3), 2, 1, 1),
    "squeeze": ((480, 1, 1), (20, 480, 1, 1), 1, 0, 1),
    "segformer_stem": ((3, 512, 512), (32, 3, 7, 7), 4, 3, 1),
    "segformer_reduction": ((32, 128, 128), (32, 32, 8, 8), 8, 0, 1),
    "dilated": ((512, 28, 28), (512, 512, 3, 3), 1, 4, 4),
    "odd_channels": ((13, 61, 57), (48, 13, 3, 3), 1, 0, 1),
    "whisper": ((80, 3000), (384, 80, 3), 1, 1, 1),
    "wav2vec": ((512, 3199), (512, 512, 3), 2, 0, 1),
    "wav2vec_position": ((768, 249), (768, 48, 128), 1, 64, 1),
    "video": ((64, 8, 28, 28), (64, 64, 3, 3, 3), 1, 1, 1),
}
_UPSAMPLING = {
    "unet_up": ((128, 32, 32), (128, 64, 2, 2), 2, 0, 1),
    "gan_up": ((256, 16, 16), (256, 128, 4, 4), 2, 1, 1),
}


@probe(layer=tuple(_LAYERS), batch=(2, 16), dtype=(f32, bf16), channels_last=(False, True))
def _convolution_grid(device: str, layer: str, batch: int, dtype: torch.dtype, channels_last: bool) -> Step:
    return _parts_of(device, _LAYERS[layer], batch, dtype, channels_last, transposed=False)


@probe(layer=tuple(_LAYERS), channels_last=(False, True))
def _convolution_grid_in_half_precision(device: str, layer: str, channels_last: bool) -> Step:
    return _parts_of(device, _LAYERS[layer], 4, f16, channels_last, transposed=False)


@probe(layer=tuple(_UPSAMPLING), batch=(2, 16), dtype=(f32, bf16), channels_last=(False, True))
def _convolution_grid_transposed(device: str, layer: str, batch: int, dtype: torch.dtype, channels_last: bool) -> Step:
    return _parts_of(device, _UPSAMPLING[layer], batch, dtype, channels_last, transposed=True)


def _parts_of(
    device: str,
    layer: tuple[tuple[int, ...], tuple[int, ...], int, int, int],
    batch: int,
    dtype: torch.dtype,
    channels_last: bool,
    *,
    transposed: bool,
) -> Step:
    """A step that computes the output, then the gradient of the image, of the weight, and of both and the bias."""
    size, kernel, stride, padding, dilation = layer
    image = torch.randn((batch, *size), dtype=dtype, device=device)
    weight = torch.randn(kernel, dtype=dtype, device=device)
    if channels_last and image.dim() in CHANNELS_LAST:
        image, weight = (tensor.to(memory_format=CHANNELS_LAST[image.dim()]) for tensor in (image, weight))
    groups = 1 if transposed else size[0] // kernel[1]
    num_pixels = len(size) - 1
    lists = [[step] * num_pixels for step in (stride, padding, dilation)]
    rest = (*lists, transposed, [0] * num_pixels, groups)
    num_outputs = kernel[1] if transposed else kernel[0]

    def step() -> None:
        output = aten.convolution.default(image, weight, None, *rest)
        for mask in ([True, False, False], [False, True, False], [True, True, True]):
            aten.convolution_backward.default(output, image, weight, [num_outputs], *rest, mask)

    return step
