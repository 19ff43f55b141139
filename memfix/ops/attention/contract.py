"""The contract of attention. The incident: 64 images of 1,024 positions, 8 heads of 64, float32: 2 GiB of scores."""

from __future__ import annotations

import torch

from ...contract import Contract, Dim, Form, TensorSpec
from ...laws import Budget, Scaling, SpeedBudget, Tolerance, at_most, below_naive
from ..bad_inputs import bad_chunk_sizes, mixed, not_floating, refused
from .naive import naive_attention
from .query_chunks import query_chunks_attention
from .reported import reported_attention
from .sdpa import sdpa_attention

_INCIDENT = {"B": 64, "G": 8, "R": 1, "Q": 1024, "K": 1024, "D": 64, "queries_per_chunk": 64}
_W = "max(e, 4)"  # gradients of keys and values are summed in float32
_QUERIES = "B*G*R*Q*D*e"
_KEYS = "B*G*K*D"
_MAP = "keep_map*B*G*R*Q*K*e"
# the rows of a chunk's queries, and its part of mask, bias and causal mask
_CHUNK = "B*G*R*min(queries_per_chunk, Q)"
_CHUNK_MASK = f"{_CHUNK}*K*(mask + 2*bias + mask*bias*e + causal)"

# padded contiguous copies of q, k and v, and of k and v for every query head where the backend has no groups
_PADDED = "B*G*(R*Q + 2*K + 2*R*K)*(D + 7)*e"
_RESULT = "(1 + mask + bias)*B*G*R*Q*(D + 7)*e"  # with a mask or bias one more, where blind rows are set to zero
_ROWS = "B*G*R*(Q + 127)*4"  # one number per row; times a width, the gradient of q in float32
_MASKS = "(mask*B + bias*G*R + mask*bias*B*G*R)*Q*(K + 8)"
_SAVED = "B*G*(R*Q + 2*K)*D*e + mask*B*Q*K + bias*G*R*Q*K*e"
_BIAS_GRADIENT = "bias*B*G*R*Q*(K + 15)*e"
_MAP_CHUNK = "keep_map*3*min(B*G*R*Q*K*e, 256*MiB)"

# gradients of keys and values are rounded once per chunk. Autograd also sums them in 16 bits
_IN_CHUNKS = Tolerance(operand_ulps=1)
_BY_AUTOGRAD = Tolerance(operand_ulps=1, ulps=8, rms_factor=12)
# fused kernels compute the gradient of a score as a difference of two sums, one of them from the rounded result
_FUSED = Tolerance(operand_ulps=1, absolute_ulps=64)

