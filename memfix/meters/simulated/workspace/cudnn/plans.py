"""Query cuDNN for the workspace of a convolution on a GPU that the machine need not have.

torch runs the first of the library's suggestions from which a plan can be built. The library answers for a described
device, so no driver is needed.
"""

from __future__ import annotations

import ctypes
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...gpus import GPU
from .backend import Attribute, CudnnError, Descriptor, Kind, Type
from .convolution import Convolution
from .library import library

_DATA_TYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 9}
_CROSS_CORRELATION = 1
_INSTANT, _FALLBACK = 0, 2  # modes of the heuristics, in the order in which torch tries them
_TENSOR_CORE, _DOWN_CONVERTS, _NONDETERMINISTIC = 0, 1, 4  # numerical notes of an engine
_ALIGNMENT = 32  # what torch declares, although the allocator's addresses are multiples of 512

# the attributes of the operation: image, output, weight, convolution, alpha, beta
_OPERATIONS = {
    "forward": (Kind.FORWARD, (704, 705, 703, 702, 700, 701)),
    "image": (Kind.DATA_GRADIENT, (710, 711, 709, 708, 706, 707)),
    "weight": (Kind.WEIGHT_GRADIENT, (716, 717, 715, 714, 712, 713)),
}


@dataclass(frozen=True)
class Settings:
    """The settings of ``torch.backends.cudnn`` that rule out plans."""

    deterministic: bool = False
    allow_tf32: bool = True


@dataclass(frozen=True)
class Plan:
    """The plan that torch runs: the number of its engine, and its workspace in bytes."""

    engine: int
    workspace: int


@functools.cache
def first_plan(gpu: GPU, convolution: Convolution, settings: Settings = Settings()) -> Plan | None:
    """The first suggested plan that torch does not refuse; None without such a plan or without the library."""
    loaded = library()
    if loaded is None or convolution.dtype not in _DATA_TYPES:
        return None
    try:
        device, graph = _device(loaded, gpu), _graph(loaded, convolution)
        for config in _configs(loaded, graph, device):
            (engine,) = config.children(Attribute.CONFIG_ENGINE, Kind.ENGINE, at_most=1)
            workspace = None
            if not _is_refused(engine, convolution.dtype, settings):
                workspace = _workspace_of(loaded, config, device)
            if workspace is not None:
                (number,) = engine.numbers(Attribute.ENGINE_NUMBER, Type.INT64)
                return Plan(number, workspace)
    except CudnnError:
        return None
    return None


@functools.cache
def _device(loaded: ctypes.CDLL, gpu: GPU) -> Descriptor:
    major, minor = gpu.capability
    properties = {
        "maxGridSize": [2**31 - 1, 65535, 65535],
        "maxBlockSize": [1024, 1024, 64],
        "regsPerBlock": 65536,
        "multiProcessorCount": gpu.multiprocessors,
        "warpSize": 32,
        "maxSharedMemoryPerBlock": 49152,
        "maxSharedMemoryPerBlockOptin": gpu.shared_memory_bytes,
        "reservedSharedMemoryPerBlock": 1024,
        "maxRegistersPerSM": 65536,
        "maxCtasPerSM": 32,
        "maxThreadsPerBlock": 1024,
        "maxThreadsPerSM": gpu.threads_per_multiprocessor,
        "pciDeviceId": 0,
        "isTccDriver": 0,
        "supportCoopLaunch": 1,
        "totalGlobalMem": gpu.memory_bytes,
        "smClockRateKHz": 1_980_000,
        "memClockRateKHz": 3_201_000,
        "l2CacheSize": gpu.l2_bytes,
        "cudaDeviceId": 0,
        "deviceVer": 100 * major + 10 * minor,
        "driverVer": 13000,
        "deviceName": f"NVIDIA {gpu.name}",
    }
    device = Descriptor(loaded, Kind.DEVICE)
    device.set(Attribute.DEVICE_JSON, Type.CHAR, *(bytes([byte]) for byte in json.dumps(properties).encode()))
    return device.finalized()


