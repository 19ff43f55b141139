"""A training step of typical models: transformers, recurrent and graph nets, convolutional nets, generators."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from .registry import Step, bf16, f32, leaf, probe, train_on, train_step


def _mean_square(module: Callable[..., Any], *inputs: torch.Tensor, **named: Any) -> torch.Tensor:
    out = module(*inputs, **named)
    return (out[0] if isinstance(out, tuple) else out).float().square().mean()


def _step(module: nn.Module, *inputs: torch.Tensor, **named: Any) -> Step:
    return train_step(module, lambda: _mean_square(module, *inputs, **named))


# ---------------------------------------------------------------- transformers
@probe(norm_first=(True, False), activation=("relu", "gelu"), dtype=(bf16, f32))
def _encoder_layer(device: str, norm_first: bool, activation: str, dtype: torch.dtype) -> Step:
    layer = nn.TransformerEncoderLayer(
        384, 6, 1001, dropout=0.1, activation=activation, batch_first=True, norm_first=norm_first
    ).to(device=device, dtype=dtype)
    return _step(layer, torch.randn(5, 517, 384, dtype=dtype, device=device))


@probe(masked=("none", "causal", "padding"), evaluated=(False, True))
def _encoder(device: str, masked: str, evaluated: bool) -> Step:
    layer = nn.TransformerEncoderLayer(192, 4, 515, batch_first=True, device=device)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device).train(not evaluated)
    x = torch.randn(9, 257, 192, device=device)
    named: dict[str, Any] = {}
    if masked == "causal":
        named = {"mask": nn.Transformer.generate_square_subsequent_mask(257, device=device), "is_causal": True}
    if masked == "padding":
        named = {"src_key_padding_mask": torch.zeros(9, 257, dtype=torch.bool, device=device)}
    return torch.no_grad()(partial(model, x, **named)) if evaluated else _step(model, x, **named)


@probe()
def _decoder(device: str) -> Step:
    layer = nn.TransformerDecoderLayer(192, 4, 515, batch_first=True)
    model = nn.TransformerDecoder(layer, 2).to(device)
    x, memory = torch.randn(7, 129, 192, device=device), torch.randn(7, 257, 192, device=device)
    mask = nn.Transformer.generate_square_subsequent_mask(129, device=device)
    return _step(model, x, memory, tgt_mask=mask, tgt_is_causal=True)


@probe(batch_first=(True, False))
def _encoder_and_decoder(device: str, batch_first: bool) -> Step:
    model = nn.Transformer(192, 4, 2, 2, 515, batch_first=batch_first).to(device)
    return _step(model, torch.randn(7, 129, 192, device=device), torch.randn(7, 129, 192, device=device))


@probe(weights=("none", "averaged", "each"), masked=("none", "additive", "boolean", "padding"))
def _multihead_attention(device: str, weights: str, masked: str) -> Step:
    dropout = 0.1 if masked in ("none", "boolean") else 0.0
    layer = nn.MultiheadAttention(192, 6, dropout=dropout, batch_first=True).to(device)
    x = leaf(device, 7, 257, 192)
    named: dict[str, Any] = {"need_weights": weights != "none", "average_attn_weights": weights != "each"}
    if masked == "additive":
        named["attn_mask"] = torch.zeros(257, 257, device=device)
    if masked == "boolean":
        named["attn_mask"] = torch.ones(257, 257, dtype=torch.bool, device=device).triu(1)
    if masked == "padding":
        named["key_padding_mask"] = torch.zeros(7, 257, dtype=torch.bool, device=device)
    return train_step([x, *layer.parameters()], lambda: _mean_square(layer, x, x, x, **named))


@probe(extra=("bias_kv", "zero_attention", "other_widths"))
def _multihead_attention_with(device: str, extra: str) -> Step:
    named: dict[str, Any] = {
        "bias_kv": {"add_bias_kv": True}, "zero_attention": {"add_zero_attn": True},
        "other_widths": {"kdim": 130, "vdim": 70},
    }[extra]  # fmt: skip
    layer = nn.MultiheadAttention(192, 6, **named).to(device)
    x, k, v = (torch.randn(257, 7, w, device=device) for w in ((192, 130, 70) if "kdim" in named else (192,) * 3))
    return _step(layer, x, k, v)


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-right, left], -1) * angles.sin()


class _Block(nn.Module):
    """A transformer block with pre-norm, rotary positions, grouped keys and a gated feed-forward."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.each = heads, groups, width // heads
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * groups * self.each, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up, self.down = nn.Linear(width, 2 * 1030, bias=False), nn.Linear(1030, width, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        b, length, _ = x.shape
        y = self.before(x)
        q = _rotated(self.query(y).view(b, length, self.heads, self.each).transpose(1, 2), angles)
        k, v = self.key_value(y).view(b, length, 2 * self.groups, self.each).transpose(1, 2).chunk(2, 1)
        y = F.scaled_dot_product_attention(q, _rotated(k, angles), v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, length, -1))
        gate, up = self.gate_up(self.between(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


@probe(dtype=(bf16, f32), tied=(True, False), groups=(2, 6))
def _language_model(device: str, dtype: torch.dtype, tied: bool, groups: int) -> Step:
    embedding, head = nn.Embedding(5003, 384), nn.Linear(384, 5003, bias=False)
    if tied:
        head.weight = embedding.weight
    model = nn.ModuleList([embedding, *(_Block(384, 6, groups) for _ in range(3)), head]).to(device, dtype)
    ids = torch.randint(0, 5003, (3, 517), device=device)
    angles = torch.outer(torch.arange(517, device=device), 1e4 ** -torch.linspace(0, 1, 32, device=device))
    angles = torch.cat([angles, angles], -1).to(dtype)

    def loss() -> torch.Tensor:
        x = model[0](ids)
        for block in list(model)[1:-1]:
            x = block(x, angles)
        return F.cross_entropy(model[-1](x).flatten(0, 1).float(), ids.flatten())

    return train_step(model, loss)


_SCORED: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "plain": lambda q, k, v: (q @ k.transpose(-1, -2) / 8).softmax(-1) @ v,
    "causal": lambda q, k, v: _masked(q, k).softmax(-1) @ v,
    "alibi": lambda q, k, v: (_masked(q, k) + _alibi(q)).softmax(-1) @ v,
    "einsum": lambda q, k, v: torch.einsum(
        "bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v
    ),
    "linear": lambda q, k, v: (F.elu(q) + 1) @ ((F.elu(k) + 1).transpose(-1, -2) @ v),
    "linear_causal": lambda q, k, v: _linear_causal(F.elu(q)[..., :16] + 1, F.elu(k)[..., :16] + 1, v[..., :16]),
    "window": lambda q, k, v: _windowed(q, k, v, 31),
    "chunked": lambda q, k, v: torch.cat([(p @ k.transpose(-1, -2)).softmax(-1) @ v for p in q.split(100, 2)], 2),
    "relative": lambda q, k, v: (q @ k.transpose(-1, -2) + (q @ k.transpose(-1, -2)).roll(1, -1)).softmax(-1) @ v,
    "cosine": lambda q, k, v: (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * 10).softmax(-1) @ v,
    "top": lambda q, k, v: _sparse(q @ k.mT) @ v,
    "talking": lambda q, k, v: torch.einsum("bhqk,hg->bgqk", (q @ k.mT).softmax(-1), q.new_ones(5, 5)) @ v,
}  # fmt: skip


def _masked(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    future = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return (q @ k.transpose(-1, -2) / 8).masked_fill(future, float("-inf"))


def _alibi(q: torch.Tensor) -> torch.Tensor:
    places = torch.arange(q.shape[-2], device=q.device)
    slopes = 2.0 ** -torch.arange(1, q.shape[1] + 1, device=q.device)
    return (places[None, :] - places[:, None]) * slopes[:, None, None]


def _linear_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    states = (k[..., :, None] * v[..., None, :]).cumsum(2)
    return (q[..., None, :] @ states).squeeze(-2) / (q * k.cumsum(2)).sum(-1, keepdim=True)


def _windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, size: int) -> torch.Tensor:
    k, v = (F.pad(t, (0, 0, size - 1, 0)).unfold(2, size, 1) for t in (k, v))
    scores = torch.einsum("bhqd,bhqdw->bhqw", q, k).softmax(-1)
    return torch.einsum("bhqw,bhqdw->bhqd", scores, v)


def _sparse(scores: torch.Tensor) -> torch.Tensor:
    best = scores.topk(32, -1)
    return torch.full_like(scores, float("-inf")).scatter(-1, best.indices, best.values).softmax(-1)


probe("attention_by_hand", of=tuple(_SCORED))(
    lambda device, of: train_on(
        lambda q, k, v: _SCORED[of](q, k, v).square().mean(), *(leaf(device, 3, 5, 517, 64) for _ in range(3))
    )
)


@probe(pooled=("token", "mean"))
def _vision_transformer(device: str, pooled: str) -> Step:
    patches, token = nn.Conv2d(3, 192, 14, stride=14), nn.Parameter(torch.zeros(1, 1, 192))
    layer = nn.TransformerEncoderLayer(192, 6, 515, dropout=0.0, batch_first=True, norm_first=True)
    head = nn.Linear(192, 103)
    model = nn.ModuleList([patches, layer, head]).to(device)
    token, place = nn.Parameter(token.data.to(device)), nn.Parameter(torch.zeros(1, 257, 192, device=device))
    images, labels = torch.randn(9, 3, 224, 224, device=device), torch.randint(0, 103, (9,), device=device)

    def loss() -> torch.Tensor:
        x = patches(images).flatten(2).transpose(1, 2)
        x = layer(torch.cat([token.expand(9, -1, -1), x], 1) + place)
        return F.cross_entropy(head(x[:, 0] if pooled == "token" else x.mean(1)), labels)

    return train_step([token, place, *model.parameters()], loss)


@probe(of=("dense", "dispatched", "gathered"))
def _experts(device: str, of: str) -> Step:
    x, router = leaf(device, 3003, 192), nn.Linear(192, 8).to(device)
    up, down = leaf(device, 8, 192, 515), leaf(device, 8, 515, 192)

    def loss() -> torch.Tensor:
        gates, chosen = router(x).softmax(-1).topk(2, -1)
        if of == "dense":
            weight = torch.zeros(3003, 8, device=device).scatter(1, chosen, gates)
            hidden = F.gelu(torch.einsum("td,edh->teh", x, up))
            return (torch.einsum("teh,ehd->ted", hidden, down) * weight[..., None]).sum(1).square().mean()
        if of == "dispatched":
            order = chosen.flatten().argsort(stable=True)[:6000].view(8, 750)
            y = F.gelu(x[order // 2] @ up) @ down * gates.flatten()[order][..., None]
            return torch.zeros_like(x).index_add(0, (order // 2).flatten(), y.flatten(0, 1)).square().mean()
        y = torch.einsum("td,tkdh->tkh", x[:33], up[chosen[:33]])
        return torch.einsum("tkh,tkhd->tkd", F.gelu(y), down[chosen[:33]]).square().mean()

    return train_step([x, up, down, *router.parameters()], loss)


@probe(dtype=(bf16, f32))
def _low_rank_adapters(device: str, dtype: torch.dtype) -> Step:
    frozen = nn.Linear(770, 1030).to(device, dtype).requires_grad_(False)
    a, b = leaf(device, 9, 770, dtype=dtype), leaf(device, 1030, 9, dtype=dtype)
    x = torch.randn(33, 129, 770, dtype=dtype, device=device)
    return train_step([a, b], lambda: _mean_square(lambda t: frozen(t) + F.dropout(t, 0.1) @ a.t() @ b.t() * 2, x))


@probe(of=("int8_rows", "int4_groups", "fake"))
def _quantized_linear(device: str, of: str) -> Step:
    x, weight = leaf(device, 1033, 768), leaf(device, 1030, 768)
    small = torch.randint(-127, 127, (1030, 768), dtype=torch.int8, device=device)
    packed = torch.randint(0, 255, (1030, 384), dtype=torch.uint8, device=device)
    scale, scales = torch.rand(1030, 1, device=device), torch.rand(1030, 12, 1, device=device)

    def loss() -> torch.Tensor:
        if of == "int8_rows":
            used = small.float() * scale
        elif of == "int4_groups":
            whole = torch.stack([packed & 15, packed >> 4], -1).view(1030, 12, 64).float() - 8
            used = (whole * scales).view(1030, 768)
        else:
            top = weight.abs().amax(1, keepdim=True) / 127
            used = weight + ((weight / top).round().clamp(-128, 127) * top - weight).detach()
        return F.linear(x, used).square().mean()

    return train_step([x, weight], loss)


# ---------------------------------------------------------------- recurrent
@probe(kind=("LSTM", "GRU", "RNN"), layers=(1, 2), both=(False, True))
def _recurrent(device: str, kind: str, layers: int, both: bool) -> Step:
    model = getattr(nn, kind)(96, 130, layers, bidirectional=both, batch_first=True).to(device)
    return _step(model, torch.randn(33, 101, 96, device=device))


@probe(kind=("LSTMCell", "GRUCell", "RNNCell"))
def _cells_in_a_loop(device: str, kind: str) -> Step:
    cell = getattr(nn, kind)(96, 130).to(device)
    x = torch.randn(41, 333, 96, device=device)

    def loss() -> torch.Tensor:
        state, outs = None, []
        for row in x:
            state = cell(row, state)
            outs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outs).square().mean()

    return train_step(cell, loss)


@probe(of=("loop", "written", "cumulated", "halving"))
def _state_space(device: str, of: str) -> Step:
    decay, x = (leaf(device, 64, 9, 515, 8, draw=torch.rand) for _ in range(2))

    def loss() -> torch.Tensor:
        if of == "cumulated":
            total = decay.log().cumsum(0)
            return ((x * (-total).exp()).cumsum(0) * total.exp()).mean()
        if of == "halving":
            a, b = decay, x
            for shift in (1, 2, 4, 8, 16, 32):
                b = b + a * F.pad(b[:-shift], (0, 0, 0, 0, 0, 0, shift, 0))
                a = a * F.pad(a[:-shift], (0, 0, 0, 0, 0, 0, shift, 0), value=1.0)
            return b.mean()
        state, outs = torch.zeros_like(x[0]), []
        written = torch.zeros_like(x)
        for t in range(64):
            state = decay[t] * state + x[t]
            outs.append(state.sum(-1))
            if of == "written":
                written[t] = state
        return written.mean() if of == "written" else torch.stack(outs).mean()

    return train_step([decay, x], loss)


# ---------------------------------------------------------------- convolutions
class _Residual(nn.Module):
    def __init__(self, inner: nn.Module, skip: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.skip = inner, skip or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.skip(x) + self.inner(x))


def _normed(inside: int, out: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inside, out, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out), nn.ReLU(inplace=True))


_IMAGE_MODELS: dict[str, Callable[[], nn.Module]] = {
    "residual": lambda: nn.Sequential(
        _normed(48, 64, 3), _Residual(nn.Sequential(_normed(64, 64, 3), nn.Conv2d(64, 64, 3, 1, 1)))
    ),
    "bottleneck": lambda: _Residual(
        nn.Sequential(_normed(48, 24, 1), _normed(24, 24, 3, 2), nn.Conv2d(24, 96, 1)), nn.Conv2d(48, 96, 1, 2)
    ),
    "separable": lambda: nn.Sequential(_normed(48, 48, 3, groups=48), _normed(48, 96, 1)),
    "next": lambda: nn.Sequential(nn.Conv2d(48, 48, 7, padding=3, groups=48), nn.GroupNorm(1, 48), nn.GELU()),
    "grouped": lambda: nn.Sequential(nn.Conv2d(48, 96, 3, groups=4), nn.GroupNorm(8, 96), nn.SiLU()),
    "upsampled": lambda: nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(48, 24, 3)),
    "shuffled": lambda: nn.Sequential(nn.Conv2d(48, 48, 3), nn.PixelShuffle(2), nn.PixelUnshuffle(2)),
    "transposed": lambda: nn.Sequential(nn.ConvTranspose2d(48, 24, 4, 2, 1), nn.InstanceNorm2d(24), nn.Tanh()),
    "dilated": lambda: nn.Sequential(nn.Conv2d(48, 48, 3, padding=4, dilation=4), nn.LeakyReLU(0.2)),
    "pooled": lambda: nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    "padded": lambda: nn.Sequential(nn.ReflectionPad2d(2), nn.Conv2d(48, 24, 5), nn.ZeroPad2d(3)),
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Conv2d(48, 24, 3)),
    "weight": lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(48, 24, 3)),
    "circular": lambda: nn.Conv2d(48, 24, 3, padding=1, padding_mode="circular"),
}


