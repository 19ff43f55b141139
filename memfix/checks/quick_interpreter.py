"""Triton's interpreter without what it does over and over for nothing: a quarter of the time, the same answers.

It looks through the whole of ``triton.language`` at every call of a function of a kernel, works out whether sums of
integers overflow and then does not look at the answer, writes down the type of every shape, and works out anew how two
blocks go together. Nothing here is needed for a kernel to run; of a Triton in which these places are others, they stay
as they are.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any


def hurry() -> None:
    """For a process that interprets kernels, at its start."""
    import triton.language as tl
    from triton.runtime import interpreter

    for shortcut in (
        _prepare_the_language_once,
        _leave_out_unread_checks,
        _look_up_dtypes_once,
        _find_types_of_shapes_when_asked,
        _describe_types_once,
        _describe_tensors_once,
        _match_types_that_are_one,
        _match_shapes_once,
    ):
        with contextlib.suppress(AttributeError):
            shortcut(interpreter, tl)


def _prepare_the_language_once(interpreter: Any, tl: Any) -> None:
    """For a kernel and all functions that it calls, and not again for each of them."""
    prepare: Any = interpreter._patch_lang
    whole_language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    num_kernels = 0

    def prepared(function: Any) -> Any:
        nonlocal num_kernels
        if num_kernels:
            return SimpleNamespace(restore=lambda: None)
        scope = prepare(whole_language)
        num_kernels += 1

        def restore() -> None:
            nonlocal num_kernels
            num_kernels -= 1
            scope.restore()

        return SimpleNamespace(restore=restore)

    interpreter._patch_lang = prepared


def _leave_out_unread_checks(interpreter: Any, tl: Any) -> None:
    """An overflow is asserted on only in a debugger's run."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _look_up_dtypes_once(interpreter: Any, tl: Any) -> None:
    look_up: Any = interpreter._get_np_dtype
    known: dict[Any, Any] = {}

    def looked_up(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if isinstance(scalar, tl.pointer_type):
            return look_up(dtype)
        if scalar not in known:
            known[scalar] = look_up(dtype)
        return known[scalar]

    interpreter._get_np_dtype = looked_up


def _find_types_of_shapes_when_asked(interpreter: Any, tl: Any) -> None:
    tuple_of_values: Any = tl.core.tuple
    write_down, type_of = tuple_of_values.__init__, tl.core._type_for_tuple_values

    class Asked:
        """Is looked at only where a tuple has no type of its own yet."""

        def __get__(self, values: Any, owner: Any = None) -> Any:
            if values is None:
                return self
            found = vars(values)["type"] = type_of(values.values)
            return found

    def only_values(self: Any, args: Any, type: Any = None) -> None:
        if type is None:
            self.values = list(args)
        else:
            write_down(self, args, type)

    tuple_of_values.__init__, tuple_of_values.type = only_values, Asked()


def _describe_types_once(interpreter: Any, tl: Any) -> None:
    """What a type of blocks has besides its name follows from that of its elements and the shape."""
    block_type: Any = tl.core.block_type
    describe = block_type.__init__
    known: dict[Any, dict[str, Any]] = {}

    def described(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape)
        if isinstance(element_ty, tl.pointer_type) or not all(type(size) is int for size in sizes):
            describe(self, element_ty, shape)
            return
        key = (element_ty, sizes)
        if key not in known:
            describe(self, element_ty, shape)
            known[key] = vars(self).copy()
        vars(self).update(known[key])

    block_type.__init__ = described


def _describe_tensors_once(interpreter: Any, tl: Any) -> None:
    """What a tensor has besides its values follows from its type."""
    tensor: Any = tl.core.tensor
    describe = tensor.__init__
    known: dict[str, dict[str, Any]] = {}

    def described(self: Any, handle: Any, type: Any) -> None:
        if not type.is_block():
            describe(self, handle, type)
            return
        if type.name not in known:
            describe(self, handle, type)
            known[type.name] = vars(self).copy()
        vars(self).update(known[type.name], handle=handle, type=type)

    tensor.__init__ = described


def _match_types_that_are_one(interpreter: Any, tl: Any) -> None:
    """Two tensors of one dtype stay what they are, but for 16-bit ones that are divided."""
    semantic: Any = interpreter.TritonSemantic
    match, tensor = semantic.binary_op_type_checking_impl, tl.core.tensor

    def matched(self: Any, lhs: Any, rhs: Any, *how: bool, **named: bool) -> Any:
        divides = len(how) == _NUM_FLAGS and how[-1]
        if type(lhs) is tensor and type(rhs) is tensor and not divides and not named:
            dtype = lhs.dtype
            if dtype == rhs.dtype and not dtype.is_ptr():
                return self.broadcast_impl_value(lhs, rhs)
        return match(self, lhs, rhs, *how, **named)

    semantic.binary_op_type_checking_impl = matched


_NUM_FLAGS = 4  # may the left be a pointer, and the right; are dtypes to be matched; are they divided


def _match_shapes_once(interpreter: Any, tl: Any) -> None:
    semantic: Any = interpreter.TritonSemantic
    match, block_type = semantic.broadcast_impl_value, tl.core.block_type
    known: dict[Any, list[int]] = {}

    def matched(self: Any, lhs: Any, rhs: Any) -> Any:
        if not (lhs.type.is_block() and rhs.type.is_block()):
            return match(self, lhs, rhs)
        shapes = (lhs.handle.data.shape, rhs.handle.data.shape)
        if shapes[0] == shapes[1]:
            return lhs, rhs
        if shapes not in known:
            left, _ = both = match(self, lhs, rhs)
            known[shapes] = [*left.handle.data.shape]
            return both
        shape = known[shapes]

        def widened(one: Any) -> Any:
            if [*one.handle.data.shape] == shape:
                return one
            return self.tensor(self.builder.create_broadcast(one.handle, shape), block_type(one.type.scalar, shape))

        return widened(lhs), widened(rhs)

    semantic.broadcast_impl_value = matched
