"""Launches Triton kernels at about the host cost of a torch operator.

Triton inspects every argument of every launch to find the compiled kernel, which takes longer than a small kernel runs.
This cache finds it by the numbers among the arguments, and by the dtypes and alignments of the tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from .alignment import ALIGNED_BYTES
from .dispatch import is_interpreted

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NUMBERS = (int, float, bool, type(None))
_MOST_KEPT = 4096  # entries, after which the cache is emptied: sizes may change at every launch
_compiled: dict[tuple[object, ...], _Compiled] = {}


class _Compiled:
    """A compiled kernel, its constexprs in the order of its parameters, and a launcher for each grid."""

    def __init__(self, kernel: Any, constants: tuple[object, ...]) -> None:
        self._kernel, self._constants = kernel, constants
        self._launchers: dict[tuple[int, ...], Any] = {}

    def launch(self, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        launcher = self._launchers.get(grid)
        if launcher is None:
            launcher = self._launchers[grid] = self._kernel[(*grid, 1, 1)[:3]]
        launcher(*arguments, *self._constants)


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any
) -> None:
    """Launch ``kernel[grid](*arguments, **constants)`` on the tensors' device, which need not be the current one.

    ``arguments`` are tensors or tensor descriptors, at least one, numbers or None; ``constants`` are the constexprs by
    name. In Triton's interpreter, and while a graph is traced, this calls ``kernel`` and does nothing else.
    """
    if is_interpreted() or torch.compiler.is_compiling():
        kernel[grid](*arguments, **constants, num_warps=num_warps, num_stages=num_stages)
        return
    device = _device_of(arguments)
    if device >= 0 and device != torch.cuda.current_device():  # on which Triton launches
        with torch.cuda.device(device):
            launch(kernel, grid, *arguments, num_warps=num_warps, num_stages=num_stages, **constants)
        return
    key = _key_of(kernel, arguments, (device, num_warps, num_stages, *constants.values()))
    found = None if key is None else _compiled.get(key)
    if found is not None:
        found.launch(grid, arguments)
        return
    compiled = kernel[grid](*arguments, **constants, num_warps=num_warps, num_stages=num_stages)
    if key is not None:
        if len(_compiled) >= _MOST_KEPT:
            _compiled.clear()
        _compiled[key] = _Compiled(compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :]))


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()


def largest_power_of_two(most: int) -> int:
    """The largest power of two that is at most ``most``; 1 for ``most`` below 1."""
    return 1 << max(1, most).bit_length() - 1


def num_tiles(length: int, of_size: int) -> int:
    """How many tiles cover ``length``; the last may be partly filled."""
    return -(-length // of_size)


def _device_of(arguments: tuple[Any, ...]) -> int:
    """Return the index of the GPU of the first tensor; -1 where it is on none."""
    for value in arguments:
        tensor: torch.Tensor | None = value if isinstance(value, torch.Tensor) else getattr(value, "base", None)
        if tensor is not None:
            return tensor.get_device()
    raise AssertionError("a kernel is launched without a tensor")


def _key_of(kernel: Any, arguments: tuple[Any, ...], constants: tuple[object, ...]) -> tuple[object, ...] | None:
    """Return everything that decides which compiled kernel runs, or None where Triton must see the launch itself: for
    tensor subclasses such as those of the simulated meter."""
    key: list[object] = [id(kernel), *constants]
    append = key.append
    for value in arguments:
        kind = type(value)
        if kind in _PLAIN:
            append(value.dtype)
            append(value.data_ptr() % ALIGNED_BYTES == 0)  # Triton compiles a kernel for such pointers, or for any
        elif kind in _NUMBERS:
            append(kind)  # 1 is also 1.0 and True
            append(value)
        elif type(getattr(value, "base", None)) in _PLAIN:
            key += (value.base.dtype, *value.block_shape)
        else:
            return None
    return tuple(key)
