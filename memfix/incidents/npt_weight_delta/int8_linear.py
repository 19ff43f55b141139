"""Frozen linear layers with 8-bit weights: those of bitsandbytes if installed, else our own with a scale per row."""

# N tokens, D width of the input, F width of the result, C rows of the weight in a chunk

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ...ops.derivatives import first_derivative_only
from ...ops.products import as_rows, product_into, sum_dtype

LARGEST = 127
ROWS_PER_CHUNK = 1024  # rows that are dequantised at a time: 8 MiB at width 4096 and 16 bits


class Int8Linear(nn.Module):
    """A frozen ``nn.Linear`` whose int8 weight is rounded to multiples of a step, ``absmax / 127`` of its row.

    An element of the weight is off by at most half a step. An output is therefore off by at most
    ``absmax / 254 * sum(|hidden|)``, and a gradient of the input by at most ``sum(|upstream| * absmax) / 254``, beside
    the rounding of the dtype. The layer stores ``F*D + 4*F`` bytes. Forward and backward dequantise ``ROWS_PER_CHUNK``
    rows of the weight at a time and keep none of them.
    """

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight_FD = linear.weight.detach()
        # buffers, because casts of parameters leave their dtypes alone, in a sharded model too
        self.register_buffer("scale", weight_FD.abs().amax(1).float() / LARGEST)
        steps_F1 = self.scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
        self.register_buffer("weight", (weight_FD / steps_F1).round_().to(torch.int8))
        self.bias = linear.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Int8Product.apply(hidden, self.weight, self.scale)
        return out if self.bias is None else out + self.bias


class _Int8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight_FD: torch.Tensor, scale_F: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight_FD, scale_F)
        hidden_ND = as_rows(hidden)
        out_NF = hidden.new_empty(len(hidden_ND), len(weight_FD))
        for chunk in _chunks(weight_FD):
            product_into(out_NF[:, chunk], hidden_ND, _dequantised(weight_FD, scale_F, chunk, hidden.dtype).T)
        return out_NF.view(*hidden.shape[:-1], -1)

    @staticmethod
    @first_derivative_only("int8_linear")
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        weight_FD, scale_F = ctx.saved_tensors
        upstream_NF = as_rows(upstream)
        # chunks are added up in float32 or wider
        grad_ND = upstream.new_zeros(len(upstream_NF), weight_FD.shape[1], dtype=sum_dtype(upstream.dtype))
        for chunk in _chunks(weight_FD):
            product_into(
                grad_ND, upstream_NF[:, chunk], _dequantised(weight_FD, scale_F, chunk, upstream.dtype), add=True
            )
        return grad_ND.to(upstream.dtype).view(*upstream.shape[:-1], -1), None, None


def _chunks(weight_FD: torch.Tensor) -> Iterable[slice]:
    return (slice(start, start + ROWS_PER_CHUNK) for start in range(0, len(weight_FD), ROWS_PER_CHUNK))


def _dequantised(weight_FD: torch.Tensor, scale_F: torch.Tensor, rows: slice, dtype: torch.dtype) -> torch.Tensor:
    return (weight_FD[rows] * scale_F[rows].unsqueeze(1)).to(dtype)


def bitsandbytes_is_there() -> bool:
    return importlib.util.find_spec("bitsandbytes") is not None


def description() -> str:
    """The kind of 8-bit weights that a run has, in words, for its title."""
    if bitsandbytes_is_there():
        return "8-bit base weights by bitsandbytes"
    return "8-bit base weights by memfix's own int8: bitsandbytes is not installed"


def make_8bit(layers: Iterable[nn.Module]) -> None:
    """Replace every ``nn.Linear`` in ``layers``. bitsandbytes rounds its weights when they move to a GPU.

    In a simulation, where weights have no values, our own layers are used: bitsandbytes' kernels cannot be simulated.
    """
    for module in [module for layer in layers for module in layer.modules()]:
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                is_empty = child.weight.is_meta or isinstance(child.weight, FakeTensor)
                own = is_empty or not bitsandbytes_is_there()
                setattr(module, name, Int8Linear(child) if own else _bitsandbytes_linear(child))


def _bitsandbytes_linear(linear: nn.Linear) -> nn.Module:
    import bitsandbytes  # type: ignore[import-not-found, unused-ignore]

    made: nn.Module = bitsandbytes.nn.Linear8bitLt(
        linear.in_features, linear.out_features, bias=linear.bias is not None, has_fp16_weights=False, device="meta"
    )
    made.weight = bitsandbytes.nn.Int8Params(linear.weight.detach(), requires_grad=False, has_fp16_weights=False)
    made.bias = linear.bias
    return made
