"""Activations, gates and the layers around them, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from .registry import Step, bf16, f16, f32, f64, i32, leaf, probe, train_on, train_step

_ROWS, _COLUMNS = 2333, 770

_BY_NAME = """relu relu6 leaky_relu elu selu celu gelu silu mish hardswish hardsigmoid hardtanh hardshrink softshrink
    tanhshrink softplus softsign logsigmoid glu""".split()
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: getattr(F, name) for name in _BY_NAME},
    "relu_in_place": lambda x: F.relu_(x + 1),
    "leaky_relu_in_place": lambda x: F.leaky_relu(x * 2, 0.1, inplace=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "elu_in_place": lambda x: F.elu(x * 2, inplace=True),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu_in_place": lambda x: F.silu(x * 2, inplace=True),
    "threshold": lambda x: F.threshold(x, 0.1, 0.0),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softmax": lambda x: F.softmax(x, -1),
    "softmax_of_columns": lambda x: F.softmax(x, 0),
    "softmin": lambda x: F.softmin(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "softmax_in_float32": lambda x: F.softmax(x, -1, dtype=f32),
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "geglu": lambda x: F.gelu(x[:, ::2]) * x[:, 1::2],
    "squared_relu": lambda x: F.relu(x).square(),
    "maxout": lambda x: x.view(-1, 154, 5).amax(-1),
    "snake": lambda x: x + torch.sin(x) ** 2,
    "sine": lambda x: torch.sin(30 * x),
    "gaussian": lambda x: torch.exp(-x * x / 2),
    "log1p": lambda x: torch.log1p(x.abs()) * x.sign(),
    "softcap": lambda x: 30 * torch.tanh(x / 30),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "normalize_columns": lambda x: F.normalize(x, p=1.0, dim=0),
    "layer_norm": lambda x: F.layer_norm(x, (_COLUMNS,)),
    "rms_norm": lambda x: F.rms_norm(x, (_COLUMNS,)),
    "rms_norm_by_hand": lambda x: x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).type_as(x),
    "layer_norm_by_hand": lambda x: (x - x.mean(-1, True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt(),
    "local_response": lambda x: F.local_response_norm(x.view(-1, 70, 11), 5),
    "pow": lambda x: (x.abs() + 1).pow(1.5) + (x.abs() + 1).reciprocal(),
    "trigonometry": lambda x: torch.atan2(x.sin(), x.cos()) + torch.asinh(x) + torch.erf(x),
    "special": lambda x: torch.special.log_ndtr(x) + torch.special.expit(x) + torch.sinc(x),
    "straight_through": lambda x: x + (x.round() - x).detach(),
    "quantized": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
    "quantized_by_tensors": lambda x: torch.fake_quantize_per_tensor_affine(x, *_steps(x, 1), -128, 127),
    "quantized_by_channel": lambda x: torch.fake_quantize_per_channel_affine(x, *_steps(x, _COLUMNS), 1, -128, 127),
    "quantized_by_learned_steps": lambda x: torch._fake_quantize_learnable_per_tensor_affine(
        x, _steps(x, 1)[0].requires_grad_(), torch.zeros(1, device=x.device), -128, 127, 1.0
    ),
}


def _steps(x: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps and zero points of quantization."""
    return torch.full((number,), 0.1, device=x.device), torch.zeros(number, dtype=i32, device=x.device)


_IN_HALF_PRECISION = "gelu silu mish softplus logsigmoid softmax_in_float32 swiglu rms_norm_by_hand rrelu".split()

probe("activation", of=tuple(_ACTIVATIONS))(
    lambda device, of: train_on(lambda x: _ACTIVATIONS[of](x).square().sum(), leaf(device, _ROWS, _COLUMNS))
)
probe("small_activation", of=_IN_HALF_PRECISION, dtype=(bf16, f16))(
    lambda device, of, dtype: train_on(
        lambda x: _ACTIVATIONS[of](x).float().mean(), leaf(device, _ROWS, _COLUMNS, dtype=dtype)
    )
)


@probe(of=("gelu", "elu", "softplus", "softmax", "layer_norm", "glu", "maxout", "trigonometry"))
def _activation_of_transposed(device: str, of: str) -> Step:
    x = leaf(device, _COLUMNS, _ROWS, dtype=f64)
    return train_on(lambda x: _ACTIVATIONS[of](x.t() if of != "maxout" else x.t().contiguous()).sum(), x)


@probe(shared=(True, False))
def _prelu(device: str, shared: bool) -> Step:
    layer = nn.PReLU(1 if shared else 48).to(device)
    x = torch.randn(13, 48, 61, 57, device=device).requires_grad_()
    return train_step([x, *layer.parameters()], lambda: layer(x).square().sum())


_SHAPES = {"dropout1d": (33, 96, 517), "dropout3d": (9, 24, 7, 31, 33)}
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")

probe("dropped", of=_DROPOUTS)(
    lambda device, of: train_on(
        lambda x: getattr(F, of)(x, 0.3, training=True).square().mean(),
        leaf(device, *_SHAPES.get(of, (13, 48, 61, 57))),
    )
)
probe("dropped_in_place", of=("dropout", "alpha_dropout"), dtype=(bf16, f16))(
    lambda device, of, dtype: partial(
        getattr(F, of), torch.randn(_ROWS, _COLUMNS, dtype=dtype, device=device), 0.3, training=True, inplace=True
    )
)


@probe(rate=(0.0, 0.2))
def _stochastic_depth(device: str, rate: float) -> Step:
    def loss(x: torch.Tensor) -> torch.Tensor:
        keep = x.new_empty(33, 1, 1, 1).bernoulli_(1 - rate).div_(1 - rate)
        return (x + F.relu(x) * keep).square().mean()

    return train_on(loss, leaf(device, 33, 96, 31, 29))


@probe(gated=(True, False), dtype=(bf16, f32))
def _feed_forward(device: str, gated: bool, dtype: torch.dtype) -> Step:
    up = nn.Linear(390, 1030 * (1 + gated), bias=False, dtype=dtype, device=device)
    down = nn.Linear(1030, 390, bias=False, dtype=dtype, device=device)
    x = torch.randn(7, 517, 390, dtype=dtype, device=device).requires_grad_()

    def loss() -> torch.Tensor:
        hidden = up(x)
        hidden = F.silu(hidden[..., :1030]) * hidden[..., 1030:] if gated else F.gelu(hidden)
        return (x + down(hidden)).float().square().mean()

    return train_step([x, up.weight, down.weight], loss)
