"""A world in which user code believes in the GPU: what torch answers, and the paths that operators take.

Everything is put back on leaving, whatever happened inside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..garbage import only_our_own_cycles
from . import fake_device, hide_dispatch_modes
from .dispatcher_overrides import paths_as_on_cuda
from .fake_result_cache import KnownResults
from .gpus import GPU
from .patches import applied
from .python_patches import detours
from .torch_cuda_stubs import about_memory, about_the_gpu
from .tracking import StorageTracker


class _NoDeviceFakeMode(FakeTensorMode):
    """Never touches a device, even where one exists."""

    @property
    def avoid_device_init(self) -> bool:
        return True


@contextlib.contextmanager
def simulated_gpu(gpu: GPU, *, plain_path: bool) -> Iterator[StorageTracker]:
    """Inside, ``device="cuda"`` is ``gpu``, no memory is taken, and the tracker yielded knows every byte.

    ``plain_path``: libtorch runs its formulas as without a mode; only where the self-test found that it can.
    """
    fake_device.install()
    tracker = StorageTracker(gpu, plain_path=plain_path)
    fake_mode = _NoDeviceFakeMode(allow_non_fake_inputs=True)  # loads torch modules, which must see torch as it is
    with contextlib.ExitStack() as stack:
        stack.enter_context(applied([*about_the_gpu(gpu), *about_memory(tracker), *detours(tracker)]))
        # deaths must come in program order: no second thread in backward, no cycle collector in between
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(only_our_own_cycles())
        stack.enter_context(tracker.engine.installed())
        stack.enter_context(tracker.watching_optimizers())
        if plain_path:
            stack.enter_context(
                hide_dispatch_modes.installed(
                    torch._C._len_torch_dispatch_stack() + 2,
                    lambda: tracker.note("another dispatch mode is active in the step, and what it keeps is not known"),
                )
            )
        stack.enter_context(fake_mode)
        tracker.known = KnownResults(fake_mode)
        stack.enter_context(tracker)
        stack.enter_context(paths_as_on_cuda(tracker))
        yield tracker
