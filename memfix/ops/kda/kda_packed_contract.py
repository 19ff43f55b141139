"""The contract of KDA for packed sequences: each gets naive's result, independent of the others."""

from __future__ import annotations

import torch

from ...contract import BadInput, Contract, Cuts, Dim, TensorSpec, setting
from ...laws import Budget, Scaling, Tolerance
from ..bad_inputs import bad_chunk_sizes, not_integer
from .contract import FORMS, IN_FLOAT64, WY_ROW_FORWARD, WY_ROW_TRAIN, in_window, inputs, number_of_windows
from .naive import naive_kda

_W = "max(e, 4)"
_STATES = f"S*H*K*V*{_W}"
_STREAMED = f"H*min(chunk_size, T)*(K*K + K*V + 6*K + 4*V)*{_W} + 8*H*K*V*{_W}"
_PIECE = f"H*min(16, chunk_size, T)*(K*V + 6*K + 6*V)*{_W}"
# the WY form: the last chunk of every sequence may be almost all padding
_ROWS = "H*(T + S*min(chunk_size, 64))"
_PLACES = "64*(T + 64*S) + 4*KiB"
_WY_FORWARD = f"{_ROWS}*{WY_ROW_FORWARD} + 4*{_STATES} + {_PLACES}"
_WY_TRAIN = f"{_ROWS}*{WY_ROW_TRAIN} + 6*{_STATES} + {_PLACES}"
_KERNEL_CHUNKS = "H*(T/32 + S)"
_TOKENS = f"{_KERNEL_CHUNKS}*32*e"
_COPIES = f"T*H*(3*K + V + 1)*e + {_STATES}"
_PASSED_ON = f"{number_of_windows(_KERNEL_CHUNKS)}*H*K*V*4"  # states from window to window
_PAIRS_AND_DECAYS = f"{_KERNEL_CHUNKS}*(1024*e + K*4 + 32) + KiB"

contract = Contract(
    "kda_packed",
    naive=naive_kda,
    forms=FORMS,
    dims={
        "T": Dim(1, 34),
        "S": Dim(1, 6),
        "H": Dim(1, 2),
        "K": Dim(1, 12),
        "V": Dim(1, 12),
        "chunk_size": Dim(1, 38),
    },
    choices={"scale": (None, 0.3)},
    inputs=[*inputs("1", "S"), TensorSpec("cu_seqlens", "S+1", dtype="int64", values=Cuts("T"))],
    cases={
        "batch": {"T": 96, "S": 6, "H": 8, "K": 64, "V": 64, "chunk_size": 32, "dtype": "bfloat16"},
        "small": {"T": 48, "S": 4, "H": 2, "K": 16, "V": 16, "chunk_size": 16, "present": ("initial_state",)},
    },
    tolerance=Tolerance(rms_factor=1.5),
    budgets=[
        Budget("reported", phase="train", case="batch", times_below_naive=4, known_broken=True),  # as for kda
        Budget("sequential", phase="forward", bytes=f"T*H*V*2*e + 4*{_STATES} + 8*H*(K + V)*{_W}"),
        Budget("sequential", phase="held", bytes=f"H*T*(K*V + 4*K + 4*V + 4)*{_W} + 3*{_STATES}"),
        Budget("sequential", phase="train", bytes=f"H*T*(K*V + 6*K + 5*V + 2)*{_W} + 4*{_STATES}"),
        Budget("streamed", phase="held", bytes=f"T*H*V*e + (T/chunk_size + 2*S + 1)*H*K*V*{_W}"),
        Budget("streamed", phase="forward", bytes=f"T*H*V*e + {_STREAMED} + 2*{_STATES}"),
        Budget(
            "streamed",
            phase="train",
            bytes=f"T*H*(3*K + 2*V + 1)*e + {_STREAMED} + {_PIECE} + (T/chunk_size + S)*H*K*V*{_W} + 4*{_STATES}",
        ),
        Budget("wy", phase="forward", bytes=_WY_FORWARD),
        Budget("wy", phase="held", bytes=f"T*H*V*e + {_STATES}"),
        Budget("wy", phase="train", bytes=_WY_TRAIN),
        Budget(
            "triton",
            phase="forward",
            bytes=f"min({_TOKENS}*(3*K + V) + {_PAIRS_AND_DECAYS}, {in_window('T*H', trains=False)})"
            f" + T*H*V*e + {_STATES} + {_COPIES} + {_PASSED_ON} + {IN_FLOAT64}*({_WY_FORWARD})",
        ),
        Budget("triton", phase="held", bytes=f"T*H*V*e + {_STATES} + 32*(T + S) + {_PASSED_ON} + {IN_FLOAT64}*KiB"),
        Budget(
            "triton",
            phase="train",
            bytes=f"min({_TOKENS}*(3*K + 2*V) + 2*{_KERNEL_CHUNKS}*K*V*e,"
            f" {in_window('T*H', trains=True)} + 3*T*H*(K + V)*e)"
            f" + T*H*(2*V*e + 4*ceil_div(K, 64) + 12) + 3*{_PAIRS_AND_DECAYS} + 2*{_STATES} + {_PASSED_ON}"
            f" + {_COPIES} + {IN_FLOAT64}*({_WY_TRAIN})",
        ),
    ],
    scaling=[Scaling("wy", dim="T", at_most=1, case="small")],
    bad_inputs=[
        *bad_chunk_sizes("chunk_size"),
        *not_integer("cu_seqlens"),
        BadInput(
            "lengths that end early",
            setting(cu_seqlens=torch.tensor([0, 2, 4])),
            "cu_seqlens must go from 0 to the number of tokens, 5; got 0 to 4",
        ),
        BadInput(
            "lengths that begin late",
            setting(cu_seqlens=torch.tensor([1, 5])),
            "cu_seqlens must go from 0 to the number of tokens, 5; got 1 to 5",
        ),
        BadInput(
            "lengths that decrease",
            setting(cu_seqlens=torch.tensor([0, 4, 3, 5])),
            "cu_seqlens must not decrease, got 4 and then 3 at index 2",
        ),
        BadInput(
            "lengths as a row", setting(cu_seqlens=lambda t: t[None]), "cu_seqlens must be [S+1], got shape [1, 6]"
        ),
        BadInput(
            "no lengths", setting(cu_seqlens=lambda t: t[:0]), "cu_seqlens must go from 0 to the number of tokens"
        ),
        BadInput(
            "a state for the batch",
            setting(initial_state=torch.zeros(1, 2, 5, 5)),
            "initial_state must have shape [5, 2, 5, 5] to go with q, got [1, 2, 5, 5]",
        ),
    ],
    repeats_backward=True,
)