@probe(of=tuple(_IMAGE_MODELS), channels_last=(False, True))
def _images_through(device: str, of: str, channels_last: bool) -> Step:
    form = torch.channels_last if channels_last else torch.contiguous_format
    model = _IMAGE_MODELS[of]().to(device)
    if of not in ("spectral", "weight"):
        model = model.to(memory_format=form)
    x = torch.randn(9, 48, 62, 58, device=device).to(memory_format=form).requires_grad_()
    return train_step([x, *model.parameters()], lambda: _mean_square(model, x))


@probe(sharing=("squeeze", "spatial"))
def _excited_images(device: str, sharing: str) -> Step:
    model = nn.Sequential(nn.Linear(96, 12), nn.ReLU(), nn.Linear(12, 96), nn.Sigmoid()).to(device)
    x = leaf(device, 9, 96, 61, 57)
    scales: dict[str, Callable[[], torch.Tensor]] = {
        "squeeze": lambda: model(x.mean((2, 3)))[..., None, None],
        "spatial": lambda: torch.sigmoid(torch.cat([x.mean(1, True), x.amax(1, True)], 1).mean(1, True)),
    }
    return train_step([x, *model.parameters()], lambda: (x * scales[sharing]()).square().mean())


@probe(dtype=(bf16, f32))
def _diffusion_unet(device: str, dtype: torch.dtype) -> Step:
    def block(inside: int, out: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inside, out, 3, 1, 1), nn.GroupNorm(8, out), nn.SiLU())

    model = nn.ModuleList(
        [block(3, 32), block(32, 64), block(64, 64), block(128, 32), nn.Conv2d(64, 3, 1), nn.Linear(64, 64)]
    ).to(device, dtype)
    first, second, middle, up, out, timed = model
    images = torch.randn(9, 3, 62, 58, dtype=dtype, device=device)
    kept = torch.linspace(1, 0.01, 1000, device=device)

    def loss() -> torch.Tensor:
        t = torch.randint(0, 1000, (9,), device=device)
        noise, rate = torch.randn_like(images), kept[t].to(dtype)[:, None, None, None]
        angles = t[:, None] * torch.exp(-math.log(1e4) * torch.arange(32, device=device) / 32)
        embedded = timed(torch.cat([angles.sin(), angles.cos()], 1).to(dtype))[:, :, None, None]
        a = first(rate.sqrt() * images + (1 - rate).sqrt() * noise)
        b = second(F.avg_pool2d(a, 2)) + embedded
        c = F.interpolate(middle(F.max_pool2d(b, 2)), size=b.shape[2:], mode="nearest")
        d = F.interpolate(up(torch.cat([b, c], 1)), scale_factor=2, mode="bilinear")
        return F.mse_loss(out(torch.cat([a, d], 1)), noise)

    return train_step(model, loss)


