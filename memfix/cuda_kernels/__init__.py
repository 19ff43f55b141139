"""Launch CUDA C++ kernels that are compiled at run time, for a GPU or for an emulation on the host.

    TILED = CudaKernel(Path(__file__).with_name("matmul.cu"), "matmul_tiled")
    TILED.launch((columns, rows), (16, 16), left, right, out, M, N, K)

For CUDA tensors, NVRTC or nvcc compiles the ``.cu`` file, with the headers beside it that it includes, for their GPU;
the binary is cached. For CPU tensors a launch raises, except inside :func:`~memfix.cuda_kernels.emulated.emulated`,
where a C++ compiler builds the same file. The simulated meter records launches and runs no kernel.
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

    ArgumentBuffer = tuple[struct.Struct, ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_void_p]]


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel. ``type`` is ``const float`` for ``const float *``, and ``int`` for a plain ``int``."""

    type: str
    name: str
    is_pointer: bool

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        import torch

        found: torch.dtype = getattr(torch, _DTYPES[self.type.removeprefix("const ")])
        return found

    def refusal(self, argument: Any) -> str:
        """Return the error message for an argument that does not fit this parameter."""
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
    constants: tuple[tuple[str, int | str], ...] = ()
    """Names and values of macros that are defined before the first line of the source. A value may be a type, which
    parameters then may have by the macro's name."""

    def launch(self, grid: Sequence[int], block: Sequence[int], *arguments: Any, shared_bytes: int = 0) -> None:
        """Launch on the current stream of the tensors' device. Each argument is a tensor for a pointer, a number for a
        value, or None for a null pointer. The kernel gets only the data pointer of a tensor: pass its strides too if it
        may not be contiguous. ``shared_bytes`` is the dynamic shared memory of a block, beyond the static one."""
        device, values = self.as_numbers(arguments)
        if device.type == "cuda":
            from .compiled import launch_on

            launch_on(device.index, self, grid, block, values, shared_bytes)
            return
        from .emulated import emulate, is_emulating

        if device.type != "cpu" or not is_emulating():
            raise RuntimeError(
                f"the kernel {self.name} runs on a GPU, and the tensors are on {device}; "
                "use the op's torch form, or run inside emulated()"
            )
        emulate(self, grid, block, arguments, values, shared_bytes)

    @functools.cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        return parameters_of(self.source, self.name)

    @property
    def first_line(self) -> int:
        """The line number of the kernel's declaration in its file, from 1."""
        text = self.path.read_text(encoding="utf-8")
        return text[: _declaration(text, self.name).start()].count("\n") + 1

    @functools.cached_property
    def source(self) -> str:
        """The text that a compiler gets: the constants, then the file with its headers in place of its includes."""
        lines = [f"#define {name} {value}" for name, value in self.constants]
        return "\n".join([*lines, *_with_headers(self.path, set())])

    @functools.cached_property
    def argument_buffers(self) -> dict[int, ArgumentBuffer]:
        """The memory into which each thread packs the arguments of a launch, by thread id."""
        return {}

    @functools.cached_property
    def dtypes(self) -> tuple[torch.dtype | None, ...]:
        """The dtype of each pointer parameter; None for numbers."""
        return tuple(parameter.dtype if parameter.is_pointer else None for parameter in self.parameters)

    def written(self, arguments: Sequence[Any]) -> list[Any]:
        """The ``arguments`` that the kernel may write into: those for pointers to types that are not const."""
        pairs = zip(self.parameters, arguments, strict=True)
        return [argument for to, argument in pairs if to.is_pointer and not to.type.startswith("const ")]

    def as_numbers(
        self, arguments: Sequence[Any], address_of: Callable[[torch.Tensor], int] | None = None
    ) -> tuple[torch.device, list[float]]:
        """Return the device of the tensors, and the arguments as numbers: addresses, 0 for None, and values.

        Raise if ``arguments`` do not match the kernel's declaration. Both are done in one loop, since every launch pays
        for it.
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


def _with_headers(path: Path, known: set[Path]) -> Iterator[str]:
    """Yield the lines of a source, with each ``#include "name"`` of a file beside it replaced by that file, once. Other
    includes are left to the compiler."""
    known.add(path)
    yield f'#line 1 "{path.name}"'
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        included = re.fullmatch(r'\s*#\s*include\s*"([^"]+)".*', line)
        header = path.parent / included[1] if included else path
        if included is None or not header.is_file():
            yield line
            continue
        if header not in known:
            yield from _with_headers(header, known)
        yield f'#line {number + 1} "{path.name}"'


_DTYPES = {"float": "float32", "double": "float64", "int": "int32", "long long": "int64", "bfloat16": "bfloat16"}
"""C type of a parameter -> name of torch's dtype."""


def parameters_of(source: str, kernel: str) -> tuple[Parameter, ...]:
    """Parse the parameters of a kernel from its declaration in ``source``; a type may be the name of a macro."""
    parameters, macros = [], dict(re.findall(r"^#define (\w+) (\w+)$", source, re.MULTILINE))
    for text in filter(None, map(str.strip, _declaration(source, kernel)["parameters"].split(","))):
        words = text.replace("__restrict__", " ").replace("*", " * ").split()
        named = " ".join(macros.get(word, word) for word in words[:-1] if word != "*")
        parameter = Parameter(named, words[-1], "*" in words)
        if parameter.type.removeprefix("const ") not in _DTYPES or words.count("*") > 1:
            raise ValueError(f"{kernel}: a parameter is one of {', '.join(_DTYPES)} or a pointer to one, got {text!r}")
        parameters.append(parameter)
    return tuple(parameters)


def declarations(source: str) -> Iterator[re.Match[str]]:
    """Find the declarations of all kernels in a source; each match has the groups ``name`` and ``parameters``."""
    bounds = r"(?:__launch_bounds__\s*\([^)]*\)\s*)?"
    return re.finditer(rf'extern\s+"C"\s+__global__\s+void\s+{bounds}(?P<name>\w+)\s*\((?P<parameters>[^)]*)\)', source)


def _declaration(source: str, kernel: str) -> re.Match[str]:
    found = next((found for found in declarations(source) if found["name"] == kernel), None)
    if found is None:
        raise ValueError(f'no kernel {kernel!r}: declare it extern "C" __global__ void {kernel}(...)')
    return found
