"""Removes what compiling for the simulated GPU leaves in the process: compiled frames, caches, generated code."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any
from unittest import mock

from ..source_lines import GENERATED_CODE

_KNOW_THE_DEVICE = tuple(
    """torch._dynamo.device_interface torch._inductor.codecache torch._inductor.codegen.cuda.cuda_env
    torch._inductor.comm_analysis torch._inductor.decomposition torch._inductor.fx_passes.pad_mm
    torch._inductor.kernel.mm torch._inductor.runtime.caching.context torch._inductor.runtime.hints
    torch._inductor.scheduler torch._inductor.utils torch.utils._triton""".split()
)
"""Modules with cached functions that query the device."""
_HAVE_SIDE_EFFECTS = ("init", "register", "warn", "pool")
"""Words in the names of cached functions that must not run again: they register patterns, warn or start processes."""


@contextlib.contextmanager
def separate() -> Iterator[str]:
    """Inside, compilers have caches of their own. Yields a folder for generated code, which is deleted on exit."""
    from torch._dynamo import device_interface, pgo

    workers = (device_interface.caching_worker_current_devices, device_interface.caching_worker_device_properties)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=GENERATED_CODE))
        stack.callback(_forget_generated_code, folder)
        for devices in workers:
            stack.enter_context(mock.patch.dict(devices, clear=True))
        # profiles of earlier calls would decide which sizes are dynamic
        for name in ("_CODE_STATE", "_INIT_CODE_STATE"):
            stack.enter_context(mock.patch.object(pgo, name, None))
        _clear_caches()
        stack.callback(_clear_caches)
        yield folder


@contextlib.contextmanager
def cache_folder(folder: str) -> Iterator[None]:
    """Inside, Inductor writes its files below ``folder``."""
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        os.environ.pop("TRITON_CACHE_DIR", None)
        yield


def _clear_caches() -> None:
    """Clear the caches of functions in ``_KNOW_THE_DEVICE``, which may hold properties of another device."""
    for module in (sys.modules[name] for name in _KNOW_THE_DEVICE if name in sys.modules):
        own = [thing for thing in [*vars(module).values()] if getattr(thing, "__module__", None) == module.__name__]
        inner = [thing for kind in own if isinstance(kind, type) for thing in vars(kind).values()]
        for function in _cached(own + [getattr(thing, "__func__", thing) for thing in inner]):
            function.cache_clear()


def _cached(things: Iterable[Any]) -> Iterator[Any]:
    for thing in things:
        if isinstance(thing, functools._lru_cache_wrapper) and not any(
            word in thing.__name__ for word in _HAVE_SIDE_EFFECTS
        ):
            yield thing


def _forget_generated_code(folder: str) -> None:
    from torch._inductor.codecache import PyCodeCache

    def is_ours(module: Any) -> bool:
        return str(getattr(module, "__file__", None)).startswith(folder)

    PyCodeCache.modules[:] = [module for module in PyCodeCache.modules if not is_ours(module)]
    for table in (PyCodeCache.modules_no_attr, PyCodeCache.linemaps):
        for path in [path for path in table if path.startswith(folder)]:
            del table[path]
    for name in [name for name, module in [*sys.modules.items()] if is_ours(module)]:
        del sys.modules[name]


class CompiledFrames:
    """The frames that Dynamo converted for the simulated GPU."""

    def __init__(self) -> None:
        self._states: dict[CodeType, dict[Any, Any]] = {}
        self._was_compiled: dict[CodeType, bool] = {}
        self._guards: list[Any] = []

    def state_of(self, code: CodeType) -> dict[Any, Any]:
        """Dynamo's ``frame_state`` of a frame, separate from the state of the user's own runs."""
        from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

        if code not in self._states:
            self._states[code] = {}
            self._was_compiled[code] = bool(_debug_get_cache_entry_list(code))
        return self._states[code]

    def add(self, converted: Any) -> None:
        guarded = getattr(converted, "guarded_code", None)
        if guarded is not None:
            self._guards.append(guarded.guard_manager)

    def forget(self) -> None:
        """Make Dynamo convert the frames anew. A frame that the user compiled before keeps the user's cache entries."""
        from torch._C._dynamo.eval_frame import reset_code
        from torch._dynamo.guards import DeletedGuardManagerWrapper

        for guards in self._guards:
            if guards.cache_entry is not None and guards.extra_state is not None:
                guards.extra_state.invalidate(guards.cache_entry, DeletedGuardManagerWrapper("it was simulated"))
        for code, was_compiled in self._was_compiled.items():
            if not was_compiled:
                reset_code(code)
        for table in (self._states, self._was_compiled, self._guards):
            table.clear()
