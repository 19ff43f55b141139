"""The dtypes that inputs and cases may have, by name: a contract imports no torch."""

from __future__ import annotations

WORKING = "working"  # a TensorSpec's dtype: whatever the case or the draw works in
WIDE = "wide"  # float32, or the working dtype where that is wider: what sums and states are kept in

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
WORKING_DTYPES = ("float64", "float32", "bfloat16", "float16")
INTEGER_DTYPES = ("int64", "int32", "int16", "int8", "uint8")


def is_floating(dtype: str) -> bool:
    return dtype in (WORKING, WIDE, *WORKING_DTYPES)
