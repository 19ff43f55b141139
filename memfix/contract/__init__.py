"""The declaration of an op: its forms, the shapes they take, and what they promise. Plain frozen data.

One contract feeds every check: equality, memory, scaling, speed and bad inputs, under pytest, in the
gate and in the benchmarks. "KDA with chunk 64 must be 4x below dense" is one line of it::

    Budget("streamed", case="incident", times_below_naive=4)
"""

from .case import Case, Dim
from .contract import Contract
from .dtypes import DTYPE_BYTES, WIDE, WORKING_DTYPES
from .form import FLOOR, BadInput, Form, setting
from .object_spec import ObjectSpec
from .signatures import parameters_of
from .tensor_spec import LAYOUTS, PATTERNS, Layout, Pattern, TensorSpec
from .values import Cuts, FromFunction, Integers, LogUniform, Mask, Normal, Uniform, Values

__all__ = [
    "DTYPE_BYTES", "FLOOR", "LAYOUTS", "PATTERNS", "WIDE", "WORKING_DTYPES", "BadInput", "Case", "Contract",
    "Cuts", "Dim", "Form", "FromFunction", "Integers", "Layout", "LogUniform", "Mask", "Normal", "ObjectSpec",
    "Pattern", "TensorSpec", "Uniform", "Values", "parameters_of", "setting",
]  # fmt: skip
