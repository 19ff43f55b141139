"""The Triton kernels that a simulated step would have launched, and how: enough to compile them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_ALIGNMENT = 16
"""What Triton asks of an address."""


@dataclass(frozen=True)
class Pointer:
    """What a kernel is compiled by of a tensor that is handed to it. The tensor itself may go."""

    dtype: torch.dtype
    off_alignment: int

    @classmethod
    def to(cls, tensor: torch.Tensor) -> Pointer:
        return cls(tensor.dtype, int(tensor.storage_offset()) * tensor.element_size() % _ALIGNMENT)

    def data_ptr(self) -> int:
        return self.off_alignment


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments. ``kernel`` is Triton's: a function, or what tunes one."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]

    @classmethod
    def of(cls, kernel: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Launch:
        named = {name: _without_memory(value) for name, value in options.items() if name not in ("grid", "warmup")}
        return cls(kernel, tuple(map(_without_memory, arguments)), named)

    @property
    def name(self) -> str:
        return str(getattr(self.kernel, "__name__", None) or getattr(self.kernel.fn, "__name__", self.kernel))

    @property
    def is_tuned(self) -> bool:
        """Is it a GPU that chooses how it is compiled?"""
        from triton.runtime.jit import JITFunction

        return not isinstance(self.kernel, JITFunction)

    def compile(self) -> Any:
        """The binary for the current target, which nothing runs."""
        return self.kernel.warmup(*self.arguments, grid=(1,), **self.options)


def _without_memory(value: Any) -> Any:
    return Pointer.to(value) if isinstance(value, torch.Tensor) else value
