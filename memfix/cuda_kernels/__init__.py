"""CUDA C++ kernels that are compiled at run time: one ``.cu`` file for the GPU, and for an emulation on the host.

    TILED = CudaKernel(Path(__file__).with_name("matmul.cu"), "matmul_tiled")
    TILED.launch((columns, rows), (16, 16), left, right, out, M, N, K)

On a GPU the source is compiled by NVRTC for the GPU of the tensors, once a process. On the CPU it is refused, unless
:func:`~memfix.cuda_kernels.emulated.emulated` emulates it. The simulated meter records a launch, and runs nothing.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel: ``const float`` of a pointer to it, or ``int`` of a number."""

    type: str
    name: str
    is_pointer: bool


@dataclass(frozen=True)
class CudaKernel:
    """A kernel of a ``.cu`` file, declared ``extern "C" __global__ void name(...)``."""

    path: Path
    name: str

    def launch(self, grid: Sequence[int], block: Sequence[int], *arguments: Any, shared_bytes: int = 0) -> None:
        """Launch on the current stream of the tensors' device. Every argument is a tensor or a number, as the kernel
        declares it. The kernel reads a tensor by its pointer: pass strides where it may not be contiguous.
        ``shared_bytes``: of a block, beyond what the kernel declares."""
        tensors = self.tensors_of(arguments)
        device = tensors[0].device
        if device.type == "cuda":
            from .compiled import function_on, launch_on

            launch_on(device, function_on(self, device, shared_bytes), grid, block, self.parameters, arguments, shared_bytes)
            return
        from .emulated import emulate, is_emulating

        if device.type != "cpu" or not is_emulating():
            raise RuntimeError(
                f"the kernel {self.name} runs on a GPU, and the tensors are on {device}; use torch's own"
            )
        emulate(self, grid, block, arguments)

    @functools.cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        return parameters_of(self.source, self.name)

    @property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def tensors_of(self, arguments: Sequence[Any]) -> list[torch.Tensor]:
        """The tensors among ``arguments``, which must be as the kernel declares them and on one device."""
        import torch

        if len(arguments) != len(self.parameters):
            raise TypeError(f"{self.name} takes {len(self.parameters)} arguments, got {len(arguments)}")
        tensors = []
        for parameter, argument in zip(self.parameters, arguments, strict=True):
            if parameter.is_pointer != isinstance(argument, torch.Tensor):
                wanted = f"a tensor of {parameter.type}" if parameter.is_pointer else parameter.type
                raise TypeError(f"{self.name}: {parameter.name} must be {wanted}, got {type(argument).__name__}")
            if isinstance(argument, torch.Tensor):
                dtype = getattr(torch, _DTYPES[parameter.type.removeprefix("const ")])
                if argument.dtype != dtype:
                    raise TypeError(f"{self.name}: {parameter.name} must be {dtype}, got {argument.dtype}")
                tensors.append(argument)
        if len({tensor.device for tensor in tensors}) != 1:
            devices = ", ".join(sorted({str(tensor.device) for tensor in tensors})) or "none"
            raise ValueError(f"{self.name} needs tensors of one device, got {devices}")
        return tensors


_DTYPES = {"float": "float32", "double": "float64", "int": "int32", "long long": "int64", "bfloat16": "bfloat16"}
"""Those of torch, by the types of C that kernels may have."""


def parameters_of(source: str, kernel: str) -> tuple[Parameter, ...]:
    """Read the declaration of a kernel."""
    found = re.search(rf'extern\s+"C"\s+__global__\s+void\s+{re.escape(kernel)}\s*\(([^)]*)\)', source)
    if found is None:
        raise ValueError(f'no kernel {kernel!r}: declare it extern "C" __global__ void {kernel}(...)')
    parameters = []
    for text in filter(None, map(str.strip, found[1].split(","))):
        words = text.replace("__restrict__", " ").replace("*", " * ").split()
        parameter = Parameter(" ".join(word for word in words[:-1] if word != "*"), words[-1], "*" in words)
        if parameter.type.removeprefix("const ") not in _DTYPES or words.count("*") > 1:
            raise ValueError(f"{kernel}: a parameter is one of {', '.join(_DTYPES)} or a pointer to one, got {text!r}")
        parameters.append(parameter)
    return tuple(parameters)
