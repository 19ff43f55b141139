"""Registers kernels for CUDA and Meta, so that operators take CUDA's path on fake tensors in any build of torch."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._decomp import meta_table

from . import attention
from .composite import native_on_cuda_only
from .fake_kernels import CORRECTED_FAKES, MISSING_FAKES
from .gpus import GPU

aten = torch.ops.aten

_CUDNN_MOST_CHANNELS = 1024  # of cuDNN's grid sampler
_CUDNN_LARGEST_BATCH = {True: 880_801, False: 65_535}  # of cuDNN's batch norm, in training or not


@contextlib.contextmanager
def registered(gpu: GPU, notes: dict[str, None]) -> Iterator[None]:
    """Inside, the kernels are registered. They add their assumptions to ``notes``."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of every overridden kernel
            for name, kernel in _CHOICES.items():
                for key in ("CUDA", "AutogradCUDA"):  # recomputing under autograd needs AutogradCUDA
                    library.impl(name, kernel, key, allow_override=True)  # a nested simulation overrides ours
            for name, kernel in (MISSING_FAKES | CORRECTED_FAKES).items():
                library.impl(name.removesuffix(".default"), kernel, "Meta", allow_override=True)
            attention.install(library, gpu, notes)
            for name in native_on_cuda_only():
                library.impl(name.removeprefix("aten::"), _only_for_dispatch, "CUDA", allow_override=True)
        _forget_chosen_kernels(library)
        with attention.preferences_of(gpu), mock.patch.dict(meta_table, _preferred_to_decompositions()):
            yield
    finally:
        library._destroy()
        _forget_chosen_kernels(library)


def _forget_chosen_kernels(library: torch.library.Library) -> None:
    """Clear the dispatch caches of overridden operators: tracing would otherwise use a cached composite kernel, whose
    parts it does not differentiate."""
    for registered_as in library._op_impls:  # aten/one_hot/CUDA
        packet = getattr(aten, registered_as.split("/")[1].partition(".")[0])
        for overload in packet.overloads():
            getattr(packet, overload)._dispatch_cache.clear()


def _one_hot(ids: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """CUDA's ``one_hot``. Torch's version for fake tensors compares with every class, which makes other temporaries."""
    if num_classes == -1:
        num_classes = int(ids.max().item()) + 1
    one_hot = ids.new_zeros((*ids.shape, num_classes))
    return one_hot.scatter_(-1, ids.unsqueeze(-1), 1)


def _batch_norm(
    tensor: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> tuple[Any, ...]:
    """Run cuDNN's batch norm if a CUDA build would choose it, else torch's own."""
    statistics = (running_mean, running_var, training, momentum, eps)
    if cudnn_enabled and weight is not None and bias is not None and _cudnn_norms(tensor, weight, *statistics[:3]):
        layout = torch._prims_common.suggest_memory_format(tensor)
        dense = tensor.contiguous(memory_format=layout)
        return (*aten.cudnn_batch_norm(dense, weight.contiguous(), bias.contiguous(), *statistics), 1)
    nothing_reserved = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return (*aten.native_batch_norm(tensor, weight, bias, *statistics), nothing_reserved, 0)


def _cudnn_norms(tensor: torch.Tensor, weight: torch.Tensor, mean: Any, var: Any, training: bool) -> bool:
    return (
        torch.bfloat16 not in (tensor.dtype, weight.dtype)
        and (tensor.dtype != torch.float16 or weight.dtype == torch.float32)
        and (training or None not in (mean, var))
        and tensor.dim() >= 3
        and tensor.shape[0] <= _CUDNN_LARGEST_BATCH[training]
        and tensor.numel() < 2**31 - 1
    )


def _grid_sampler(
    tensor: torch.Tensor, grid: torch.Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> torch.Tensor:
    """Run cuDNN's sampler if a CUDA build would choose it (bilinear, zero padding, corners aligned), else torch's."""
    by_cudnn = (
        torch.backends.cudnn.enabled
        and (interpolation_mode, padding_mode, align_corners) == (0, 0, True)
        and tensor.dtype in (torch.float16, torch.float32, torch.float64)
        and tensor.dim() == 4
        and tensor.shape[1] <= _CUDNN_MOST_CHANNELS
    )
    if by_cudnn:
        return aten.cudnn_grid_sampler(tensor, grid)
    sampler = aten.grid_sampler_2d if tensor.dim() == 4 else aten.grid_sampler_3d
    return sampler(tensor, grid, interpolation_mode, padding_mode, align_corners)


_CHOICES = {"one_hot": _one_hot, "_batch_norm_impl_index": _batch_norm, "grid_sampler": _grid_sampler}


def _preferred_to_decompositions() -> dict[Any, Any]:
    named = ((name.split("."), kernel) for name, kernel in CORRECTED_FAKES.items())
    return {getattr(getattr(aten, operator), overload): kernel for (operator, overload), kernel in named}


def _only_for_dispatch(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("registered so that torch does not decompose the operator; fake tensors never run it")