def _graph(loaded: ctypes.CDLL, convolution: Convolution) -> Descriptor:
    kind, attributes = _OPERATIONS[convolution.part]
    operation = Descriptor(loaded, kind)
    shapes = {"x": convolution.image, "y": convolution.output, "w": convolution.weight}
    for attribute, (name, shape) in zip(attributes, shapes.items(), strict=False):
        operation.set(attribute, Type.DESCRIPTOR, _tensor(loaded, convolution, name, shape))
    operation.set(attributes[3], Type.DESCRIPTOR, _geometry(loaded, convolution))
    scalar = Type.DOUBLE if convolution.dtype == torch.float64 else Type.FLOAT
    operation.set(attributes[4], scalar, 1.0)
    operation.set(attributes[5], scalar, 0.0)
    graph = Descriptor(loaded, Kind.GRAPH)
    graph.set(Attribute.GRAPH_OPERATIONS, Type.DESCRIPTOR, operation.finalized())
    return graph.finalized()


def _tensor(loaded: ctypes.CDLL, convolution: Convolution, name: str, shape: tuple[int, ...]) -> Descriptor:
    tensor = Descriptor(loaded, Kind.TENSOR)
    tensor.set(Attribute.TENSOR_TYPE, Type.DATA_TYPE, _DATA_TYPES[convolution.dtype])
    tensor.set(Attribute.TENSOR_SIZES, Type.INT64, *shape)
    tensor.set(Attribute.TENSOR_STRIDES, Type.INT64, *convolution.strides_of(shape))
    tensor.set(Attribute.TENSOR_ID, Type.INT64, ord(name))
    tensor.set(Attribute.TENSOR_ALIGNMENT, Type.INT64, _ALIGNMENT)
    return tensor.finalized()


def _geometry(loaded: ctypes.CDLL, convolution: Convolution) -> Descriptor:
    geometry = Descriptor(loaded, Kind.CONVOLUTION)
    computed_in = torch.float64 if convolution.dtype == torch.float64 else torch.float32
    geometry.set(Attribute.COMPUTE_TYPE, Type.DATA_TYPE, _DATA_TYPES[computed_in])
    geometry.set(Attribute.MODE, Type.CONVOLUTION_MODE, _CROSS_CORRELATION)
    geometry.set(Attribute.SPATIAL_DIMENSIONS, Type.INT64, len(convolution.stride))
    geometry.set(Attribute.DILATIONS, Type.INT64, *convolution.dilation)
    geometry.set(Attribute.STRIDES, Type.INT64, *convolution.stride)
    geometry.set(Attribute.PRE_PADDINGS, Type.INT64, *convolution.padding)
    geometry.set(Attribute.POST_PADDINGS, Type.INT64, *convolution.padding)
    return geometry.finalized()


def _configs(loaded: ctypes.CDLL, graph: Descriptor, device: Descriptor) -> Iterator[Descriptor]:
    for mode in (_INSTANT, _FALLBACK):
        heuristics = Descriptor(loaded, Kind.HEURISTICS)
        heuristics.set(Attribute.HEURISTICS_GRAPH, Type.DESCRIPTOR, graph)
        heuristics.set(Attribute.HEURISTICS_MODE, Type.HEURISTICS_MODE, mode)
        heuristics.set(Attribute.HEURISTICS_DEVICE, Type.DESCRIPTOR, device)
        yield from heuristics.finalized().children(Attribute.HEURISTICS_RESULTS, Kind.ENGINE_CONFIG)


def _is_refused(engine: Descriptor, dtype: torch.dtype, settings: Settings) -> bool:
    """Whether torch's filter drops suggestions of this engine."""
    notes = engine.numbers(Attribute.ENGINE_NOTES, Type.NUMERICAL_NOTE, at_most=16)
    if settings.deterministic and _NONDETERMINISTIC in notes:
        return True
    if _DOWN_CONVERTS in notes:
        return True
    return dtype == torch.float32 and not settings.allow_tf32 and _TENSOR_CORE in notes


def _workspace_of(loaded: ctypes.CDLL, config: Descriptor, device: Descriptor) -> int | None:
    plan = Descriptor(loaded, Kind.PLAN)
    plan.set(Attribute.PLAN_CONFIG, Type.DESCRIPTOR, config)
    plan.set(Attribute.PLAN_DEVICE, Type.DESCRIPTOR, device)
    try:
        (workspace,) = plan.finalized().numbers(Attribute.PLAN_WORKSPACE, Type.INT64)
    except CudnnError:
        return None  # torch tries the next suggestion
    return workspace
