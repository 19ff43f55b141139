"""The contract of KDA in bfloat16 with wide keys, for which the form ``cuda`` has kernels of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...contract import WIDE, Contract, Dim, Form
from ...laws import Budget, Scaling, SpeedBudget, Tolerance
from ..bad_inputs import bad_chunk_sizes, mixed, not_floating
from .contract import ROUNDS_OPERANDS, in_window, inputs, number_of_windows
from .cuda import cuda_kda
from .naive import naive_kda

_CHUNKS = "B*H*ceil_div(T, 32)"
_ROWS = f"{_CHUNKS}*32"
_STATES = "B*H*K*V*4"
_SEGMENTS = "min(ceil_div(T, 32)*8//chunk_size, 16896//(B*H*V))"
_ENDS = f"{_STATES}*{_SEGMENTS}"  # states between segments
_KEPT = f"{_CHUNKS}*(2052 + K*4)"  # scores, decays and bounds on growth
# states with which the segments of all windows begin in backward, which has a fourth as many, but one
_PASSED_ON = f"(({number_of_windows(_CHUNKS)} + 1)*max(1, {_SEGMENTS}//4) - 1)*{_STATES}"
_COPIES = f"B*H*T*((3*K + V)*e + 4) + {_STATES}"  # contiguous copies of the inputs
_SMALL_WINDOWS = {f"{__package__}.windows.BYTES_AT_ONCE": 192 << 10, f"{__package__}.windows.TIMES_RESULTS": 0.0}
FORMS = {
    "cuda": Form(cuda_kda, tolerance=ROUNDS_OPERANDS, has_kernels=True, language="cuda", compared_with=_SMALL_WINDOWS)
}
WIDTHS = {
    "H": Dim(1, 2),
    "K": Dim(64, 128, multiple_of=64),
    "V": Dim(64, 64),
    "chunk_size": Dim(8, 8),  # so small that sequences are cut into segments
}


def _gates(shape: Sequence[int], generator: torch.Generator, dims: Mapping[str, int]) -> torch.Tensor:
    """Draw gates as in ``kda``, but let every second channel keep its state: else wrong segments would pass."""
    strongest = torch.full(shape, 1000.0)
    strongest[..., ::2] = 0.01
    return -torch.exp(torch.rand(shape, generator=generator) * torch.log(strongest / 0.001)) * 0.001


GATES = {"values": _gates, "dtype": WIDE, "also_in": ("bfloat16",)}

contract = Contract(
    "kda_wide",
    naive=naive_kda,
    forms=FORMS,
    dims={"B": Dim(1, 2), "T": Dim(1, 132), **WIDTHS},
    dtypes=("bfloat16",),
    choices={"scale": (None, 0.3)},
    inputs=inputs("B", "B", **GATES),
    cases={
        "narrow": {"B": 16, "T": 256, "H": 8, "K": 64, "V": 64, "chunk_size": 64, "dtype": "bfloat16"},
        "wide": {"B": 1, "T": 512, "H": 32, "K": 128, "V": 128, "chunk_size": 64, "dtype": "bfloat16"},
    },
    tolerance=Tolerance(rms_factor=1.5),
    budgets=[
        Budget("cuda", phase="forward", case="narrow", times_below_naive=4),
        Budget("cuda", phase="train", case="narrow", times_below_naive=4),
        Budget("cuda", phase="train", case="wide", bytes="72 MiB"),
        Budget(
            "cuda",
            phase="forward",
            bytes=f"min({_ROWS}*(3*K + V)*e + {_KEPT}, {in_window('B*H*T', trains=False)})"
            f" + B*H*T*V*e + {_STATES} + {_ENDS} + {_PASSED_ON} + {_COPIES}",
        ),
        Budget("cuda", phase="held", bytes=f"B*H*T*V*e + {_STATES} + {_PASSED_ON}"),
        Budget(
            "cuda",
            phase="train",
            bytes=f"min({_ROWS}*(3*K + 2*V)*e + 2*{_CHUNKS}*K*V*e + 3*{_KEPT},"
            f" {in_window('B*H*T', trains=True)} + B*H*T*(2*K + V)*e)"
            f" + B*H*T*(2*V*e + K*4 + 12) + 2*{_STATES} + 2*{_ENDS} + {_PASSED_ON} + {_COPIES}",
        ),
    ],
    scaling=[Scaling("cuda", dim="T", at_most=1, case="narrow")],
    speed=[SpeedBudget("cuda", case="narrow", times_naive=0.05, device="cuda")],
    bad_inputs=[
        *bad_chunk_sizes("chunk_size"),
        *not_floating("q", "g"),
        *mixed("dtype", "q", "k", "v"),
        *mixed("device", "q", "k", "v", "g", "beta"),
    ],
    repeats_backward=True,
)
