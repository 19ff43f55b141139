"""Techniques of training: optimizers, accumulation, clipping, averaging, mixed precision, hooks and checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from .registry import Step, bf16, f16, f32, leaf, probe, train_step

_ROWS, _WIDTH = 1033, 390


def _mlp(device: str, dtype: torch.dtype = f32, depth: int = 3) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(_WIDTH, 1210), nn.GELU(), nn.Linear(1210, _WIDTH), nn.LayerNorm(_WIDTH)]
    return nn.Sequential(*layers).to(device=device, dtype=dtype)


def _rows(device: str, dtype: torch.dtype = f32) -> torch.Tensor:
    return torch.randn(_ROWS, _WIDTH, dtype=dtype, device=device)


def _trained(
    device: str,
    prepare: Callable[[nn.Sequential], object] = lambda model: None,
    around: Callable[[], Any] = contextlib.nullcontext,
) -> Step:
    """A training step of a net that ``prepare`` changes first; forward and loss run inside ``around()``."""
    model, x = _mlp(device), _rows(device)
    prepare(model)

    def loss() -> torch.Tensor:
        with around():
            return model(x).square().mean()

    return train_step(model, loss)


# ---------------------------------------------------------------- optimizers
def _each(names: str, **options: Any) -> Iterator[Callable[..., torch.optim.Optimizer]]:
    return (partial(getattr(torch.optim, name), **options) for name in names.split())


_SGD = partial(torch.optim.SGD, lr=0.01)
_DEFAULT = "Adam AdamW NAdam RAdam Adamax Adadelta Adagrad RMSprop Rprop"
_LOOPS = "Adam NAdam Adamax Rprop"
_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": _SGD,
    "sgd_momentum": partial(_SGD, momentum=0.9),
    "sgd_nesterov_decay": partial(_SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd_dampened": partial(_SGD, momentum=0.9, dampening=0.5, maximize=True),
    "sgd_loop": partial(_SGD, momentum=0.9, weight_decay=0.1, foreach=False),
    "sgd_fused": partial(_SGD, momentum=0.9, fused=True),
    **dict(zip(_DEFAULT.lower().split(), _each(_DEFAULT), strict=True)),
    **dict(zip((f"{name}_loop" for name in _LOOPS.lower().split()), _each(_LOOPS, foreach=False), strict=True)),
    "adam_decay": partial(torch.optim.Adam, weight_decay=0.1),
    "adam_amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "adam_maximize": partial(torch.optim.Adam, maximize=True),
    "adam_fused": partial(torch.optim.Adam, fused=True),
    "adam_capturable": partial(torch.optim.Adam, capturable=True),
    "adam_tensor_rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3), foreach=False),
    "adamw_amsgrad": partial(torch.optim.AdamW, amsgrad=True, maximize=True),
    "adamw_amsgrad_loop": partial(torch.optim.AdamW, amsgrad=True, foreach=False),
    "adamw_fused": partial(torch.optim.AdamW, fused=True, amsgrad=True),
    "nadam_decoupled": partial(torch.optim.NAdam, weight_decay=0.1, decoupled_weight_decay=True),
    "radam_loop": partial(torch.optim.RAdam, foreach=False, weight_decay=0.1),
    "adadelta_loop": partial(torch.optim.Adadelta, foreach=False, weight_decay=0.1),
    "adagrad_loop": partial(torch.optim.Adagrad, foreach=False, weight_decay=0.1),
    "adagrad_fused": partial(torch.optim.Adagrad, fused=True),
    "rmsprop_centered": partial(torch.optim.RMSprop, centered=True, momentum=0.9, weight_decay=0.1),
    "rmsprop_loop": partial(torch.optim.RMSprop, centered=True, foreach=False),
}


def _optimized(loss: Step, optimizer: Any, kept: bool = False, after: Step = lambda: None) -> Step:
    """A step that drops the gradients, or zeroes them if ``kept``, and runs backward, the optimizer and ``after``."""

    def step() -> None:
        optimizer.zero_grad(set_to_none=not kept)
        loss().backward()
        optimizer.step()
        after()

    return step


@probe(of=tuple(_OPTIMIZERS))
def _trained_by(device: str, of: str) -> Step:
    model, x = _mlp(device), _rows(device)
    return _optimized(lambda: model(x).square().mean(), _OPTIMIZERS[of](model.parameters()))


@probe(of=("sgd_momentum", "adam", "adamw_amsgrad_loop", "adamw_fused", "rmsprop_centered"))
def _trained_in_bfloat16_by(device: str, of: str) -> Step:
    model, x = _mlp(device, bf16), _rows(device, bf16)
    optimizer = _OPTIMIZERS[of](model.parameters())

    def step() -> None:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@probe(kept=(False, True))
def _trained_with_muon(device: str, kept: bool) -> Step:
    weights = [leaf(device, *shape) for shape in ((390, 1210), (1210, 390), (517, 517))]
    return _optimized(
        lambda: sum((w.square().mean() for w in weights), torch.zeros((), device=device)),
        torch.optim.Muon(weights, lr=0.01),
        kept,
    )


@probe()
def _groups_and_a_schedule(device: str) -> Step:
    model, x = _mlp(device), _rows(device)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 1e-2}])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return _optimized(lambda: model(x).square().mean(), optimizer, kept=True, after=schedule.step)


@probe()
def _optimizer_in_the_backward(device: str) -> Step:
    model, x = _mlp(device), _rows(device)
    of = {p: torch.optim.AdamW([p], foreach=False) for p in model.parameters()}

    def update(p: torch.Tensor) -> None:
        of[p].step()  # type: ignore[index]
        of[p].zero_grad()  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    return lambda: model(x).square().mean().backward()


@probe()
def _plain_descent(device: str) -> Step:
    model, x = _mlp(device), _rows(device)

    def step() -> None:
        gradients = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradients, strict=True):
                p.sub_(0.01 * g)

    return step


# ---------------------------------------------------------------- clipping, accumulation, averaging
_CLIPS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "norm": lambda p: nn.utils.clip_grad_norm_(p, 1.0),
    "norm_loop": lambda p: nn.utils.clip_grad_norm_(p, 1.0, foreach=False),
    "norm_inf": lambda p: nn.utils.clip_grad_norm_(p, 1.0, norm_type=float("inf")),
    "norm_one": lambda p: nn.utils.clip_grad_norm_(p, 1.0, norm_type=1.0),
    "value": lambda p: nn.utils.clip_grad_value_(p, 0.5),
    "value_loop": lambda p: nn.utils.clip_grad_value_(p, 0.5, foreach=False),
    "by_hand": lambda p: [w.grad.mul_(1 / w.grad.norm().clamp(min=1.0)) for w in p if w.grad is not None],
    "flat": lambda p: torch.cat([w.grad.flatten() for w in p if w.grad is not None]).norm(),
}


@probe(of=tuple(_CLIPS))
def _clipped_by(device: str, of: str) -> Step:
    parameters: list[torch.Tensor] = []
    run = _trained(device, lambda model: parameters.extend(model.parameters()))
    return lambda: (run(), _CLIPS[of](parameters))


@probe(pieces=(2, 5))
def _gradient_accumulation(device: str, pieces: int) -> Step:
    model, x = _mlp(device), _rows(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        for piece in x.chunk(pieces):
            (model(piece).square().mean() / pieces).backward()
        optimizer.step()

    return step


@probe(of=("ema_multi", "ema_by_hand"))
def _average_of_the_weights(device: str, of: str) -> Step:
    model, x = _mlp(device), _rows(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    averaged: Any = None
    if of == "ema_multi":
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)
    shadow = [p.detach().clone() for p in model.parameters()]

    def average() -> None:
        if averaged is not None:
            averaged.update_parameters(model)
            return
        for old, new in zip(shadow, model.parameters(), strict=True):
            old.mul_(0.99).add_(new, alpha=0.01)

    return _optimized(lambda: model(x).square().mean(), optimizer, after=torch.no_grad()(average))


# ---------------------------------------------------------------- mixed precision
@probe(dtype=(bf16, f16), cached=(True, False))
def _autocast(device: str, dtype: torch.dtype, cached: bool) -> Step:
    model, x = _mlp(device), _rows(device)

    def loss() -> torch.Tensor:
        with torch.autocast(device, dtype, cache_enabled=cached):
            return F.cross_entropy(model(model(x)), torch.zeros(_ROWS, dtype=torch.long, device=device))

    return train_step(model, loss)


@probe()
def _autocast_of_a_convolution(device: str) -> Step:
    model = nn.Sequential(nn.Conv2d(13, 48, 3), nn.BatchNorm2d(48), nn.ReLU(), nn.Conv2d(48, 96, 3)).to(device)
    x = torch.randn(17, 13, 61, 57, device=device)

    def loss() -> torch.Tensor:
        with torch.autocast(device, bf16):
            return model(x).softmax(1).square().mean()

    return train_step(model, loss)


@probe()
def _master_weights(device: str) -> Step:
    model, x = _mlp(device, bf16), _rows(device, bf16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters)

    def step() -> None:
        model.zero_grad()
        model(x).float().square().mean().mul(1024.0).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            assert p.grad is not None
            master.grad = p.grad.float() / 1024.0
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)

    return step


# ---------------------------------------------------------------- checkpoints
@probe(reentrant=(True, False))
def _checkpointed_blocks(device: str, reentrant: bool) -> Step:
    blocks = nn.ModuleList(_mlp(device, depth=1) for _ in range(4))
    x = _rows(device).requires_grad_()

    def loss() -> torch.Tensor:
        y = x
        for block in blocks:
            y = y + checkpoint(block, y, use_reentrant=reentrant)
        return y.square().mean()

    return train_step([x, *blocks.parameters()], loss)


@probe()
def _checkpoints_in_a_checkpoint(device: str) -> Step:
    inner = nn.ModuleList(_mlp(device, depth=1) for _ in range(4))
    x = _rows(device)

    def pair(y: torch.Tensor, first: int) -> torch.Tensor:
        y = checkpoint(inner[first], y, use_reentrant=False)
        return checkpoint(inner[first + 1], F.dropout(y, 0.1), use_reentrant=False)

    def loss() -> torch.Tensor:
        y = checkpoint(pair, x, 0, use_reentrant=False)
        return checkpoint(pair, y, 2, use_reentrant=False).square().mean()

    return train_step(inner, loss)


@probe(saved=("products", "all"))
def _selective_checkpoint(device: str, saved: str) -> Step:
    model, x = _mlp(device, depth=3), _rows(device)
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)

    def policy(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        keep = saved == "all" or op in products
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)

    return train_step(model, lambda: checkpoint(model, x, use_reentrant=False, context_fn=contexts).square().mean())


@probe(segments=(2, 3))
def _checkpoint_sequential(device: str, segments: int) -> Step:
    model, x = _mlp(device), _rows(device)
    return train_step(model, lambda: checkpoint_sequential(model, segments, x, use_reentrant=False).square().mean())


# ---------------------------------------------------------------- hooks
probe("saved_on_the_host", pinned=(False, True))(
    lambda device, pinned: _trained(device, around=lambda: torch.autograd.graph.save_on_cpu(pin_memory=pinned))
)
probe("saved_smaller", dtype=(bf16, torch.float8_e4m3fn))(
    lambda device, dtype: _trained(
        device, around=lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.to(dtype), lambda t: t.to(f32))
    )
)


def _normalize_gradient(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
    output.register_hook(lambda gradient: gradient / gradient.norm())


_HOOKS: dict[str, Callable[[nn.Sequential], object]] = {
    "tensor": lambda model: model[5].register_forward_hook(_normalize_gradient),
    "module": lambda model: [m.register_forward_hook(lambda module, inputs, output: output * 2) for m in model],
    "backward": lambda model: model[1].register_full_backward_hook(lambda module, inner, outer: (inner[0] * 0.5,)),
    "pre_backward": lambda model: model[1].register_full_backward_pre_hook(
        lambda module, outer: (outer[0].clamp(-1, 1),)
    ),
    "retained": lambda model: model[5].register_forward_hook(lambda module, inputs, output: output.retain_grad()),
}

probe("hooked", of=tuple(_HOOKS))(lambda device, of: _trained(device, _HOOKS[of]))


@probe()
def _activations_collected_by_hooks(device: str) -> Step:
    kept: dict[nn.Module, torch.Tensor] = {}

    def collect(model: nn.Sequential) -> None:
        for layer in model:
            layer.register_forward_hook(lambda module, inputs, output: kept.update({module: output.detach()}))

    return _trained(device, collect)


# ---------------------------------------------------------------- evaluating and freezing
@probe(of=("inference_mode", "no_grad", "eval_with_grad"))
def _evaluated_in(device: str, of: str) -> Step:
    model, x = _mlp(device).eval(), _rows(device)

    def step() -> torch.Tensor:
        mode = {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad}.get(of, contextlib.nullcontext)
        with mode():
            return model(x).softmax(-1)

    return step


@probe(frozen=("first", "biases", "all_but_last"))
def _partly_frozen(device: str, frozen: str) -> Step:
    def freeze(model: nn.Sequential) -> None:
        for name, p in model.named_parameters():
            number = int(name.split(".")[0])
            chosen = {"first": number < 4, "biases": "bias" in name, "all_but_last": number < 10}
            p.requires_grad_(not chosen[frozen])

    return _trained(device, freeze)


@probe(kept=(True, False))
def _two_backwards_of_one_graph(device: str, kept: bool) -> Step:
    model, x = _mlp(device), _rows(device)
    head, tail = nn.Linear(_WIDTH, 517, device=device), nn.Linear(_WIDTH, 33, device=device)

    def step() -> None:
        model.zero_grad(set_to_none=not kept)
        y = model(x)
        head(y).logsumexp(-1).mean().backward(retain_graph=True)
        tail(y).logsumexp(-1).mean().backward()

    return step
