"""Patch Triton's interpreter to run with numpy 2.4 and later, and to compute in bfloat16 as a GPU does.

Up to Triton 3.6 the interpreter reads the bound of a loop by ``int(array)`` from an array of one element, which numpy
2.4 refuses. It treats bfloat16 as plain bits: it truncates a float32 where a GPU rounds to the nearest, adds and
multiplies the bits as integers, and has no bfloat16 constants, such as the 2 in ``2 * x``.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any


@functools.cache
def mend() -> None:
    """Apply all patches, before the first kernel is interpreted. A patch whose place this Triton lacks is skipped."""
    from triton.runtime import interpreter

    for repair in (
        _read_indices_by_item,
        _round_to_nearest_bfloat16,
        _make_bfloat16_constants,
        _compute_bfloat16_in_float32,
    ):
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


def _make_bfloat16_constants(interpreter: Any) -> None:
    import numpy as np
    import triton.language as tl

    builder = interpreter.InterpreterBuilder

    def constant(self: Any, value: float) -> Any:
        return interpreter.TensorHandle(_nearest_bfloat16(np.array([value], dtype=np.float32)), tl.bfloat16)

    if not hasattr(builder, "get_bf16"):
        builder.get_bf16 = constant


def _compute_bfloat16_in_float32(interpreter: Any) -> None:
    """Widen bfloat16 operands and round the result, as a GPU does; a comparison's result stays as it is."""
    import numpy as np
    import triton.language as tl

    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return handle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def in_float32(compute: Any) -> Any:
        def computed(self: Any, *args: Any) -> Any:
            if not any(isinstance(arg, handle) and arg.dtype.scalar == tl.bfloat16 for arg in args):
                return compute(self, *args)
            result = compute(self, *(widened(arg) if isinstance(arg, handle) else arg for arg in args))
            if result.dtype.scalar != tl.float32 or compute is dot:
                return result
            is_number = result.data.dtype == np.float32
            return handle(_nearest_bfloat16(result.data) if is_number else result.data, tl.bfloat16)

        return computed

    dot = builder.create_dot  # its result has the dtype of what it is added to
    for name in ("unary_op", "binary_op", "ternary_op", "create_fma", "create_dot"):
        setattr(builder, name, in_float32(getattr(builder, name)))


def _nearest_bfloat16(values: Any) -> Any:
    """Round every float32 to the nearest bfloat16, ties to even, and return the bits."""
    import numpy as np

    bits = values.view(np.uint32)
    nearest = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(values == values, nearest, _NAN).astype(np.uint16)


_NAN = 0x7FC0
