"""A stub of Triton's driver, which tells Triton and Inductor the properties of the simulated GPU."""

from __future__ import annotations

from typing import Any

import torch

from .gpus import GPU

_WARP = 32


class TritonDriver:
    def __init__(self, gpu: GPU) -> None:
        major, minor = gpu.capability
        self.capability = 10 * major + minor

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, _WARP)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)