contract = Contract(
    "attention",
    naive=naive_attention,
    forms={
        "reported": Form(reported_attention, reported=True, tolerance=_BY_AUTOGRAD),
        "query_chunks": Form(query_chunks_attention, tolerance=_IN_CHUNKS),
        "sdpa": Form(sdpa_attention, tolerance=_FUSED),
    },
    dims={
        "B": Dim(1, 2),
        "G": Dim(1, 2),
        "R": Dim(1, 3),
        "Q": Dim(1, 40),
        "K": Dim(1, 40),
        "D": Dim(1, 24),
        "queries_per_chunk": Dim(1, 42),
    },
    choices={"causal": (False, True), "scale": (None, 0.3), "keep_map": (False, True)},
    inputs=[
        TensorSpec("q", "B G R Q D", grad=True),
        TensorSpec("k", "B G K D", grad=True),
        TensorSpec("v", "B G K D", grad=True, patterns=("even", "runs")),
        TensorSpec("mask", "B 1 1 Q K", dtype="bool", optional=True),
        TensorSpec("bias", "G R Q K", grad=True, sometimes=-torch.inf, optional=True),
    ],
    cases={
        "incident": _INCIDENT,
        "incident_with_map": {**_INCIDENT, "keep_map": True},
        "incident_bf16": {**_INCIDENT, "dtype": "bfloat16"},
        "cross": {**_INCIDENT, "K": 256},
        "masked": {**_INCIDENT, "B": 8, "present": ("mask",)},
        "grouped": {"B": 4, "G": 4, "R": 4, "Q": 2048, "K": 2048, "D": 128, "queries_per_chunk": 256}
        | {"causal": True, "dtype": "bfloat16"},
        "small": {"B": 4, "G": 4, "R": 1, "Q": 256, "K": 256, "D": 32, "queries_per_chunk": 64},
    },
    # float64 has no fused kernel, so ``sdpa`` would take as much memory as naive
    dtypes=("float32", "bfloat16", "float16"),
    budgets=[
        # small without gradients; in training autograd saves the weights of every chunk
        *below_naive("reported", "incident", forward=8),
        Budget("reported", phase="held", case="incident", times_below_naive=8, known_broken=True),
        Budget("reported", phase="train", case="incident", times_below_naive=8, known_broken=True),
        *below_naive("query_chunks", "incident", forward=10, held=16, train=5),
        *at_most(
            "query_chunks",
            saved=_SAVED,
            forward=f"{_QUERIES} + 2*{_KEYS}*e + {_MAP} + {_CHUNK}*(2*D + (2 + keep_map)*K)*e + {_CHUNK_MASK} + 64*KiB",
            held=f"{_QUERIES} + {_MAP}",
            train=f"2*{_QUERIES} + {_KEYS}*(4*e + 2*{_W}) + {_MAP} + {_CHUNK}*(4*D + 5*K)*e + {_CHUNK_MASK} + 64*KiB",
        ),
        *below_naive("sdpa", "incident", forward=32, held=16, train=12),
        *below_naive("sdpa", "incident_bf16", train=10),
        *below_naive("sdpa", "cross", train=4.5),
        *below_naive("sdpa", "masked", train=6),
        *below_naive("sdpa", "grouped", train=10),
        # the cost of the map: 16 times as many bytes as are held without it
        *at_most("sdpa", "incident", held="B*G*R*Q*(D*e + 4)", train="650 MiB"),
        *at_most("sdpa", "incident_with_map", held="B*G*R*Q*((D + K)*e + 4)"),
        *at_most(
            "sdpa",
            saved=_SAVED,
            forward=f"{_PADDED} + {_RESULT} + {_ROWS} + {_MAP} + {_MAP_CHUNK} + {_MASKS}*(2*e + 2) + 64*KiB",
            held=f"{_PADDED} + {_RESULT} + {_ROWS} + {_MAP} + {_MASKS}*(2*e + 2) + 64*KiB",
            train=f"2*{_PADDED} + {_RESULT} + {_ROWS}*(D + 127) + {_MAP} + {_MAP_CHUNK} + {_MASKS}*(2*e + 2)"
            f" + {_BIAS_GRADIENT} + 64*KiB",
        ),
    ],
    scaling=[
        Scaling("query_chunks", dim="Q K", at_most=1, case="small"),
        Scaling("sdpa", dim="Q K", at_most=1, case="small"),
        Scaling("sdpa", dim="Q K", at_most=1, case="small", phase="forward"),
    ],
    speed=[
        SpeedBudget("query_chunks", case="small", times_naive=4.0),
        SpeedBudget("sdpa", case="small", times_naive=1.0),
        SpeedBudget("sdpa", case="incident", times_naive=1.0, device="cuda"),
        SpeedBudget("sdpa", case="incident_bf16", times_naive=0.3, device="cuda"),
    ],
    bad_inputs=[
        *bad_chunk_sizes("queries_per_chunk"),
        *not_floating("q", "k", "v"),
        *mixed("dtype", "q", "k", "v"),
        *mixed("device", "q", "k", "v"),
        refused(
            "additive mask in another dtype",
            "q and k and v and bias must have the same dtype, got torch.float32, torch.float32, torch.float32, "
            "torch.float16",
            bias=lambda _: torch.zeros(5, 5, dtype=torch.float16),
        ),
        refused(
            "numbers as a mask",
            "mask must be bool, True where a query sees a key, got torch.float32; numbers to add are bias=",
            mask=lambda _: torch.zeros(5, 5),
        ),
        refused("integer bias", "bias must be floating, got", bias=lambda _: torch.zeros(5, 5, dtype=torch.int64)),
        refused("mask as a list", "mask must be a tensor, got list", TypeError, mask=lambda _: [True]),
        refused(
            "mask for fewer keys",
            "mask must broadcast to the scores [2, 2, 3, 5, 5], got shape [5, 4]",
            mask=lambda _: torch.ones(5, 4, dtype=torch.bool),
        ),
        refused("bias with six dims", "bias must broadcast to", bias=lambda _: torch.zeros(1, 2, 2, 3, 5, 5)),
        refused(
            "context of another batch size",
            "q and k and v must have the same batch B, got 2, 1, 1",
            k=lambda t: t[:1],
            v=lambda t: t[:1],
        ),
        refused("v of fewer keys", "k and v must have the same number of keys K", v=lambda t: t[:, :, 1:]),
        refused("narrow k", "q and k must have the same width D, got 5, 4", k=lambda t: t[..., 1:]),
        refused("k of fewer heads", "must have the same number of key-value heads, got 2, 1, 2", k=lambda t: t[:, 1:]),
        refused("ungrouped q", "q must be [B, G, R, Q, D], got shape [2, 2, 5, 5]", q=lambda t: t[:, :, 0]),
        refused(
            "no keys",
            "k must have at least one element, got shape [2, 2, 0, 5]",
            k=lambda t: t[:, :, :0],
            v=lambda t: t[:, :, :0],
        ),
        refused("no queries", "q must have at least one element, got shape", q=lambda t: t[:, :, :, :0]),
        refused("infinite scale", "scale must be finite, got inf", scale=float("inf")),
        refused("all dropped", "dropout must be at least 0 and below 1, got 1.0", dropout=1.0),
        refused("causal as a number", "causal must be True or False, got 1", TypeError, causal=1),
        refused("map as a name", "keep_map must be True or False, got 'yes'", TypeError, keep_map="yes"),
    ],
    repeats_backward=True,
)
