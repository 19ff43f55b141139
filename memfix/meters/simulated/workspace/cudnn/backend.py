"""Descriptors of cuDNN's backend API, by ctypes. The numbers are those of ``cudnn_graph.h``."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import Any


class CudnnError(Exception):
    """A call of the library failed; the message names it and the library's reason."""


class Kind(IntEnum):
    """``cudnnBackendDescriptorType_t``"""

    CONVOLUTION = 1
    ENGINE = 2
    ENGINE_CONFIG = 3
    HEURISTICS = 4
    PLAN = 5
    FORWARD = 10
    WEIGHT_GRADIENT = 11
    DATA_GRADIENT = 12
    GRAPH = 15
    TENSOR = 17
    DEVICE = 38


class Attribute(IntEnum):
    """``cudnnBackendAttributeName_t``"""

    COMPUTE_TYPE = 100
    MODE = 101
    DILATIONS = 102
    STRIDES = 103
    POST_PADDINGS = 104
    PRE_PADDINGS = 105
    SPATIAL_DIMENSIONS = 106
    HEURISTICS_MODE = 200
    HEURISTICS_GRAPH = 201
    HEURISTICS_RESULTS = 202
    HEURISTICS_DEVICE = 204
    CONFIG_ENGINE = 300
    PLAN_CONFIG = 401
    PLAN_WORKSPACE = 402
    PLAN_DEVICE = 407
    GRAPH_OPERATIONS = 801
    TENSOR_ALIGNMENT = 900
    TENSOR_TYPE = 901
    TENSOR_SIZES = 902
    TENSOR_STRIDES = 903
    TENSOR_ID = 906
    ENGINE_NUMBER = 1301
    ENGINE_NOTES = 1303
    DEVICE_JSON = 2702


class Type(IntEnum):
    """``cudnnBackendAttributeType_t``"""

    DATA_TYPE = 1
    INT64 = 3
    FLOAT = 4
    DOUBLE = 5
    CONVOLUTION_MODE = 7
    HEURISTICS_MODE = 8
    NUMERICAL_NOTE = 11
    DESCRIPTOR = 15
    CHAR = 24


_C_TYPES: dict[Type, Any] = {
    Type.INT64: ctypes.c_int64,
    Type.FLOAT: ctypes.c_float,
    Type.DOUBLE: ctypes.c_double,
    Type.DESCRIPTOR: ctypes.c_void_p,
    Type.CHAR: ctypes.c_char,
}


class Descriptor:
    """A backend descriptor. It keeps the descriptors that it refers to alive, because the library does not."""

    def __init__(self, library: ctypes.CDLL, kind: Kind) -> None:
        self._library, self._kind = library, kind
        self._kept: list[Any] = []
        self.pointer = ctypes.c_void_p()
        self._check(library.cudnnBackendCreateDescriptor(int(kind), ctypes.byref(self.pointer)), "create")

    def __del__(self) -> None:
        if self.pointer:
            self._library.cudnnBackendDestroyDescriptor(self.pointer)

    def set(self, attribute: int, kind: Type, *values: Any) -> None:
        """Set an attribute to one or more numbers or descriptors."""
        if kind is Type.DESCRIPTOR:
            self._kept += values
            values = tuple(value.pointer for value in values)
        array = (_C_TYPES.get(kind, ctypes.c_int) * len(values))(*values)
        call = self._library.cudnnBackendSetAttribute
        self._check(call(self.pointer, int(attribute), int(kind), ctypes.c_int64(len(values)), array), attribute)

    def finalized(self) -> Descriptor:
        self._check(self._library.cudnnBackendFinalize(self.pointer), "finalize")
        return self

    def numbers(self, attribute: Attribute, kind: Type, at_most: int = 1) -> list[int]:
        """The numbers of an attribute."""
        array = (_C_TYPES.get(kind, ctypes.c_int) * at_most)()
        return list(array[: self._get(attribute, kind, at_most, array)])

    def children(self, attribute: Attribute, kind: Kind, at_most: int | None = None) -> list[Descriptor]:
        """The descriptors of an attribute; all of them by default."""
        count = self._get(attribute, Type.DESCRIPTOR, 0, None) if at_most is None else at_most
        made = [Descriptor(self._library, kind) for _ in range(count)]
        array = (ctypes.c_void_p * count)(*(child.pointer for child in made))
        made = made[: self._get(attribute, Type.DESCRIPTOR, count, array)]
        for child in made:
            child._kept.append(self)
        return made

    def _get(self, attribute: Attribute, kind: Type, at_most: int, array: Any) -> int:
        count = ctypes.c_int64()
        call = self._library.cudnnBackendGetAttribute
        status = call(self.pointer, int(attribute), int(kind), ctypes.c_int64(at_most), ctypes.byref(count), array)
        self._check(status, attribute)
        return min(count.value, at_most) if array is not None else count.value

    def _check(self, status: int, what: int | str) -> None:
        if status:
            name = what.name if isinstance(what, IntEnum) else what
            spelled = self._library.cudnnGetErrorString(status).decode()
            raise CudnnError(f"{self._kind.name} {name}: {spelled}")
