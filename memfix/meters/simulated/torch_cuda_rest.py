"""Stubs for what steps rarely use of ``torch.cuda``: sensors, snapshots, tuning, and private names of ``torch._C``.

A build of torch without CUDA lacks the private names, and libraries read them where a GPU is there; with CUDA, their
functions would change the state of a real GPU, or raise because there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ...errors import ON_A_GPU, MeasurementError
from .patches import Patch, always, nothing

_STREAM = (0, 0, 1)
"""Stream, device, and CUDA's type of device: how C++ describes the default stream."""
_SNAPSHOT: dict[str, Any] = {"segments": [], "device_traces": [], "allocator_settings": {}, "external_annotations": []}
_TYPES = {
    "Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool,
}  # fmt: skip
_SENSORS = "utilization temperature power_draw clock_rate memory_usage"
_RETURN_NOTHING = """_cuda_synchronize _cuda_sleep _cuda_setDevice _cuda_setStream _cuda_set_sync_debug_mode
_cuda_setMemoryFraction _cuda_resetAccumulatedMemoryStats _cuda_resetPeakHostMemoryStats
_cuda_resetAccumulatedHostMemoryStats
_cuda_record_memory_history _cuda_record_memory_history_legacy _cuda_setMemoryMetadata _accelerator_setStream"""
_RETURN: dict[str, Any] = {
    **dict.fromkeys(_RETURN_NOTHING.split()),
    **dict.fromkeys(("_cuda_tunableop_enable", "_cuda_tunableop_tuning_enable")),
    **dict.fromkeys(("_cuda_tunableop_is_enabled", "_cuda_tunableop_tuning_is_enabled"), False),
    **dict.fromkeys(("_cuda_isInBadFork", "_cuda_canDeviceAccessPeer", "_cuda_isHistoryEnabled"), False),
    **dict.fromkeys(("_cuda_getCurrentBlasHandle", "_cuda_getCurrentSolverHandle"), 0),
    **dict.fromkeys(("_cuda_getDevice", "_cuda_get_sync_debug_mode"), 0),
    **dict.fromkeys(("_cuda_getCurrentStream", "_cuda_getDefaultStream", "_cuda_getStreamFromExternal"), _STREAM),
    "_cuda_getMemoryFraction": 1.0,
    "_cuda_hostMemoryStats": {},
    "_cuda_memorySnapshot": _SNAPSHOT,
}
"""Functions of ``torch._C`` and what they return."""


def patches() -> list[Patch]:
    """Return the stubs of public names, and of what they call in torch."""
    cuda = torch.cuda
    return [
        *((cuda, name, always(0)) for name in _SENSORS.split()),
        *((module, "list_gpu_processes", always("")) for module in (cuda, cuda.memory)),
        (torch.accelerator, "get_device_capability", always({"supported_dtypes": {*_TYPES.values()}})),
        *((module, "cudart", always(_Runtime())) for module in (cuda, cuda.profiler)),
        *((module, "check_error", nothing) for module in (cuda, cuda.profiler)),
        (cuda.nccl, "version", always((2, 28, 9))),
        (torch.backends.cudnn, "is_available", always(True)),
        (torch.backends.cudnn, "version", always(91900)),
        (torch.backends.cudnn, "is_acceptable", always(False)),  # it would warn that there is no cuDNN
        (torch.backends.cuda, "is_built", always(True)),
        (torch.backends.cuda, "is_flash_attention_available", always(True)),
        *((cuda, f"{name}Tensor", _tensor_type(dtype)) for name, dtype in _TYPES.items()),
        (cuda, "CUDAGraph", _refused("CUDA graphs")),
        *((module, "graph_pool_handle", _refused("CUDA graphs")) for module in (cuda, cuda.graphs)),
        *((cuda, name, _refused("memory pools of its own")) for name in ("MemPool", "use_mem_pool")),
        *(
            (module, name, _refused("addresses from torch's allocator"))
            for module in (cuda, cuda.memory)
            for name in ("caching_allocator_alloc", "caching_allocator_delete")
        ),
    ]


def of_torch_c() -> list[Patch]:
    """Return the stubs of private names, which are added where this build of torch lacks them."""
    stubs = [(torch._C, name, always(value)) for name, value in _RETURN.items()]
    # libraries keep this function when they are imported, so that of a build with CUDA must stay
    if not hasattr(torch._C, "_cuda_getCurrentRawStream"):
        stubs.append((torch._C, "_cuda_getCurrentRawStream", always(0)))
    return stubs


class _Runtime:
    """CUDA's runtime: every call succeeds."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("__"):
            raise AttributeError(name)
        return always(0)


class _AnyTensor(type):
    """A metaclass of types whose instances are the tensors on a GPU that have the type's dtype."""

    dtype: torch.dtype

    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, torch.Tensor) and thing.is_cuda and thing.dtype == cls.dtype


def _tensor_type(dtype: torch.dtype) -> type:
    """Return a stub for an old tensor type, such as ``torch.cuda.FloatTensor``."""

    def made(cls: type, *size: Any) -> torch.Tensor:
        if all(isinstance(length, int) for length in size):
            return torch.empty(size, dtype=dtype, device="cuda")
        (values,) = size
        if isinstance(values, torch.Size):
            return torch.empty(values, dtype=dtype, device="cuda")
        return torch.as_tensor(values, dtype=dtype, device="cuda")

    return _AnyTensor("Tensor", (), {"__new__": made, "dtype": dtype})


def _refused(what: str) -> type:
    def refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        raise MeasurementError(f"the step uses {what}, which are not simulated; {ON_A_GPU}")

    return type("NotSimulated", (), {"__new__": refuse})
