"""Variants of operators that everyday code rarely calls: on lists, in place, in one and three dimensions.

Each probe calls many operators, once each, because one call of each suffices.
"""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F

from .registry import Step, probe

_ON_LISTS = """abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal
    round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc""".split()
_ON_TWO_LISTS = "add clamp_max clamp_min div maximum minimum mul pow sub".split()
_IN_PLACE = """abs_ acos_ ceil_ cos_ exp_ floor_ gelu_ hardswish_ log_ mish_ neg_ relu_ round_ rsqrt_ sigmoid_ silu_
    sin_ sqrt_ square_ tanh_ trunc_ triu_ tril_ cumsum_ cumprod_ detach_ random_ log_normal_ geometric_""".split()
_IN_PLACE_WITH_ANOTHER = """add_ sub_ mul_ div_ copysign_ floor_divide_ fmod_ ge_ gt_ heaviside_ le_ lt_ ne_ eq_ pow_
    remainder_ xlogy_ atan2_ copy_""".split()


@probe(dtype=(torch.float32, torch.bfloat16))
def _lists(device: str, dtype: torch.dtype) -> Step:
    tensors = [torch.rand(size, device=device, dtype=dtype) + 0.5 for size in (1001, 333_333, 77)]
    others = [torch.rand_like(tensor) + 0.5 for tensor in tensors]

    def step() -> None:
        for name in _ON_LISTS:
            getattr(torch, f"_foreach_{name}")(tensors)
            getattr(torch, f"_foreach_{name}_")([tensor.clone() for tensor in tensors])
        for name in _ON_TWO_LISTS:
            getattr(torch, f"_foreach_{name}")(tensors, others)
            getattr(torch, f"_foreach_{name}_")([tensor.clone() for tensor in tensors], others)
        torch._foreach_lerp(tensors, others, 0.5)
        for name in ("addcmul", "addcdiv"):
            getattr(torch, f"_foreach_{name}")(tensors, others, others)

    return step


@probe(dtype=(torch.float32, torch.bfloat16))
def _in_place(device: str, dtype: torch.dtype) -> Step:
    x = torch.rand(1001, 333, device=device, dtype=dtype) + 0.5
    other = torch.rand_like(x) + 0.5

    def step() -> None:
        arguments = {"cumsum_": (0,), "cumprod_": (1,), "geometric_": (0.5,)}
        for name in _IN_PLACE:
            function = getattr(torch.ops.aten, name) if name in ("gelu_", "hardswish_", "mish_", "silu_") else None
            (function or getattr(torch.Tensor, name))(x.clone(), *arguments.get(name, ()))
        for name in _IN_PLACE_WITH_ANOTHER:
            getattr(x.clone(), name)(other)
        F.threshold_(x.clone(), 0.7, 0.0)
        torch.rrelu_(x.clone(), training=True)
        x.clone().renorm_(2, 0, 1.0)
        for name in ("swapaxes_", "swapdims_"):
            getattr(x.clone(), name)(0, 1)
        x.clone().resize_as_(other)

    return step


@probe(dtype=(torch.float32, torch.bfloat16))
def _in_place_by_index(device: str, dtype: torch.dtype) -> Step:
    x = torch.rand(5001, 333, device=device, dtype=dtype)
    rows = torch.randint(0, 5001, (700,), device=device)
    places = torch.randint(0, 5001, (700, 333), device=device)
    source = torch.rand(700, 333, device=device, dtype=dtype)
    mask = torch.rand(5001, 333, device=device) < 0.5
    aten = torch.ops.aten

    def step() -> None:
        x.clone().scatter_add_(0, places, source)
        x.clone().scatter_(0, places, source)
        x.clone().scatter_(0, places, 1.0)
        for reduce in ("sum", "prod", "amax", "mean"):
            x.clone().scatter_reduce_(0, places, source, reduce)
        x.clone().index_add_(0, rows, source)
        x.clone().index_copy_(0, rows, source)
        x.clone().index_fill_(0, rows, 1.0)
        x.clone().index_reduce_(0, rows, source, "amax")
        for accumulate in (False, True):
            x.clone().index_put_((rows,), source, accumulate)
            aten._index_put_impl_(x.clone(), [rows], source, accumulate)
            aten._unsafe_index_put(x, [rows], source, accumulate)
            aten.index_put(x, [rows], source, accumulate)
            x.clone().put_(places, source, accumulate)
        x.clone().masked_scatter_(mask, x)
        x.clone().masked_fill_(mask, 0.0)

    return step


