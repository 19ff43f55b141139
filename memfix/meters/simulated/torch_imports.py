"""Imports modules of torch without the simulation's patches, even if a simulated step is the first to need them.

A module that is imported while patches are active would keep patched objects that it copies, for the rest of the
process. With such a module, Inductor allocated more in every later step.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from .patches import suspended


@contextlib.contextmanager
def torch_imported_unpatched() -> Iterator[None]:
    """Inside, a module of torch is imported without the patches and dispatch modes that are active."""
    with _disable_current_modes():
        pass  # its first use imports modules of torch
    finder: Any = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder:
    """An import finder that returns the specs of the finders after it, with loaders that suspend the patches."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith("torch."):
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            _load_unpatched(spec.loader)
        return spec


def _load_unpatched(loader: Any) -> None:
    load = loader.exec_module

    def load_unpatched(module: ModuleType) -> None:
        del loader.exec_module  # the loader outlives this import as the module's __loader__
        with suspended(), _disable_current_modes():
            load(module)

    loader.exec_module = load_unpatched
