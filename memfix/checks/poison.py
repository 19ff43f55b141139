"""Fill uninitialised memory with NaN, or the largest integer, so that reading it shows. It is often zero by luck."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..meters.simulated.patches import Patch, always, applied


@contextlib.contextmanager
def poisoned_memory(device: str) -> Iterator[None]:
    """Fill every new uninitialised tensor inside the ``with`` block.

    On the CPU torch's deterministic mode does so, and changes algorithms in their order only; code that queries the
    mode gets its former state. On a GPU that mode would choose other algorithms, so a dispatch mode fills new tensors,
    which takes as long as a small form.
    """
    if torch.device(device).type != "cpu":
        with _Poison():
            yield
        return
    was_on, only_warned = torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()
    was_filled = torch._C._get_deterministic_fill_uninitialized_memory()
    as_before: list[Patch] = [
        (torch._C, "_get_deterministic_algorithms", always(was_on)),
        (torch._C, "_get_deterministic_algorithms_warn_only", always(only_warned)),
    ]
    with applied(as_before), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
        torch._C._set_deterministic_algorithms(True, warn_only=True)
        torch._C._set_deterministic_fill_uninitialized_memory(True)
        try:
            yield
        finally:
            torch._C._set_deterministic_algorithms(was_on, warn_only=only_warned)
            torch._C._set_deterministic_fill_uninitialized_memory(was_filled)


class _Poison(TorchDispatchMode):
    _FRESH = frozenset(["empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            func.overloadpacket.__name__ in self._FRESH
            and isinstance(result, torch.Tensor)
            and result.dtype != torch.bool
        ):
            floating = result.is_floating_point() or result.is_complex()
            result.fill_(float("nan") if floating else torch.iinfo(result.dtype).max)
        return result
