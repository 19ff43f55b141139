"""Stubs for ``torch.cuda``: the simulated GPU's properties, and its memory statistics."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from . import streams, torch_cuda_rest
from .gpus import GPU
from .patches import Patch, always, nothing
from .tracking import StorageTracker


def patches(tracker: StorageTracker) -> list[Patch]:
    return [
        *_gpu_stubs(tracker.gpu), *_memory_stubs(tracker), *streams.patches(tracker.streams),
        *torch_cuda_rest.patches(),
    ]  # fmt: skip


def _gpu_stubs(gpu: GPU) -> list[Patch]:
    cuda = torch.cuda
    do_nothing = """synchronize empty_cache ipc_collect init _lazy_init set_device manual_seed
    manual_seed_all seed seed_all set_rng_state set_rng_state_all reset_accumulated_memory_stats""".split()
    return [
        (cuda.random, "_lazy_init", nothing),
        (cuda, "initial_seed", always(0)),
        *((cuda, name, nothing) for name in do_nothing),
        (cuda, "is_available", always(True)),
        (cuda, "is_initialized", always(True)),
        (cuda, "device_count", always(1)),
        (cuda, "current_device", always(0)),
        (cuda, "_exchange_device", always(0)),
        (cuda, "_maybe_exchange_device", always(0)),
        (cuda, "get_device_capability", always(gpu.capability)),
        (cuda, "get_device_name", always(f"NVIDIA {gpu.name} (simulated)")),
        (cuda, "get_device_properties", always(_Properties(gpu))),
        (cuda, "get_rng_state", lambda *a, **k: torch.zeros(16, dtype=torch.uint8)),
        (cuda, "is_bf16_supported", always(gpu.capability >= (8, 0))),
        (cuda, "is_tf32_supported", always(gpu.capability >= (8, 0))),
        (cuda, "is_current_stream_capturing", always(False)),
        *((module, "get_allocator_backend", always("simulated")) for module in (cuda, cuda.memory)),
        (torch, "Generator", _Generator),
        (cuda, "default_generators", (_Generator("cuda:0"),)),
        *((cuda.nvtx, name, nothing) for name in ("range_push", "range_pop", "range_start", "range_end", "mark")),
    ]


def _memory_stubs(tracker: StorageTracker) -> list[Patch]:
    """Stubs for the allocator's statistics, read from the ledger, and for ``resize_``, which is not dispatched."""
    cuda, ledger = torch.cuda, tracker.ledger
    total = tracker.gpu.memory_bytes
    real_resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = real_resize(storage, size)
        tracker.storages.resized(storage)
        tracker.values.resized(storage)
        return result

    def stats(*args: Any, **kwargs: Any) -> dict[str, int]:
        counts = {"requested": ledger.requested, **dict.fromkeys(("allocated", "active", "reserved"), ledger.allocated)}
        known = {
            f"{name}_bytes.all.{word}": getattr(count, field)
            for name, count in counts.items()
            for word, field in (("current", "live"), ("peak", "peak"))
        }
        return defaultdict(int, known)  # the others are counts, such as of retries

    stubs = {
        "memory_stats": stats,
        "memory_summary": always("simulated by memfix"),
        "mem_get_info": lambda *a, **k: (total - ledger.allocated.live, total),
        "memory_allocated": lambda *a, **k: ledger.allocated.live,
        "max_memory_allocated": lambda *a, **k: ledger.allocated.peak,
        "memory_reserved": lambda *a, **k: ledger.allocated.live,
        "max_memory_reserved": lambda *a, **k: ledger.allocated.peak,
        "device_memory_used": lambda *a, **k: ledger.allocated.live,
        "reset_peak_memory_stats": nothing,  # it would reset the peak that the meter reports
    }
    of_accelerator = {
        **{name: stubs[name] for name in _ALSO_OF_ACCELERATOR.split()},
        **dict.fromkeys(("empty_cache", "empty_host_cache", "reset_accumulated_memory_stats"), nothing),
        "get_memory_info": stubs["mem_get_info"],
    }
    accelerator: Any = torch.accelerator
    return [
        *((module, name, stub) for module in (cuda, cuda.memory) for name, stub in stubs.items()),
        *(
            (module, name, stub)
            for module in (accelerator, accelerator.memory)
            for name, stub in of_accelerator.items()
        ),
        (torch.UntypedStorage, "resize_", resize_),
    ]


_ALSO_OF_ACCELERATOR = """memory_stats memory_allocated max_memory_allocated memory_reserved max_memory_reserved
reset_peak_memory_stats"""


class _AnyGenerator(type(torch.Generator)):  # type: ignore[misc]
    """A metaclass by which real generators, made before the simulation, stay instances of ``torch.Generator``."""

    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, torch._C.Generator)


class _Generator(torch.Generator, metaclass=_AnyGenerator):
    """A generator that may claim the device ``cuda``. No numbers are drawn from it: fake tensors have no values."""

    _device: torch.device

    def __new__(cls, device: Any = "cpu") -> Any:
        made = super().__new__(cls, device="cpu")  # type: ignore[call-arg]
        made._device = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device

    def clone_state(self) -> _Generator:
        return _Generator(self._device)

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, state: torch.Generator) -> _Generator:
        return self


class _Properties:
    """The properties of ``torch.cuda.get_device_properties`` by which libraries choose kernels."""

    def __init__(self, gpu: GPU) -> None:
        self.name = f"NVIDIA {gpu.name} (simulated)"
        self.major, self.minor = gpu.capability
        self.multi_processor_count = gpu.multiprocessors
        self.max_threads_per_multi_processor = gpu.threads_per_multiprocessor
        self.total_memory = gpu.memory_bytes
        self.shared_memory_per_block_optin = gpu.shared_memory_bytes
        self.L2_cache_size = gpu.l2_bytes
        self.regs_per_multiprocessor = 65536
        self.warp_size = 32
        self.is_integrated = self.is_multi_gpu_board = 0
        self.gcnArchName = self.uuid = ""