@probe(of=("wave", "wave_gated", "temporal", "fft", "stft"))
def _sounds_through(device: str, of: str) -> Step:
    layers = nn.ModuleList(nn.Conv1d(48, 96 if of == "wave_gated" else 48, 2, dilation=2**i) for i in range(5))
    model = layers.to(device)
    x, kernel = leaf(device, 9, 48, 3001), leaf(device, 48, 3001)

    def loss() -> torch.Tensor:
        if of == "fft":
            product = torch.fft.rfft(x, n=6002) * torch.fft.rfft(kernel, n=6002)
            return torch.fft.irfft(product, n=6002)[..., :3001].square().mean()
        if of == "stft":
            window = torch.hann_window(256, device=device)
            spectrum = torch.stft(x.flatten(0, 1), 256, 100, window=window, return_complex=True)
            return spectrum.abs().clamp(min=1e-5).log().mean()
        y, skipped = x, torch.zeros((), device=device)
        for i, layer in enumerate(layers):
            z = layer(F.pad(y, (2**i, 0)))
            z = z[:, :48].tanh() * z[:, 48:].sigmoid() if of == "wave_gated" else F.relu(z)
            y, skipped = y + z, skipped + z
        return skipped.square().mean() if of != "temporal" else y.square().mean()

    return train_step([x, kernel, *model.parameters()], loss)


