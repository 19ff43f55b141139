"""Lists of tensors: norms of gradients, elementwise updates, fused optimizers, alike and not."""

from __future__ import annotations

import torch

from ...meters.base import Step
from .registry import probe

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
_SIZES = ((10,), (65_536,), (65_537,), (300, 1000), (4096, 1024))


def _list(device: str, dtype: torch.dtype, *, mixed: bool = False) -> list[torch.Tensor]:
    tensors = [torch.rand(size, device=device).to(dtype) for size in _SIZES]
    if mixed:
        tensors += [torch.rand(300, 1000, device=device)[:, ::2], torch.rand(70_000, device=device).to(f64)]
    return tensors


@probe(order=(0, 1, 2, float("inf")), mixed=(False, True))
def _norms(device: str, order: float, mixed: bool) -> Step:
    tensors = _list(device, f32, mixed=mixed)
    return lambda: torch._foreach_norm(tensors, order)


@probe(dtype=(bf16, f16, f64), to=(None, f32))
def _norms_in(device: str, dtype: torch.dtype, to: torch.dtype | None) -> Step:
    tensors = _list(device, dtype)
    return lambda: torch._foreach_norm(tensors, 2, None if dtype == f64 else to)


@probe(size=(65_536, 65_537, 8_000_000), count=(1, 200))
def _norms_of_many(device: str, size: int, count: int) -> Step:
    tensors = [torch.rand(size, device=device), *[torch.rand(10, device=device) for _ in range(count - 1)]]
    return lambda: torch._foreach_norm(tensors, 2)


@probe()
def _norms_with_an_empty_tensor(device: str) -> Step:
    tensors = [torch.rand(10, device=device), torch.rand(0, device=device)]
    return lambda: torch._foreach_norm(tensors, 2)


@probe(dtype=(f32, bf16), mixed=(False, True))
def _maxima(device: str, dtype: torch.dtype, mixed: bool) -> Step:
    tensors = _list(device, dtype, mixed=mixed)
    return lambda: torch._foreach_max(tensors)


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


@probe(name=("AdamW", "SGD", "Adagrad"), kind=("fused", "foreach"))
def _optimizer(device: str, name: str, kind: str) -> Step:
    parameters = [t.requires_grad_() for t in _list(device, f32)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    options = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)(parameters, lr=1e-3, **{kind: True}, **options)
    return lambda: optimizer.step()


@probe(norm=(1.0, 2.0, float("inf")))
def _clip_grad_norm(device: str, norm: float) -> Step:
    parameters = [t.requires_grad_() for t in _list(device, bf16)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0, norm_type=norm)


@probe()
def _unscaling_gradients(device: str) -> Step:
    tensors, found, scale = _list(device, f16), torch.zeros(1, device=device), torch.ones(1, device=device)
    return lambda: torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, scale)
