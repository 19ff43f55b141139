"""Operators on lists of tensors, uniform and mixed: norms, elementwise updates, fused optimizers."""

from __future__ import annotations

from functools import partial

import torch

from .registry import Step, bf16, f16, f32, f64, probe

_SIZES = ((10,), (65_536,), (65_537,), (300, 1000), (4096, 1024))


def _list(device: str, dtype: torch.dtype, *, mixed: bool = False) -> list[torch.Tensor]:
    tensors = [torch.rand(size, device=device).to(dtype) for size in _SIZES]
    if mixed:
        tensors += [torch.rand(300, 1000, device=device)[:, ::2], torch.rand(70_000, device=device).to(f64)]
    return tensors


probe("norms", order=(0, 1, 2, float("inf")), mixed=(False, True))(
    lambda device, order, mixed: partial(torch._foreach_norm, _list(device, f32, mixed=mixed), order)
)
probe("norms_in", dtype=(bf16, f16, f64), to=(None, f32))(
    lambda device, dtype, to: partial(torch._foreach_norm, _list(device, dtype), 2, None if dtype == f64 else to)
)
probe("norms_of_many", size=(65_536, 65_537, 8_000_000), count=(1, 200))(
    lambda device, size, count: partial(
        torch._foreach_norm, [torch.rand(n, device=device) for n in (size, *[10] * (count - 1))], 2
    )
)
probe("norms_with_an_empty_tensor")(
    lambda device: partial(torch._foreach_norm, [torch.rand(n, device=device) for n in (10, 0)], 2)
)
probe("maxima", dtype=(f32, bf16), mixed=(False, True))(
    lambda device, dtype, mixed: partial(torch._foreach_max, _list(device, dtype, mixed=mixed))
)


@probe(mixed=(False, True))
def _elementwise(device: str, mixed: bool) -> Step:
    tensors = _list(device, f32, mixed=mixed)
    scalar = torch.ones((), device=device)

    def step() -> None:
        torch._foreach_add(tensors, tensors)
        torch._foreach_mul_(tensors, scalar)
        torch._foreach_sqrt(torch._foreach_abs(tensors))
        torch._foreach_addcdiv_(tensors, tensors, torch._foreach_add(tensors, 1.0))
        torch._foreach_lerp_(tensors, tensors, 0.5)
        torch._foreach_zero_(tensors)

    return step


def _parameters(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    parameters = [t.requires_grad_() for t in _list(device, dtype)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters


@probe(name=("AdamW", "SGD", "Adagrad"), kind=("fused", "foreach"))
def _optimizer(device: str, name: str, kind: str) -> Step:
    options = {"momentum": 0.9} if name == "SGD" else {}
    return getattr(torch.optim, name)(_parameters(device, f32), lr=1e-3, **{kind: True}, **options).step


probe("clip_grad_norm", norm=(1.0, 2.0, float("inf")))(
    lambda device, norm: partial(torch.nn.utils.clip_grad_norm_, _parameters(device, bf16), 1.0, norm_type=norm)
)


@probe()
def _unscaling_gradients(device: str) -> Step:
    tensors, found, scale = _list(device, f16), torch.zeros(1, device=device), torch.ones(1, device=device)
    return partial(torch._amp_foreach_non_finite_check_and_unscale_, tensors, found, scale)
