"""Chooses the kernel that ``scaled_dot_product_attention`` runs on a GPU, and calls it on fake tensors.

Without CUDA or a GPU, torch always decomposes attention; on a GPU one of three fused kernels usually runs instead.
The rules are those of torch 2.11 to 2.13 built for CUDA 13, whose cuDNN is 9.15.1 or newer.
Legend: B batch, H heads, L query length, S key length, D width of a head.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.nn.functional as F

from ...errors import ON_A_GPU, MeasurementError
from .gpus import GPU
from .patches import Patch
from .tables import table_of
from .workspace.rules import Call

aten = torch.ops.aten


class Kernel(IntEnum):
    """The kernels of attention, numbered as in torch's order of preference."""

    MATH = 0
    FLASH = 1
    EFFICIENT = 2
    CUDNN = 3


_TORCH_ORDER = (Kernel.FLASH, Kernel.EFFICIENT, Kernel.MATH, Kernel.CUDNN)
_CUDNN_FIRST_ORDER = (Kernel.CUDNN, Kernel.FLASH, Kernel.EFFICIENT, Kernel.MATH)
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
_NEWEST = (12, 1)  # the newest compute capability that fused kernels are built for
_LARGEST_GRID = 65_535


@dataclass(frozen=True)
class Request:
    """The arguments of attention that decide which kernel runs."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None = None
    dropout: float = 0.0
    is_causal: bool = False
    enable_gqa: bool = False

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value

    @property
    def needs_gradient(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)


@dataclass(frozen=True)
class Choice:
    kernel: Kernel
    doubt: str | None = None
    """Why a GPU may run another kernel; None if the choice is certain."""


def choose(gpu: GPU, request: Request) -> Choice:
    """The first enabled kernel in torch's order of preference that can run. Raises torch's error if there is none."""
    enabled = _enabled()
    if not any(enabled.values()):
        raise RuntimeError(
            "No viable backend for scaled_dot_product_attention was found. "
            "This is likely due to turning off both the math kernel and the fused kernels."
        )
    for number in torch._C._get_sdp_priority_order():
        if number not in _CAN_RUN or not enabled[Kernel(number)]:
            continue
        kernel = Kernel(number)
        if _CAN_RUN[kernel](gpu, request):
            return Choice(kernel, _doubt(kernel))
    raise RuntimeError("No available kernel. Aborting execution.")


def _enabled() -> dict[Kernel, bool]:
    cuda = torch.backends.cuda
    return {
        Kernel.MATH: cuda.math_sdp_enabled(),
        Kernel.FLASH: cuda.flash_sdp_enabled(),
        Kernel.EFFICIENT: cuda.mem_efficient_sdp_enabled(),
        Kernel.CUDNN: cuda.cudnn_sdp_enabled(),
    }


def _doubt(kernel: Kernel) -> str | None:
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    if kernel is Kernel.FLASH and current is not None and current() not in (None, "FA2"):
        return "attention by another FlashAttention than torch's own, whose workspace is not known"
    return None


# ---------------------------------------------------------------- what each kernel can run
def _can_run_flash(gpu: GPU, request: Request) -> bool:
    query, key, value = request.tensors
    if not _four_dims(request) or request.mask is not None or query.dtype not in _SIXTEEN_BITS:
        return False
    width = query.shape[-1]
    if not (_same_dtype(request) and width == key.shape[-1] == value.shape[-1] and width <= 256):
        return False
    if not (8, 0) <= gpu.capability <= _NEWEST:
        return False
    has_little_shared_memory = (8, 6) <= gpu.capability <= (8, 9) or gpu.capability >= (12, 0)
    if (
        has_little_shared_memory
        and request.needs_gradient
        and (192 < width <= 224 or (width > 224 and request.dropout))
    ):
        return False
    if request.is_causal and query.shape[-2] != key.shape[-2]:  # FlashAttention aligns the mask bottom right
        return False
    return _heads_fit(request, groups=True, same_key_value=True) and _has_tokens(request) and _unit_strides(request)


def _can_run_efficient(gpu: GPU, request: Request) -> bool:
    query, key, value = request.tensors
    if not _four_dims(request) or not (5, 0) <= gpu.capability <= _NEWEST:
        return False
    sixteen_bits = query.dtype in _SIXTEEN_BITS
    if gpu.capability >= (8, 0):
        alignment = 8 if sixteen_bits else 4
    else:
        alignment = 8 if sixteen_bits and gpu.capability >= (7, 0) else 1
    widths = query.shape[-1], value.shape[-1]
    if query.shape[-1] != key.shape[-1] or any(width == 0 or width % alignment for width in widths):
        return False
    dtypes = {torch.float16, torch.float32} | ({torch.bfloat16} if gpu.capability >= (8, 0) else set())
    if query.dtype not in dtypes or not _same_dtype(request):
        return False
    return (
        _has_tokens(request)
        and _unit_strides(request, even_if_one_wide=True)
        and _heads_fit(request, groups=False, same_key_value=True)
    )


def _can_run_cudnn(gpu: GPU, request: Request) -> bool:
    query, key, value = request.tensors
    if not _four_dims(request) or not (8, 0) <= gpu.capability <= _NEWEST:
        return False
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    if query.dtype not in _SIXTEEN_BITS or not _same_dtype(request) or not _mask_fits_cudnn(request):
        return False
    if not (_has_tokens(request) and _unit_strides(request)):
        return False
    if not _heads_fit(request, groups=True, same_key_value=False) or max(query.shape[:2]) > _LARGEST_GRID:
        return False
    width, value_width = query.shape[3], value.shape[3]
    widest = 128
    if gpu.capability == (9, 0):
        widest = 256
    elif gpu.capability[0] == 10 and (width, value_width) == (192, 128):
        widest = 192
    if max(width, value_width) > widest or width % 8 or value_width % 8:
        return False
    return key.shape[2] != 1 and not (request.dropout and query.shape[2] == 1)


_CAN_RUN: dict[int, Callable[[GPU, Request], bool]] = {
    Kernel.MATH: lambda gpu, request: True,
    Kernel.FLASH: _can_run_flash,
    Kernel.EFFICIENT: _can_run_efficient,
    Kernel.CUDNN: _can_run_cudnn,
}


def _four_dims(request: Request) -> bool:
    return all(tensor.dim() == 4 for tensor in request.tensors)


def _same_dtype(request: Request) -> bool:
    return request.query.dtype == request.key.dtype == request.value.dtype


def _has_tokens(request: Request) -> bool:
    return request.query.shape[-2] > 0 and request.key.shape[-2] > 0


def _unit_strides(request: Request, *, even_if_one_wide: bool = False) -> bool:
    heads = all(tensor.stride(-1) == 1 for tensor in request.tensors)
    if not even_if_one_wide:
        heads = heads or request.query.shape[-1] == 1
    return heads and (request.mask is None or request.mask.stride(-1) == 1)


def _heads_fit(request: Request, *, groups: bool, same_key_value: bool) -> bool:
    query, key, value = request.tensors
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return False
    H, H_key, H_value = query.shape[1], key.shape[1], value.shape[1]
    if not (groups and request.enable_gqa):
        return H == H_key == H_value
    if 0 in (H_key, H_value) or (same_key_value and H_key != H_value):
        return False
    return H % H_key == 0 and H % H_value == 0


def _mask_fits_cudnn(request: Request) -> bool:
    mask = request.mask
    if mask is None:
        return True
    B, H, L, _ = request.query.shape
    S = request.key.shape[2]
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    allowed = ((1, B), (1, H), (1, L), (1, S))[4 - mask.dim() :]
    return all(size in sizes for size, sizes in zip(mask.shape, allowed, strict=True))


# ---------------------------------------------------------------- order of preference
@contextlib.contextmanager
def preferences_of(gpu: GPU) -> Iterator[None]:
    """Inside, torch prefers kernels as after the first attention on ``gpu``. An order that the user set is kept."""
    before = torch._C._get_sdp_priority_order()
    chosen = tuple(number for number in before if number in _CAN_RUN)
    if chosen in (_TORCH_ORDER, _CUDNN_FIRST_ORDER):
        is_first = gpu.prefers_cudnn_attention and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
        order = _CUDNN_FIRST_ORDER if is_first else _TORCH_ORDER
        torch._C._set_sdp_priority_order([int(kernel) for kernel in order])
    try:
        yield
    finally:
        torch._C._set_sdp_priority_order(before)


def unmeasured_backend(gpu: GPU) -> str:
    """The note for attention on a GPU that was never measured."""
    return f"attention: the backend that torch prefers on {gpu.name} is assumed; bounds are with cuDNN first and last"


# ---------------------------------------------------------------- the call
def install(library: torch.library.Library, gpu: GPU, notes: MutableMapping[str, None]) -> None:
    """Have ``library`` run attention as on ``gpu``. If the choice of a kernel is uncertain, add a note to ``notes``."""

    def decide(request: Request) -> Kernel:
        choice = choose(gpu, request)
        for doubt in (choice.doubt, None if table_of(gpu) else unmeasured_backend(gpu)):
            if doubt is not None:
                notes.setdefault(doubt)
        return choice.kernel

    def attend(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if query.device.type != "cuda":
            composite = torch._C.DispatchKey.CompositeImplicitAutograd
            return aten.scaled_dot_product_attention.default._op_dk(composite, query, *args, **options)
        request, scale = _requested(query, *args, **options)
        _check(request)
        return _RUN[decide(request)](request, scale)

    def choose_kernel(query: torch.Tensor, *args: Any, **options: Any) -> int:
        if query.device.type != "cuda":
            return aten._fused_sdp_choice.default._op_dk(torch._C.DispatchKey.CPU, query, *args, **options)
        return int(decide(_requested(query, *args, **options)[0]))

    for dispatch_key in ("CUDA", "AutogradCUDA"):
        library.impl("scaled_dot_product_attention", attend, dispatch_key, allow_override=True)
        library.impl("_fused_sdp_choice", choose_kernel, dispatch_key, allow_override=True)


def patches(gpu: GPU) -> list[Patch]:
    """Patches for ``torch.backends.cuda.can_use_flash_attention`` and the like, which are False in a CPU build."""

    def answer(kernel: Kernel) -> Callable[..., bool]:
        def can_use(params: Any, debug: bool = False) -> bool:
            request = Request(
                params.query, params.key, params.value, params.attn_mask,
                params.dropout, params.is_causal, params.enable_gqa,
            )  # fmt: skip
            return params.query.device.type == "cuda" and _enabled()[kernel] and _CAN_RUN[kernel](gpu, request)

        return can_use

    names = {Kernel.FLASH: "flash", Kernel.EFFICIENT: "mem_efficient", Kernel.CUDNN: "cudnn"}
    return [(torch._C, f"_can_use_{name}_attention", answer(kernel)) for kernel, name in names.items()]


def _requested(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Request, float | None]:
    """A :class:`Request` from the arguments of attention, named as in torch's schema."""
    return Request(query, key, value, attn_mask, float(dropout_p), is_causal, enable_gqa), scale


