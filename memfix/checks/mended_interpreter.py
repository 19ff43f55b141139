"""A patch that lets Triton's interpreter run with numpy 2.4 and later.

Up to Triton 3.6 the interpreter reads the bound of a loop by ``int(array)`` from an array of one element, which numpy
2.4 refuses.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any


@functools.cache
def mend() -> None:
    """For a process that interprets kernels, before the first one. A Triton that has no such place stays as it is."""
    from triton.runtime import interpreter

    with contextlib.suppress(AttributeError):
        _read_indices_by_item(interpreter)


def _read_indices_by_item(interpreter: Any) -> None:
    prepare = interpreter._patch_lang_tensor

    def prepared(tensor: Any, *scope: Any) -> None:
        prepare(tensor, *scope)
        if "__index__" in vars(tensor):
            tensor.__index__ = _index

    interpreter._patch_lang_tensor = prepared


def _index(tensor: Any) -> int:
    return int(tensor.handle.data.item())
