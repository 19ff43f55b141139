"""Patch Triton's interpreter to skip repeated and unused work: a quarter of the time, the same answers.

At every call of a kernel's function the interpreter patches the whole of ``triton.language``. It computes integer
overflows that nothing reads, records the type of every shape, and works out each time how two blocks broadcast. A
kernel runs without these patches too, so a patch whose place another version of Triton lacks is skipped.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from .learned_operators import LearnedOperators


def hurry() -> None:
    """Apply all patches, at the start of a process that interprets kernels."""
    import triton.language as tl
    from triton.runtime import interpreter

    for shortcut in (
        _prepare_the_language_once,
        _call_the_language_directly,
        _trust_widths,
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
    """Patch the language once for the whole process, where Triton patches it again for each kernel."""
    prepare: Any = interpreter._patch_lang
    whole_language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    for_good = functools.cache(lambda: prepare(whole_language))

    def prepared(function: Any) -> Any:
        for_good()
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = prepared


def _call_the_language_directly(interpreter: Any, tl: Any) -> None:
    """Call functions of the language without copying the keywords and without the check before each of them, and learn
    the operators of tensors."""
    learned = LearnedOperators(interpreter, tl)

    def call_directly(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = interpreter.TritonSemantic(builder)
        member = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        learning = {tl.core.tensor: learned.of_tensors, tl: learned.of_language, tl.core: learned.of_language}.get(obj)
        scope.set_attr(obj, name, learning(name, call) if learning else call)

    interpreter._patch_attr  # noqa: B018 - where there is none, it stays as it is
    interpreter._patch_attr = call_directly


def _trust_widths(interpreter: Any, tl: Any) -> None:
    """Skip the check that no array is wider than its dtype: none ever is."""
    interpreter.TensorHandle.__post_init__  # noqa: B018 - as above
    interpreter.TensorHandle.__post_init__ = lambda self: None


def _leave_out_unread_checks(interpreter: Any, tl: Any) -> None:
    """Skip the computation of overflows, which only a run with debug assertions reads."""
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
        """Finds the type of a tuple that has none yet, when it is first read."""

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
    """Cache the attributes of a block type, which follow from its element type and its shape."""
    block_type: Any = tl.core.block_type
    describe = block_type.__init__
    known: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def described(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, tuple(shape))  # by name: Triton's own hash of a type is slow
        found = known.get(key)
        if found is not None:
            self.__dict__.update(found)
            return
        describe(self, element_ty, shape)
        if not isinstance(element_ty, tl.pointer_type) and all(type(size) is int for size in key[1]):
            known[key] = vars(self).copy()

    block_type.__init__ = described


def _describe_tensors_once(interpreter: Any, tl: Any) -> None:
    """Cache the attributes of a tensor other than its values, which follow from its type."""
    tensor: Any = tl.core.tensor
    describe = tensor.__init__
    known: dict[str, dict[str, Any]] = {}

    def described(self: Any, handle: Any, type: Any) -> None:
        found = known.get(type.name)
        if found is not None:
            self.__dict__.update(found, handle=handle, type=type)
            return
        describe(self, handle, type)
        if type.is_block():
            known[type.name] = vars(self).copy()

    tensor.__init__ = described


def _match_types_that_are_one(interpreter: Any, tl: Any) -> None:
    """Skip the promotion of two tensors that have the same dtype, unless they are divided."""
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


_NUM_FLAGS = 4  # whether left and right may be pointers, whether to promote dtypes, and whether it is a division


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