@probe(contiguous=(True, False))
def _in_one_and_three_dimensions(device: str, contiguous: bool) -> Step:
    line = torch.rand(9, 24, 1001, device=device).requires_grad_()
    volume = torch.rand(3, 8, 17, 30, 31, device=device).requires_grad_()

    def each() -> list[torch.Tensor]:
        results = [F.interpolate(line, scale_factor=2, mode=mode) for mode in ("nearest", "nearest-exact", "linear")]
        results += [F.interpolate(volume, scale_factor=2, mode=m) for m in ("nearest", "nearest-exact", "trilinear")]
        results += [F.pad(line, (3, 2), mode=mode) for mode in ("reflect", "replicate")]
        results += [F.pad(volume, (1, 2, 1, 2, 1, 2), mode=mode) for mode in ("reflect", "replicate")]
        results += [F.max_pool3d(volume, 2), F.avg_pool3d(volume, 2), F.adaptive_avg_pool3d(volume, 5)]
        results += [F.adaptive_max_pool3d(volume, 5), F.max_pool1d(line, 3), F.avg_pool1d(line, 3)]
        values, places = F.max_pool3d(volume, 2, return_indices=True)
        results.append(F.max_unpool3d(values, places, 2, output_size=volume.shape[2:]))
        grid = torch.rand(3, 5, 6, 7, 3, device=device)
        return [*results, F.grid_sample(volume, grid, align_corners=False)]

    def step() -> None:
        line.grad = volume.grad = None
        for result in each():
            result.backward(torch.ones_like(result)) if contiguous else result.sum().backward()

    return step


@probe()
def _sizes_of_images(device: str) -> Step:
    image = torch.rand(9, 24, 61, 58, device=device).requires_grad_()

    def step() -> None:
        image.grad = None
        values, places = F.max_pool2d(image, 2, return_indices=True)
        results = [
            F.max_unpool2d(values, places, 2),
            F.interpolate(image, scale_factor=2, mode="nearest-exact"),
            F.interpolate(image, size=(20, 21), mode="bicubic", antialias=True),
            F.fractional_max_pool2d(image, 3, output_size=(20, 19)),
        ]
        for result in results:
            result.backward(torch.ones_like(result))

    return step


@probe()
def _odds_and_ends(device: str) -> Step:
    x = torch.rand(1001, 333, device=device)
    half = x.half()
    ids = torch.randint(0, 1001, (555,), device=device)
    scale, growth = torch.full((), 65536.0, device=device), torch.zeros((), dtype=torch.int32, device=device)
    overflow = torch.zeros((), device=device)

    def step() -> None:
        torch.rand_like(x), torch.randint_like(x, 9), torch.range(0, 99, device=device)
        torch.tril_indices(300, 200, device=device), torch.triu_indices(300, 200, device=device)
        torch.addmv(x[:, 0], x, x[0])
        torch.empty_permuted((5, 6, 7), (2, 0, 1), device=device), torch.empty_strided((5, 6), (1, 5), device=device)
        torch.ops.aten._conj_physical(torch.complex(x, x))
        torch.cummax(x, 0), torch.cummin(x, 1), torch.logcumsumexp(x, 1), torch.logcumsumexp(x[0], 0)
        torch.split_with_sizes_copy(x, [1000, 1])
        torch._amp_update_scale_(scale, growth, overflow, 2.0, 0.5, 2000)
        torch._amp_foreach_non_finite_check_and_unscale_([half.float()], overflow, torch.ones((), device=device))
        F.embedding(ids, x.clone(), max_norm=1.0)
        x.sum().item(), (x > 0.5).all().item()
        with contextlib.suppress(RuntimeError):  # bfloat16 dropout by mask is not built everywhere
            torch.ops.aten._fused_dropout(x, 0.5)

    return step