# ---------------------------------------------------------------- graphs
_NODES, _EDGES = 5003, 40_009


def _softmax_by(scores: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    top = scores.new_full((_NODES, scores.shape[1]), -1e9)
    top = top.scatter_reduce(0, to[:, None].expand_as(scores), scores, "amax")
    weights = (scores - top[to].detach()).exp()
    return weights / (torch.zeros_like(top).index_add(0, to, weights)[to] + 1e-9)


_MESSAGES: dict[str, Callable[..., torch.Tensor]] = {
    "sum": lambda x, source, to: torch.zeros_like(x).index_add(0, to, x[source]),
    "sum_in_place": lambda x, source, to: torch.zeros_like(x).index_add_(0, to, x.index_select(0, source)),
    "mean": lambda x, source, to: torch.zeros_like(x).index_reduce(0, to, x[source].detach(), "mean") + x,
    "scatter": lambda x, source, to: torch.zeros_like(x).scatter_add(0, to[:, None].expand(-1, 96), x[source]),
    "largest": lambda x, source, to: torch.zeros_like(x).scatter_reduce(
        0, to[:, None].expand(-1, 96), x[source], "amax"
    ),
    "scatter_mean": lambda x, source, to: torch.zeros_like(x).scatter_reduce(
        0, to[:, None].expand(-1, 96), x[source], "mean", include_self=False
    ),
    "normalized": lambda x, source, to: _degree_normalized(x, source, to),
    "attention": lambda x, source, to: _graph_attention(x, source, to),
    "edge": lambda x, source, to: torch.zeros_like(x).index_add(
        0, to, F.relu(torch.cat([x[to], x[source] - x[to]], 1).view(-1, 96, 2).sum(-1))
    ),
    "neighbours": lambda x, source, to: x[torch.cdist(x[:900], x[:900]).topk(16, largest=False).indices].amax(1),
    "padded": lambda x, source, to: x[source[:40_000].view(5000, 8)].mean(1),
    "dense": lambda x, source, to: x.new_zeros(_NODES, _NODES).index_put((to, source), x.new_ones(())) @ x,
    "readout": lambda x, source, to: x.new_zeros(33, 96).index_add(0, to[:_NODES] % 33, x),
    "segments": lambda x, source, to: torch.segment_reduce(
        x, "sum", lengths=torch.full((_NODES,), 1, device=x.device), axis=0, unsafe=True
    ),
}  # fmt: skip


def _degree_normalized(x: torch.Tensor, source: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    degree = torch.zeros(_NODES, device=x.device).index_add(0, to, torch.ones(_EDGES, device=x.device))
    scale = degree.clamp(min=1).rsqrt()
    return torch.zeros_like(x).index_add(0, to, x[source] * (scale[source] * scale[to])[:, None])


def _graph_attention(x: torch.Tensor, source: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    heads = x.view(-1, 4, 24)
    weights = _softmax_by(F.leaky_relu(heads.sum(-1)[source] + heads.mean(-1)[to], 0.2), to)
    return torch.zeros_like(heads).index_add(0, to, heads[source] * weights[..., None]).flatten(1)


@probe(of=tuple(_MESSAGES), trained=(True, False))
def _messages(device: str, of: str, trained: bool) -> Step:
    layer = nn.Linear(96, 96).to(device)
    x = torch.randn(_NODES, 96, device=device)
    source, to = (torch.randint(0, _NODES, (_EDGES,), device=device) for _ in range(2))
    if trained:
        return train_step(layer, lambda: F.relu(_MESSAGES[of](layer(x), source, to)).square().mean())
    return torch.no_grad()(lambda: _MESSAGES[of](layer(x), source, to))


# ---------------------------------------------------------------- generators
@probe(turn=("critic", "generator", "both"))
def _adversaries(device: str, turn: str) -> Step:
    maker = nn.Sequential(
        nn.ConvTranspose2d(64, 96, 7), nn.BatchNorm2d(96), nn.ReLU(True), nn.ConvTranspose2d(96, 3, 4, 4), nn.Tanh()
    ).to(device)
    critic = nn.Sequential(
        nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(64, 1, 4, 2, 1), nn.Flatten()
    ).to(device)
    optimizers = [torch.optim.Adam(m.parameters(), 2e-4, (0.5, 0.99)) for m in (maker, critic)]
    real = torch.randn(65, 3, 28, 28, device=device)

    def step() -> None:
        noise = torch.randn(65, 64, 1, 1, device=device)
        if turn != "generator":
            optimizers[1].zero_grad()
            (F.relu(1 - critic(real)).mean() + F.relu(1 + critic(maker(noise).detach())).mean()).backward()
            optimizers[1].step()
        if turn != "critic":
            optimizers[0].zero_grad()
            F.softplus(-critic(maker(noise))).mean().backward()
            optimizers[0].step()

    return step


@probe(of=("gaussian", "vector_quantized", "flow", "masked", "autoregressive"))
def _autoencoder(device: str, of: str) -> Step:
    encode, decode = nn.Linear(784, 130).to(device), nn.Linear(65, 784).to(device)
    book, x = leaf(device, 517, 65), torch.rand(1033, 784, device=device)

    def loss() -> torch.Tensor:
        mean, log_var = encode(x).chunk(2, -1)
        if of == "gaussian":
            z = mean + torch.exp(0.5 * log_var) * torch.randn_like(mean)
            spread = -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum(1).mean()
            return F.binary_cross_entropy_with_logits(decode(z), x, reduction="sum") / 1033 + spread
        if of == "vector_quantized":
            z = book[torch.cdist(mean, book).argmin(1)]
            passed = mean + (z - mean).detach()
            return F.mse_loss(decode(passed), x) + F.mse_loss(z, mean.detach()) + F.mse_loss(mean, z.detach())
        if of == "flow":
            z = mean * log_var.tanh().exp() + log_var
            return 0.5 * z.square().sum(1).mean() - log_var.tanh().sum(1).mean()
        if of == "masked":
            kept = torch.rand(1033, 65, device=device).argsort(1)[:, :16]
            z = torch.zeros_like(mean).scatter(1, kept, mean.gather(1, kept))
            return F.mse_loss(decode(z), x)
        return F.binary_cross_entropy(torch.sigmoid(F.linear(mean, decode.weight.tril(), decode.bias)), x)

    return train_step([book, *encode.parameters(), *decode.parameters()], loss)


@probe(of=("factorized", "deep", "cross", "bags"))
def _recommender(device: str, of: str) -> Step:
    users, items = nn.Embedding(20_011, 65).to(device), nn.Embedding(9001, 65).to(device)
    bag = nn.EmbeddingBag(9001, 65, mode="sum").to(device)
    deep = nn.Sequential(nn.Linear(130, 257), nn.ReLU(), nn.Dropout(0.2), nn.Linear(257, 1)).to(device)
    user_ids = torch.randint(0, 20_011, (8191,), device=device)
    item_ids = torch.randint(0, 9001, (8191,), device=device)
    many = torch.randint(0, 9001, (8191, 11), device=device)
    rated = torch.rand(8191, device=device)

    def crossed(each: torch.Tensor) -> torch.Tensor:
        return 0.5 * (each.sum(1).square() - each.square().sum(1)).sum(1)

    rates: dict[str, Callable[[], torch.Tensor]] = {
        "factorized": lambda: (users(user_ids) * items(item_ids)).sum(1),
        "deep": lambda: deep(torch.cat([users(user_ids), items(item_ids)], 1)).squeeze(1),
        "cross": lambda: crossed(items(many)),
        "bags": lambda: (bag(many) * users(user_ids)).sum(1),
    }
    loss = F.binary_cross_entropy_with_logits if of == "deep" else F.mse_loss
    return train_step(nn.ModuleList([users, items, deep, bag]), lambda: loss(rates[of](), rated))


@probe(of=("positional", "points", "hyper", "bilinear", "mixer"))
def _other_nets(device: str, of: str) -> Step:
    layer = nn.Bilinear(33, 65, 96).to(device)
    mixed = nn.ModuleList([nn.Linear(257, 515), nn.Linear(515, 257), nn.LayerNorm(96)]).to(device)
    a, b = torch.randn(2049, 33, device=device), torch.randn(2049, 65, device=device)
    points = torch.randn(9, 3001, 3, device=device)
    x = leaf(device, 9, 257, 96)

    def positional() -> torch.Tensor:
        bands = points[..., None] * 2.0 ** torch.arange(10, device=device)
        return torch.cat([bands.sin(), bands.cos()], -1).flatten(2).square().mean() + x.square().mean()

    losses: dict[str, Callable[[], torch.Tensor]] = {
        "positional": positional,
        "points": lambda: F.relu(x @ x.transpose(1, 2)).max(1).values.square().mean(),
        "hyper": lambda: torch.bmm(x, x[:, :96].transpose(1, 2)).square().mean(),
        "bilinear": lambda: layer(a, b).square().mean() + x.sum() * 0,
        "mixer": lambda: (x + mixed[1](F.gelu(mixed[0](mixed[2](x).transpose(1, 2)))).transpose(1, 2)).square().mean(),
    }
    return train_step([x, *layer.parameters(), *mixed.parameters()], lambda: losses[of]())
