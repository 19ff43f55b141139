"""Records the kernels that a simulated step would launch, with what is needed to compile them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...cuda_kernels import CudaKernel

_ALIGNMENT = 16
"""The alignment of addresses that Triton specialises on."""


@dataclass(frozen=True)
class Pointer:
    """The properties of a tensor argument that a kernel's compilation depends on, without the tensor itself."""

    dtype: torch.dtype
    off_alignment: int

    @classmethod
    def to(cls, tensor: torch.Tensor) -> Pointer:
        return cls(tensor.dtype, int(tensor.storage_offset()) * tensor.element_size() % _ALIGNMENT)

    def data_ptr(self) -> int:
        return self.off_alignment


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel. ``kernel`` is a Triton function, or an autotuner around one, with its arguments; or a
    ``CudaKernel`` with no arguments, which its compilation does not need, and ``shared_bytes`` as an option."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]

    @classmethod
    def of(cls, kernel: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Launch:
        named = {name: _without_memory(value) for name, value in options.items() if name not in ("grid", "warmup")}
        return cls(kernel, tuple(map(_without_memory, arguments)), named)

    @property
    def name(self) -> str:
        if isinstance(self.kernel, CudaKernel):
            return self.kernel.name
        return str(getattr(self.kernel, "__name__", None) or getattr(self.kernel.fn, "__name__", self.kernel))

    @property
    def is_tuned(self) -> bool:
        """Whether an autotuner on a GPU chooses the configuration."""
        if isinstance(self.kernel, CudaKernel):
            return False
        from triton.runtime.jit import JITFunction

        return not isinstance(self.kernel, JITFunction)

    def compile(self) -> Any:
        """Compile the kernel for the current target, without running it."""
        return self.kernel.warmup(*self.arguments, grid=(1,), **self.options)


def _without_memory(value: Any) -> Any:
    return Pointer.to(value) if isinstance(value, torch.Tensor) else value