def _check(request: Request) -> None:
    """Raise torch's errors for invalid arguments, with torch's messages."""
    query, key, value = request.tensors
    if any(tensor.is_nested for tensor in request.tensors):
        raise MeasurementError(f"attention on nested tensors cannot be simulated; {ON_A_GPU}")
    if not _same_dtype(request):
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, but got query.dtype: "
            f"{query.dtype} key.dtype: {key.dtype} and value.dtype: {value.dtype} instead."
        )
    if not query.device == key.device == value.device:
        raise RuntimeError(
            "Expected query, key, and value to have the same device type, but got query.device: "
            f"{query.device} key.device: {key.device} and value.device: {value.device} instead."
        )
    if any(tensor.dim() < 2 for tensor in request.tensors):
        raise RuntimeError(
            "Expected query, key, and value to all be  at least 2 dimensional, but got query.dim: "
            f"{query.dim()} key.dim: {key.dim()} and value.dim: {value.dim()} instead."
        )
    mask = request.mask
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(
            "Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: "
            f"{mask.dtype} and  query.dtype: {query.dtype} instead."
        )


def _run_flash(request: Request, scale: float | None) -> torch.Tensor:
    width = request.query.shape[-1]
    missing = -width % 8
    query, key, value = (F.pad(tensor, (0, missing)) if missing else tensor for tensor in request.tensors)
    own_scale = 1 / math.sqrt(width) if scale is None else scale  # from the width before padding
    out = aten._scaled_dot_product_flash_attention(
        query, key, value, request.dropout, request.is_causal, False, scale=own_scale
    )[0]
    return out[..., :width] if missing else out


