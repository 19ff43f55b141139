"""CUDA C++ kernels that are compiled at run time: one ``.cu`` file for the GPU, and for an emulation on the host.

    TILED = CudaKernel(Path(__file__).with_name("matmul.cu"), "matmul_tiled")
    TILED.launch((columns, rows), (16, 16), left, right, out, M, N, K)

On a GPU the source is compiled by NVRTC for the GPU of the tensors, once a process. On the CPU it is refused, unless
:func:`~memfix.cuda_kernels.emulated.emulated` emulates it. The simulated meter records a launch, and runs nothing.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ctypes
    import struct

    import torch

    Frame = tuple[struct.Struct, ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_void_p]]


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel: ``const float`` of a pointer to it, or ``int`` of a number."""

    type: str
    name: str
    is_pointer: bool

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        import torch

        found: torch.dtype = getattr(torch, _DTYPES[self.type.removeprefix("const ")])
        return found

    def refusal(self, argument: Any) -> str:
        """Why it cannot be this argument."""
        import torch

        if self.is_pointer and isinstance(argument, torch.Tensor):
            return f"{self.name} must be {self.dtype}, got {argument.dtype}"
        wanted = f"a tensor of {self.type}" if self.is_pointer else self.type
        return f"{self.name} must be {wanted}, got {type(argument).__name__}"


@dataclass(frozen=True)
class CudaKernel:
    """A kernel of a ``.cu`` file, declared ``extern "C" __global__ void name(...)``."""

    path: Path
    name: str
    constants: tuple[tuple[str, int], ...] = ()
    """What the source is compiled for, defined before its first line."""

    def launch(self, grid: Sequence[int], block: Sequence[int], *arguments: Any, shared_bytes: int = 0) -> None:
        """Launch on the current stream of the tensors' device. Every argument is a tensor or a number, as the kernel
        declares it, or None for a pointer to nothing. The kernel reads a tensor by its pointer: pass strides where it
        may not be contiguous. ``shared_bytes``: of a block, beyond what the kernel declares."""
        device, values = self.as_numbers(arguments)
        if device.type == "cuda":
            from .compiled import launch_on

            launch_on(device.index, self, grid, block, values, shared_bytes)
            return
        from .emulated import emulate, is_emulating

        if device.type != "cpu" or not is_emulating():
            raise RuntimeError(
                f"the kernel {self.name} runs on a GPU, and the tensors are on {device}; use torch's own"
            )
        emulate(self, grid, block, arguments, values, shared_bytes)

    @functools.cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        return parameters_of(self.source, self.name)

    @property
    def first_line(self) -> int:
        """Of its declaration."""
        text = self.path.read_text(encoding="utf-8")
        return text[: _declaration(text, self.name).start()].count("\n") + 1

    @property
    def source(self) -> str:
        lines = [f"#define {name} {value}" for name, value in self.constants]
        return "\n".join([*lines, f'#line 1 "{self.path.name}"', self.path.read_text(encoding="utf-8")])

    @functools.cached_property
    def frames(self) -> dict[int, Frame]:
        """By thread, where a launch packs its arguments."""
        return {}

    @functools.cached_property
    def dtypes(self) -> tuple[torch.dtype | None, ...]:
        """Of its pointers; None for numbers."""
        return tuple(parameter.dtype if parameter.is_pointer else None for parameter in self.parameters)

    def written(self, arguments: Sequence[Any]) -> list[Any]:
        """Those of ``arguments`` that the kernel may write into: its pointers, but those to what is const."""
        pairs = zip(self.parameters, arguments, strict=True)
        return [argument for parameter, argument in pairs if not parameter.type.startswith("const ")]

    def as_numbers(
        self, arguments: Sequence[Any], address_of: Callable[[torch.Tensor], int] | None = None
    ) -> tuple[torch.device, list[float]]:
        """The device of the tensors among ``arguments``, and what the kernel gets: addresses, 0 for None, and numbers.

        Arguments that are not as the kernel declares them are refused. Every launch pays for this loop, so it is one.
        """
        import torch

        address_of = address_of or torch.Tensor.data_ptr
        if len(arguments) != len(self.dtypes):
            raise TypeError(f"{self.name} takes {len(self.dtypes)} arguments, got {len(arguments)}")
        device: torch.device | None = None
        values: list[float] = []
        for dtype, argument in zip(self.dtypes, arguments, strict=True):
            if dtype is None and isinstance(argument, (int, float)):
                values.append(argument)
            elif dtype is not None and argument is None:
                values.append(0)
            elif dtype is not None and isinstance(argument, torch.Tensor) and argument.dtype is dtype:
                if device is None:
                    device = argument.device
                elif argument.device != device:
                    raise ValueError(f"{self.name} needs tensors of one device, got {device}, {argument.device}")
                values.append(address_of(argument))
            else:
                raise TypeError(f"{self.name}: {self.parameters[len(values)].refusal(argument)}")
        if device is None:
            raise ValueError(f"{self.name} needs tensors of one device, got none")
        return device, values


_DTYPES = {"float": "float32", "double": "float64", "int": "int32", "long long": "int64", "bfloat16": "bfloat16"}
"""Those of torch, by the types of C that kernels may have."""


def parameters_of(source: str, kernel: str) -> tuple[Parameter, ...]:
    """Read the declaration of a kernel."""
    parameters = []
    for text in filter(None, map(str.strip, _declaration(source, kernel)["parameters"].split(","))):
        words = text.replace("__restrict__", " ").replace("*", " * ").split()
        parameter = Parameter(" ".join(word for word in words[:-1] if word != "*"), words[-1], "*" in words)
        if parameter.type.removeprefix("const ") not in _DTYPES or words.count("*") > 1:
            raise ValueError(f"{kernel}: a parameter is one of {', '.join(_DTYPES)} or a pointer to one, got {text!r}")
        parameters.append(parameter)
    return tuple(parameters)


def declarations(source: str) -> Iterator[re.Match[str]]:
    """Of all kernels in a source, with ``name`` and ``parameters``."""
    bounds = r"(?:__launch_bounds__\s*\([^)]*\)\s*)?"
    return re.finditer(rf'extern\s+"C"\s+__global__\s+void\s+{bounds}(?P<name>\w+)\s*\((?P<parameters>[^)]*)\)', source)


def _declaration(source: str, kernel: str) -> re.Match[str]:
    found = next((found for found in declarations(source) if found["name"] == kernel), None)
    if found is None:
        raise ValueError(f'no kernel {kernel!r}: declare it extern "C" __global__ void {kernel}(...)')
    return found
