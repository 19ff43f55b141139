"""The contract of KDA in bfloat16 with wide keys for packed sequences: ``kda_packed`` for the form ``cuda``."""

from __future__ import annotations

from ...contract import Contract, Cuts, Dim, TensorSpec
from ...laws import Tolerance
from ..bad_inputs import bad_chunk_sizes
from .contract import inputs
from .kda_wide_contract import FORMS, GATES, WIDTHS
from .naive import naive_kda

contract = Contract(
    "kda_wide_packed",
    naive=naive_kda,
    forms=FORMS,
    dims={"T": Dim(1, 132), "S": Dim(1, 3), **WIDTHS},
    dtypes=("bfloat16",),
    inputs=[*inputs("1", "S", **GATES), TensorSpec("cu_seqlens", "S+1", dtype="int64", values=Cuts("T"))],
    cases={"batch": {"T": 96, "S": 6, "H": 8, "K": 64, "V": 64, "chunk_size": 64, "dtype": "bfloat16"}},
    tolerance=Tolerance(rms_factor=1.5),
    bad_inputs=bad_chunk_sizes("chunk_size"),
    repeats_backward=True,
)