def _run_efficient(request: Request, scale: float | None) -> torch.Tensor:
    query, key, value = request.tensors
    mask = _additive(request.mask, query.dtype)
    if mask is not None:
        aligned = mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1])
        if not aligned:
            columns = mask.shape[-1]
            mask = F.pad(mask, (0, 8 - columns % 8))[..., :columns]
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, request.needs_gradient, request.dropout, request.is_causal, scale=scale
    )[0]


def _run_cudnn(request: Request, scale: float | None) -> torch.Tensor:
    query, key, value = request.tensors
    mask = _additive(request.mask, query.dtype)
    return aten._scaled_dot_product_cudnn_attention(
        query, key, value, mask, request.needs_gradient, request.dropout, request.is_causal, False, scale=scale
    )[0]


def _run_math(request: Request, scale: float | None) -> torch.Tensor:
    query, key, value = request.tensors
    mask = _additive(request.mask, query.dtype)
    return aten._scaled_dot_product_attention_math(
        query, key, value, mask, request.dropout, request.is_causal, None, scale=scale, enable_gqa=request.enable_gqa
    )[0]


_RUN = {
    Kernel.MATH: _run_math,
    Kernel.FLASH: _run_flash,
    Kernel.EFFICIENT: _run_efficient,
    Kernel.CUDNN: _run_cudnn,
}


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A boolean mask as numbers to add: 0 for True, minus infinity for False."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    left_out = torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device)
    return torch.where(mask, 0.0, left_out)


# ---------------------------------------------------------------- what a call returns
def _seed_on_the_host(call: Call) -> Any:
    """Move the dropout seed and offset to the CPU: the efficient kernel returns them there, except in CUDA graphs."""
    out, logsumexp, seed, offset, *rest = call.outputs
    seed, offset = (torch.empty((), dtype=tensor.dtype, device="cpu") for tensor in (seed, offset))
    return out, logsumexp, seed, offset, *rest


def _logsumexp_only_for_backward(call: Call) -> Any:
    """Make cuDNN's logsumexp empty unless the call requests it."""
    out, logsumexp, *rest = call.outputs
    return out, logsumexp if call["compute_log_sumexp"] else logsumexp.new_empty(0), *rest


OUTPUTS_ON_CUDA: dict[Any, Callable[[Call], Any]] = {
    aten._scaled_dot_product_efficient_attention.default: _seed_on_the_host,
    aten._efficient_attention_forward.default: _seed_on_the_host,
    aten._scaled_dot_product_cudnn_attention.default: _logsumexp_only_for_backward,
}
"""Operators whose fake kernels return other outputs than a GPU -> the function that makes the GPU's outputs."""
