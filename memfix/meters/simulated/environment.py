"""Sets up the simulated GPU: enters all modes and patches in order, and undoes them on exit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..garbage import only_our_own_cycles
from . import (
    attention,
    dispatcher_overrides,
    fake_device,
    hide_dispatch_modes,
    interchange,
    memory_access,
    optimizers,
    python_patches,
    threads,
    torch_cuda_rest,
    torch_cuda_stubs,
)
from .assumptions import SCENARIOS, Scenario
from .compiled import Compiler
from .decisions import Decision
from .fake_result_cache import FakeResultCache
from .gpus import GPU
from .lazy_parameters import shaped_on_gpu
from .memory_guard import guard
from .patches import Patch, Patches, applied
from .prebuilt import weights_restored
from .torch_imports import torch_imported_unpatched
from .tracking import StorageTracker

_OTHER_MODE = "another dispatch mode is active in the step, and what it keeps is not known"


class _NoDeviceFakeMode(FakeTensorMode):
    """A FakeTensorMode that never touches a device, even if there is one."""

    @property
    def avoid_device_init(self) -> bool:
        return True

    def __deepcopy__(self, memo: object) -> _NoDeviceFakeMode:
        """Return itself: ``copy.deepcopy(model)`` copies its tensors' attributes, and their mode is among them."""
        return self


@contextlib.contextmanager
def simulated_gpu(
    gpu: GPU,
    *,
    hides_modes: bool,
    scenario: Scenario = "usual",
    runs_eager: str | None = None,
    assume: Mapping[str, Decision] | None = None,
) -> Iterator[StorageTracker]:
    """Inside, ``device="cuda"`` means ``gpu``, no memory is taken, and the yielded tracker counts every byte.

    With ``hides_modes``, which requires a passed self-test, libtorch takes the paths that it takes without a dispatch
    mode (``hide_dispatch_modes``). ``scenario`` chooses the answers for unknown values (``assumptions``).
    ``runs_eager`` is a reason to run regions under ``torch.compile`` eagerly. ``assume`` has the user's values.
    """
    fake_device.install()
    num_outer_modes = torch._C._len_torch_dispatch_stack()
    fake_mode = _NoDeviceFakeMode(allow_non_fake_inputs=True)
    guard(fake_mode)
    # while the tracker handles an operator it is off the stack, and FakeTensorMode is the innermost mode
    cache = FakeResultCache(fake_mode, num_modes=num_outer_modes + 1, hides_modes=hides_modes)
    tracker = StorageTracker(gpu, cache, scenario, assume or {})
    modes = (fake_mode, tracker)  # the last is innermost, and sees an operator first

    patches = Patches(_patches(tracker))
    added = [(torch._C, "_cuda_clearCublasWorkspaces", tracker.cublas.give_back), *torch_cuda_rest.of_torch_c()]
    hidden_from_compilers = Patches(python_patches.hidden_from_compilers(tracker))
    compiler = Compiler(tracker, hidden_from_compilers, runs_eager)
    contexts: list[contextlib.AbstractContextManager[object]] = [
        torch_imported_unpatched(),
        # storages must be freed in program order, so backward runs on this thread and automatic collections are off
        torch.autograd.set_multithreading_enabled(False),
        only_our_own_cycles(),
        # values are drawn on the CPU; the caller's generator is restored on exit
        _own_random_numbers(SCENARIOS.index(scenario)),
        # before weights_restored, which is to see buffers without a shape as they are
        shaped_on_gpu(),
        weights_restored(),
        # after FakeTensorMode is built, which imports modules of torch that must not be patched yet
        patches,
        applied(added, adds=True),
        hidden_from_compilers,
        compiler.installed(),
        tracker.engine.installed(),
        tracker.phase.installed(),
        tracker.decisions.installed(),
        # after only_our_own_cycles: on exit, this visits every object that Python's collector tracks
        *([_hidden_modes(tracker, compiler, num_outer_modes + len(modes))] if hides_modes else []),
        dispatcher_overrides.registered(gpu, tracker.notes),
        # last, so that no operator of the setup is counted
        *modes,
    ]
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield tracker


def _patches(tracker: StorageTracker) -> list[Patch]:
    return [
        *torch_cuda_stubs.patches(tracker),
        *python_patches.patches(tracker),
        *memory_access.patches(tracker),
        *interchange.patches(),
        *optimizers.patches(tracker),
        *attention.patches(tracker.gpu),
        *threads.patches(tracker),
    ]


def _hidden_modes(
    tracker: StorageTracker, compiler: Compiler, num_modes: int
) -> contextlib.AbstractContextManager[object]:
    note = partial(tracker.note, _OTHER_MODE)
    return hide_dispatch_modes.installed(num_modes, note, lambda: compiler.compilation.is_running)


@contextlib.contextmanager
def _own_random_numbers(number: int) -> Iterator[None]:
    """Inside, random numbers and user seeds depend on ``number``, so that each scenario draws other numbers."""
    seed = torch.random.manual_seed
    with torch.random.fork_rng(devices=[]), applied([(torch, "manual_seed", lambda value: seed(value + number))]):
        # torch.manual_seed would seed every other device too, and format the stack for each
        torch.default_generator.manual_seed(number)
        yield
