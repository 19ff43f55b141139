"""A world in which user code believes in the GPU: answers to ``torch.cuda``, and paths taken as on CUDA.

Everything is put back on leaving, whatever happened inside.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from . import fake_device
from .composite import native_on_cuda_only
from .gpus import GPU
from .tracking import StorageTracker


class _NoDeviceFakeMode(FakeTensorMode):
    """Never touches a device, even where one exists."""

    @property
    def avoid_device_init(self) -> bool:
        return True


@contextlib.contextmanager
def simulated_gpu(gpu: GPU) -> Iterator[StorageTracker]:
    """Inside, ``device="cuda"`` is ``gpu``, no memory is taken, and the tracker yielded knows every byte."""
    fake_device.install()
    tracker = StorageTracker(gpu)
    fake_mode = _NoDeviceFakeMode(allow_non_fake_inputs=True)  # loads torch modules, which must see torch as it is
    with contextlib.ExitStack() as stack:
        for owner, name, value in _answers(gpu, tracker):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        # deaths must come in program order: no second thread in backward, no cycle collector in between
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(_only_our_own_cycles())
        stack.enter_context(tracker.engine.installed())
        stack.enter_context(fake_mode)
        stack.enter_context(tracker)
        stack.enter_context(_paths_as_on_cuda())
        yield tracker


@contextlib.contextmanager
def _only_our_own_cycles() -> Iterator[None]:
    """No automatic collection, and an asked-for one looks only at what is made from here on, not at all of torch."""
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def _answers(gpu: GPU, tracker: StorageTracker) -> list[tuple[Any, str, Any]]:
    """What ``torch.cuda`` says in there, and one method that does not pass the dispatcher."""
    cuda = torch.cuda
    requested = tracker.ledger.requested

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def always(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = real_resize(storage, size)
        tracker.resized(storage)
        return result

    real_resize = torch.UntypedStorage.resize_
    silent = (
        "synchronize",
        "empty_cache",
        "init",
        "_lazy_init",
        "set_device",
        "manual_seed",
        "manual_seed_all",
    )
    return [
        (fake_tensor, "init_gpu_context", nothing),
        *((cuda, name, nothing) for name in silent),
        (cuda, "is_available", always(True)),
        (cuda, "device_count", always(1)),
        (cuda, "current_device", always(0)),
        (cuda, "get_device_capability", always(gpu.capability)),
        (cuda, "get_device_name", always(f"NVIDIA {gpu.name} (simulated)")),
        (cuda, "is_bf16_supported", always(gpu.capability >= (8, 0))),
        (cuda, "is_current_stream_capturing", always(False)),
        (cuda, "mem_get_info", lambda *a, **k: (gpu.memory_bytes - requested.live, gpu.memory_bytes)),
        (cuda, "memory_allocated", lambda *a, **k: tracker.ledger.allocated.live),
        (cuda, "max_memory_allocated", lambda *a, **k: tracker.ledger.allocated.peak),
        (torch.UntypedStorage, "resize_", resize_),
    ]


@contextlib.contextmanager
def _paths_as_on_cuda() -> Iterator[None]:
    """Operators that choose another path for fake tensors, or on a build without CUDA, take CUDA's."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch announces every overridden kernel
            for key in ("CUDA", "AutogradCUDA"):
                library.impl("one_hot", _one_hot_as_on_cuda, key, allow_override=True)  # a nested one overrides ours
            for name in native_on_cuda_only():
                library.impl(name.removeprefix("aten::"), _only_for_dispatch, "CUDA", allow_override=True)
        yield
    finally:
        library._destroy()


def _one_hot_as_on_cuda(ids: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """For a fake tensor torch compares with every class instead, which takes other temporaries."""
    if num_classes == -1:
        num_classes = int(ids.max().item()) + 1
    one_hot = ids.new_zeros((*ids.shape, num_classes))
    return one_hot.scatter_(-1, ids.unsqueeze(-1), 1)


def _only_for_dispatch(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("registered so that torch does not decompose the operator; fake tensors never run it")
