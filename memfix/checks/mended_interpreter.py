"""Patches of Triton's interpreter: it runs with numpy 2.4 and later, and rounds to bfloat16 as a GPU does.

Up to Triton 3.6 the interpreter reads the bound of a loop by ``int(array)`` from an array of one element, which numpy
2.4 refuses. And it cuts the lower half of a float32 off where a GPU rounds it to the nearest bfloat16.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any


@functools.cache
def mend() -> None:
    """For a process that interprets kernels, before the first one. A Triton that has no such place stays as it is."""
    from triton.runtime import interpreter

    for repair in (_read_indices_by_item, _round_to_nearest_bfloat16):
        with contextlib.suppress(AttributeError):
            repair(interpreter)


def _read_indices_by_item(interpreter: Any) -> None:
    prepare = interpreter._patch_lang_tensor

    def prepared(tensor: Any, *scope: Any) -> None:
        prepare(tensor, *scope)
        if "__index__" in vars(tensor):
            tensor.__index__ = _index

    interpreter._patch_lang_tensor = prepared


def _index(tensor: Any) -> int:
    return int(tensor.handle.data.item())


def _round_to_nearest_bfloat16(interpreter: Any) -> None:
    import numpy as np
    import triton.language as tl

    convert = interpreter._convert_float

    def converted(values: Any, given: Any, wanted: Any, rounding: Any) -> Any:
        if rounding is None and (given, wanted) == (tl.float32, tl.bfloat16):
            return _nearest_bfloat16(values)
        if rounding is None and (given, wanted) == (tl.bfloat16, tl.float32):
            return values.astype(np.uint32) << 16
        return convert(values, given, wanted, rounding)

    interpreter._convert_float = converted


def _nearest_bfloat16(values: Any) -> Any:
    """The upper half of every float32, rounded to the nearest even."""
    import numpy as np

    bits = values.view(np.uint32)
    nearest = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(values == values, nearest, _NAN).astype(np.uint16)


_NAN = 0x7FC0
