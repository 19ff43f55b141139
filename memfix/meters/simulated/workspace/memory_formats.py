"""Contiguous copies of images: kernels for channels first or channels last copy tensors in other layouts."""

from __future__ import annotations

import torch
from torch._prims_common import suggest_memory_format

from .layout import extent
from .rules import Call, Estimated, NoRule, Range, copies_unless_contiguous, rule, size_of, tensors_in

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Number of dimensions -> the channels-last format."""


def suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    """The result of torch's ``Tensor::suggest_memory_format``: channels last by strides, else contiguous."""
    return suggest_memory_format(tensor)


def copies_unless_in(memory_format: torch.memory_format, *tensors: torch.Tensor | None) -> list[int]:
    """The bytes of the copies that ``.contiguous(memory_format)`` makes of each tensor."""
    return [
        size_of(tensor)
        for tensor in tensors
        if tensor is not None and not tensor.is_contiguous(memory_format=memory_format)
    ]


def require_contiguous(call: Call, *names: str, memory_format: torch.memory_format = torch.contiguous_format) -> None:
    """Raise ``NoRule`` if an argument has another layout, because the kernel's copies are then unknown."""
    for name in names:
        if not _is_contiguous(call[name], memory_format):
            raise NoRule(f"{call.operator} of a {name} that is not contiguous, shape {list(call[name].shape)}")


def _is_contiguous(tensor: torch.Tensor | None, memory_format: torch.memory_format) -> bool:
    return tensor is None or tensor.is_contiguous(memory_format=memory_format)


def copied_unless_read_as_it_is(
    call: Call, *names: str, memory_format: torch.memory_format = torch.contiguous_format
) -> list[int]:
    """The workspace of a kernel that needs none where these arguments are contiguous. Raise ``Estimated`` elsewhere:
    the kernel may read them as they are, copy them, or also make its result in another layout first."""
    strided = [name for name in names if not _is_contiguous(call[name], memory_format)]
    if strided:
        size = sum(size_of(call[name]) for name in strided)
        most = size + sum(map(size_of, tensors_in(call.outputs)))
        shapes = ", ".join(f"a {name} that is not contiguous, shape {list(call[name].shape)}" for name in strided)
        raise Estimated(f"{call.operator} of {shapes}", Range(0, size, most))
    return []


def contiguous_only(arguments: str, *names: str) -> None:
    """Register operators that need no workspace where these ``arguments`` are contiguous, and maybe copies elsewhere.

    In ``"self indices?"`` the second is an argument that only some of the operators have.
    """

    @rule(*names)
    def require(call: Call) -> list[int]:
        return copied_unless_read_as_it_is(call, *_present(call, arguments))


def copied_unless_contiguous(arguments: str, *names: str) -> None:
    """Register operators whose only workspace is the contiguous copies of these ``arguments``."""

    @rule(*names)
    def copy(call: Call) -> list[int]:
        return copies_unless_contiguous(*(call[argument] for argument in _present(call, arguments)))


def _present(call: Call, arguments: str) -> list[str]:
    return [a.removesuffix("?") for a in arguments.split() if not a.endswith("?") or call.has(a[:-1])]


def fits_32bit_indices(tensor: torch.Tensor) -> bool:
    """Whether 32-bit offsets reach every element; many kernels have a fast path for that."""
    return max(tensor.numel(), extent(tensor) - 1) < 2**31 - 1


def accumulator_bytes(dtype: torch.dtype) -> int:
    """The item size in which kernels sum: float32 for half precision, else that of ``dtype``."""
    return max(dtype.itemsize, 4)
