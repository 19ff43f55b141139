"""Cache what the interpreter does for an operator of a kernel, by the types of the arguments.

At every ``a + b`` Triton's interpreter promotes dtypes, makes a tensor of a number, broadcasts shapes and describes the
result. All of that follows from the types, so it is done once and kept as a recipe: one call of numpy, and the
attributes of the result. A recipe is kept only if it gives the interpreter's result bit by bit, also for a probe that
shows how the interpreter converts a number, in which versions of Triton differ. Operators have recipes only where
numpy's rules equal Triton's: arithmetic in bfloat16, in unsigned integers, and between integers and floats is left to
the interpreter.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any

Operator = Callable[..., Any]
Arrays = Callable[..., Any]
"""A function from the arguments of an operator to the array of its result."""
Arguments = tuple[Any, ...]

_FLOATS, _INTEGERS = ("fp16", "fp32", "fp64"), ("int32", "int64")
_NUMBERS = (*_FLOATS, *_INTEGERS)
_COMPARES = {
    "__lt__": "less", "__le__": "less_equal", "__gt__": "greater", "__ge__": "greater_equal", "__eq__": "equal",
    "__ne__": "not_equal",
}  # fmt: skip
_LOGIC = {"__and__": "bitwise_and", "__or__": "bitwise_or"}
_OF_FLOATS = {"__truediv__": "divide"}
_OF_INTEGERS = {"__mod__": "fmod"}
_BINARY = {
    "__add__": "add", "__radd__": "add", "__sub__": "subtract", "__mul__": "multiply", "__rmul__": "multiply",
    **_COMPARES, **_LOGIC, **_OF_FLOATS, **_OF_INTEGERS,
}  # fmt: skip
_ALL = slice(None)


class LearnedOperators:
    """Makes operators that learn their recipes from the interpreter's own."""

    def __init__(self, interpreter: Any, tl: Any) -> None:
        self._tensor, self._constexpr = tl.core.tensor, tl.core.constexpr
        self._handle, self._semantic = interpreter.TensorHandle, interpreter.interpreter_semantic

    def of_tensors(self, name: str, interpreted: Operator) -> Operator:
        """Return the tensor operator ``name``. The interpreter's own is ``interpreted``."""
        if name in _BINARY:
            binary = functools.partial(self._binary, name)
            return self._learned(interpreted, self._key_of_two, binary, self._with_the_number)
        if name == "__getitem__":
            return self._learned(interpreted, self._key_of_index, self._indexed)
        return self._learned(interpreted, self._key_of_cast, self._cast) if name == "to" else interpreted

    def of_language(self, name: str, interpreted: Operator) -> Operator:
        """Return the function ``name`` of the language. The interpreter's own is ``interpreted``."""
        if name == "where":
            return self._learned(interpreted, self._key_of_three, self._chosen, self._with_the_other_side)
        if name == "load":
            return self._learned(interpreted, self._key_of_load, self._loaded, self._with_nothing_there)
        return interpreted

    def _learned(
        self,
        interpreted: Operator,
        key_of: Callable[..., Hashable],
        arrays_of: Callable[..., Arrays | None],
        probe_of: Callable[..., Arguments] | None = None,
    ) -> Operator:
        """Return an operator that uses recipes where it has them. ``probe_of`` makes arguments of the same types whose
        result shows how the interpreter converts a number."""
        recipes: dict[Hashable, Operator | None] = {}

        def found(result: Any, *args: Any, **named: Any) -> Operator | None:
            arrays = arrays_of(*args, **named)
            if arrays is None or not _are_alike(arrays(*args, **named), result.handle.data):
                return None
            probe = () if probe_of is None else probe_of(*args, **named)
            if probe and not _are_alike(arrays(*probe), interpreted(*probe).handle.data):
                return None
            return self._recipe(arrays, result)

        def operator(*args: Any, **named: Any) -> Any:
            key = key_of(*args, **named)
            recipe = recipes.get(key)
            if recipe is not None:
                return recipe(*args, **named)
            result = interpreted(*args, **named)
            if key is not None and key not in recipes:
                recipes[key] = None
                with contextlib.suppress(Exception):  # another version of Triton may have no such function
                    recipes[key] = found(result, *args, **named)
            return result

        return operator

    def _recipe(self, arrays: Any, like: Any) -> Operator:
        """Return a recipe: it makes tensors with the data of ``arrays`` and all other attributes of ``like``."""
        new, tensor, handle = object.__new__, self._tensor, self._handle
        attributes, dtype = vars(like), like.handle.dtype

        def recipe(*args: Any, **named: Any) -> Any:
            made = new(tensor)
            made.__dict__ = {**attributes, "handle": handle(arrays(*args, **named), dtype)}
            return made

        return recipe

    # ---------------------------------------------------------------- probes
    def _with_the_number(self, one: Any, other: Any) -> Arguments:
        """Return arguments with a tensor full of the number that it is combined with."""
        import numpy as np

        if type(other) is self._tensor:
            return ()
        return self._like(one, np.full_like(one.handle.data, getattr(other, "value", other))), other

    def _with_the_other_side(self, condition: Any, x: Any, y: Any) -> Arguments:
        """Return arguments with the opposite condition, so that the other operand is taken."""
        return self._like(condition, ~condition.handle.data), x, y

    def _with_nothing_there(self, pointer: Any, mask: Any, other: Any = None) -> Arguments:
        """Return arguments with a mask that is False everywhere, so that only ``other`` is loaded."""
        return pointer, self._like(mask, mask.handle.data & False), other

    def _like(self, one: Any, data: Any) -> Any:
        return self._recipe(lambda: data, one)()

    # ---------------------------------------------------------------- keys
    def _key(self, value: Any) -> Hashable:
        """Return a tensor's types, or a number itself; None for anything else."""
        kind = type(value)
        if kind is self._tensor:
            return value.type.name, value.handle.dtype.name
        if kind is self._constexpr:
            value = value.value
            kind = type(value)
        return (kind, value) if kind is int or kind is float else None

    def _key_of_two(self, one: Any, other: Any) -> Hashable:
        theirs = self._key(other)
        return None if theirs is None else (one.type.name, one.handle.dtype.name, theirs)

    def _key_of_three(self, condition: Any, x: Any, y: Any) -> Hashable:
        key = self._key(condition), self._key(x), self._key(y)
        return None if None in key else key

    def _key_of_index(self, one: Any, index: Any) -> Hashable:
        if type(index) is not tuple or not all(part is None or part == _ALL for part in index):
            return None
        return (one.type.name, one.handle.dtype.name, *(part is None for part in index))

    def _key_of_cast(self, one: Any, dtype: Any, *how: Any, **named: Any) -> Hashable:
        return None if how or named else (one.type.name, one.handle.dtype.name, getattr(dtype, "name", None))

    def _key_of_load(self, pointer: Any, mask: Any = None, other: Any = None, **how: Any) -> Hashable:
        return None if how or mask is None else (self._key(pointer), self._key(mask), self._key(other), other is None)

    # ---------------------------------------------------------------- arrays
    def _binary(self, name: str, one: Any, other: Any) -> Arrays | None:
        import numpy as np

        compute, dtype = getattr(np, _BINARY[name]), one.dtype
        if type(other) is not self._tensor:
            constant = self._constant(name, dtype, other)
            return None if constant is None else lambda one, other: compute(one.handle.data, constant)
        if dtype.is_ptr():
            if name != "__add__" or other.dtype.name not in _INTEGERS:
                return None
            width = max(1, dtype.element_ty.primitive_bitwidth // 8)
            return lambda one, other: one.handle.data + width * other.handle.data.astype(np.uint64)
        if not any(dtype.name in kind and other.dtype.name in kind for kind in _kinds_of(name)):
            return None
        return lambda one, other: compute(one.handle.data, other.handle.data)

    def _constant(self, name: str, dtype: Any, number: Any) -> Any:
        """Return a number as an array of the other operand's dtype; None where the interpreter computes in another."""
        semantic, number = self._semantic, getattr(number, "value", number)
        as_tensor = semantic.to_tensor(number)
        if not any(dtype.name in kind for kind in _kinds_of(name)) or as_tensor.dtype.name not in _NUMBERS:
            return None
        compares, divides = name in _COMPARES, name in _OF_FLOATS or name in _OF_INTEGERS
        # in a comparison a number is promoted like a tensor
        if semantic.computation_type_impl(dtype, False, as_tensor.dtype, not compares, divides) != dtype:
            return None
        return (semantic.cast(as_tensor, dtype) if compares else semantic.scalar_constant(number, dtype)).handle.data

    def _indexed(self, one: Any, index: Any) -> Arrays | None:
        """``x[:, None]`` and the like."""
        return (lambda one, index: one.handle.data[index]) if one.type.is_block() else None

    def _cast(self, one: Any, dtype: Any) -> Arrays | None:
        if one.dtype.name == dtype.name:
            return lambda one, dtype: one.handle.data
        if one.dtype.name not in _NUMBERS or dtype.name not in _NUMBERS:
            return None
        kind = self._semantic.cast(one, dtype).handle.data.dtype
        return lambda one, dtype: one.handle.data.astype(kind)

    def _chosen(self, condition: Any, x: Any, y: Any) -> Arrays | None:
        import numpy as np

        both = [value for value in (x, y) if type(value) is self._tensor]
        names = {value.dtype.name for value in both}
        if type(condition) is not self._tensor or condition.dtype.name != "int1" or len(names) != 1:
            return None
        if len(both) == 2:
            return lambda condition, x, y: np.where(condition.handle.data, x.handle.data, y.handle.data)
        number = y if both[0] is x else x
        constant = self._constant("__add__", both[0].dtype, number)
        if constant is None:
            return None
        if both[0] is x:
            return lambda condition, x, y: np.where(condition.handle.data, x.handle.data, constant)
        return lambda condition, x, y: np.where(condition.handle.data, constant, y.handle.data)

    def _loaded(self, pointer: Any, mask: Any, other: Any = None) -> Arrays | None:
        import numpy as np

        handle, semantic = self._handle, self._semantic
        if type(mask) is not self._tensor or mask.dtype.name != "int1" or type(other) is self._tensor:
            return None
        if not pointer.type.is_block() or pointer.dtype.element_ty.name == "int1":
            return None
        shape, filled, load = pointer.handle.data.shape, None, semantic.builder.create_masked_load
        _, _, _, *policies, _ = inspect.signature(load).parameters  # two, or from Triton 3.9 one
        how = (*(None for _ in policies), False)
        if other is not None:
            number = semantic.cast(semantic.to_tensor(other), pointer.dtype.element_ty).handle
            filled = handle(np.full(shape, number.data), number.dtype)

        def load_again(pointer: Any, mask: Any, other: Any = None) -> Any:
            wide = handle(np.broadcast_to(mask.handle.data, shape), mask.handle.dtype)
            return load(pointer.handle, wide, filled, *how).data

        return load_again


def _kinds_of(name: str) -> tuple[tuple[str, ...], ...]:
    """Return the groups of dtypes that an operator may mix by numpy's rules."""
    if name in _LOGIC:
        return (("int1",),)
    return (_FLOATS,) if name in _OF_FLOATS else (_INTEGERS,) if name in _OF_INTEGERS else (_FLOATS, _INTEGERS)


def _are_alike(ours: Any, theirs: Any) -> bool:
    if ours is None:
        return False
    return (ours.dtype, ours.shape, ours.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())
