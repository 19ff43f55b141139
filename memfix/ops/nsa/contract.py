"""The contract of native sparse attention. The incident: 131,072 tokens, 32 heads over 8 of width 80, bfloat16."""

from __future__ import annotations

import torch

from ...contract import Contract, Dim, Form, Normal, TensorSpec, Uniform
from ...laws import Scaling, SpeedBudget, Tolerance, at_most, below_naive
from ..bad_inputs import bad_chunk_sizes, mixed, not_floating, refused
from .chunked import chunked_nsa
from .naive import naive_nsa
from .triton import Tiles, triton_nsa

# the paper's own sizes
_PAPER = {"compress_block": 32, "compress_stride": 16, "select_block": 64, "num_selected": 16, "window": 512}
_EMBEDDED = {"present": ("position_embedding",)}

# item size of sums and of all tensors of a chunk: float32, or float64 for float64 inputs
_W = "max(e, 4)"
_M = "T/compress_stride"
_CHUNK = "B*G*min(queries_per_chunk, T)"
_PLACES = "8*T*(R + 1) + 64*KiB"
_EVERY_TOKEN = f"B*T*G*(R*D*e + 2*D*{_W} + 4*num_selected) + B*G*D*{_M}*(16 + 4*{_W})"
# forward, per query and key-value head: compressed scores in float64, or those into and out of softmax; gathered keys;
# the window's scores; the probabilities of compressed blocks that share tokens with selection blocks
_FORWARD = (
    f"max({_M}*(R*(2*{_W} + 1) + 8), num_selected*select_block*(D + 2*R + 8)*{_W}, "
    f"R*(queries_per_chunk + window)*3*{_W}, "
    f"8*({_M} + (T/select_block + 1)*((compress_block + select_block)/compress_stride + 6)))"
)
# backward, per query and key-value head: weights, their gradients and the product of both; gathered keys or their
# gradients
_TRAIN = (
    f"max({_M}*R*(3*{_W} + 1), num_selected*select_block*(D + 3*R + 8)*{_W}, R*(queries_per_chunk + window)*4*{_W})"
)
_GRADIENTS = f"B*T*G*(R*(D + 3)*e + D*(2*{_W} + 2*e))"

# the form ``triton``: output; contiguous copies of inputs; compressed keys, in float64 for selection, and values;
# scores of a chunk and their denominators in float64; sums of the first block's gradients; the selection, sorted by
# block
_OUT = "B*T*G*R*D*e"
_COPIES = "B*T*G*(R*D + 2*D + 3*R)*e"
_COMPRESSED = f"B*G*D*{_M}*(24 + 4*e)"
_SCORES = f"{_CHUNK}*(6*(T/select_block + 1) + 20*R + 12 + 4*num_selected)"
_FIRST = "B*G*D*(T/8 + 8*select_block)"
_SORTED = "40*B*T*G*num_selected + 8*B*G*(T/select_block + 2)"
# for float64 inputs, for which ``triton`` runs ``chunked``; else 0
_IN_FLOAT64 = (
    "max(e - 4, 0)*B*G*(T*(2*R*D + 30*D) + min(queries_per_chunk, T)*(T/compress_stride*(6*R + 4) + 16*R*D"
    " + 2*num_selected*select_block*(D + 3*R + 8) + 8*R*(queries_per_chunk + window) + 40*T))"
)

_KERNELS = f"{__package__}.triton"
_TILES = (
    "COMPRESSED", "WINDOW", "SELECTED", "SCORE", "EXACT", "COMPRESSED_BACKWARD", "WINDOW_BACKWARD",
    "SELECTED_BACKWARD", "COMPRESSED_KEYS", "TOKEN_KEYS",
)  # fmt: skip
_SMALL_TILES = {
    f"{_KERNELS}.CHOSEN_AT_ONCE": 16,
    f"{_KERNELS}.SETTLED_AT_ONCE": 8,
    f"{_KERNELS}.FIRST_SEGMENT": 6,
    **{f"{_KERNELS}.{name}": Tiles(rows=64, keys=32, stages=1, warps=2) for name in _TILES},
}


contract = Contract(
    "nsa",
    naive=naive_nsa,
    forms={
        "chunked": chunked_nsa,
        "triton": Form(triton_nsa, has_kernels=True, compared_with=_SMALL_TILES),
    },
    # many small blocks: a query reads three whatever their scores, and only the fourth and later are chosen by score
    dims={
        "B": Dim(1, 2),
        "T": Dim(1, 128),
        "G": Dim(1, 3),
        "R": Dim(1, 3),
        "D": Dim(1, 8),
        "compress_block": Dim(3, 7),
        "compress_stride": Dim(1, 3),
        "select_block": Dim(1, 4),
        "num_selected": Dim(1, 7),
        "window": Dim(1, 20),
        "queries_per_chunk": Dim(8, 140),
    },
    choices={"scale": (None, 0.3)},
    inputs=[
        TensorSpec("q", "B T G R D", grad=True),
        TensorSpec("k", "B T G D", grad=True),
        # values are never "alike": where keys are too, the gradient of q is zero up to rounding
        TensorSpec("v", "B T G D", grad=True, patterns=("even", "runs")),
        TensorSpec("gates", "B T G R 3", grad=True, values=Uniform(0.0, 1.0)),
        TensorSpec("position_embedding", "compress_block D", grad=True, values=Normal(scale=0.5), optional=True),
    ],
    cases={
        "incident": {"B": 1, "T": 131_072, "G": 8, "R": 4, "D": 80, **_PAPER, "queries_per_chunk": 4096}
        | {"dtype": "bfloat16", **_EMBEDDED},
        # a stride so small that shapes drawn near the case have none above their block
        "medium": {"B": 1, "T": 4096, "G": 2, "R": 4, "D": 64, **_PAPER, "compress_block": 16}
        | {"compress_stride": 2, "queries_per_chunk": 2048, "dtype": "bfloat16", **_EMBEDDED},
        "small": {"B": 2, "T": 256, "G": 2, "R": 2, "D": 16, "compress_block": 8, "compress_stride": 2}
        | {"select_block": 16, "num_selected": 4, "window": 32, "queries_per_chunk": 256, "dtype": "float32"},
    },
    # where values come in runs, the sums of three softmaxes cancel
    tolerance=Tolerance(rms_factor=1.5, sum_ulps=128),
    budgets=[
        *below_naive("chunked", "incident", forward=400, train=700),
        *at_most("chunked", "incident", train="16 GiB"),
        *at_most(
            "chunked",
            forward=f"{_EVERY_TOKEN} + {_CHUNK}*({_FORWARD} + 4*R*D*{_W}) + {_PLACES}",
            held=f"B*T*G*(R*D*e + 4*num_selected) + 2*B*G*D*{_W}*{_M} + KiB",
            train=f"{_EVERY_TOKEN} + {_GRADIENTS} + {_CHUNK}*({_TRAIN} + 8*R*D*{_W}) + {_PLACES}",
        ),
        *below_naive("triton", "incident", forward=4000, train=4000),
        *at_most("triton", "incident", train="2.5 GiB"),
        *at_most(
            "triton",
            forward=f"{_OUT} + {_COPIES} + {_COMPRESSED} + {_SCORES} + 64*KiB + {_IN_FLOAT64}",
            held=f"{_OUT} + 4*B*T*G*num_selected + KiB + max(e - 4, 0)*4*B*G*D*{_M}",
            train=f"2*{_OUT} + 2*{_COPIES} + {_COMPRESSED} + max({_SCORES}, 36*B*T*G*R + {_FIRST} + {_SORTED}) + 64*KiB"
            f" + {_IN_FLOAT64}",
        ),
    ],
    scaling=[
        Scaling("chunked", dim="T", at_most=1, case="small", doublings=3),
        Scaling("triton", dim="T", at_most=1, case="small", doublings=3),
    ],
    speed=[
        SpeedBudget("chunked", case="small", times_naive=6.0),
        SpeedBudget("chunked", case="medium", times_naive=4.0, device="cuda"),
        SpeedBudget("triton", case="medium", times_naive=1.0, device="cuda"),
    ],
    bad_inputs=[
        *bad_chunk_sizes("queries_per_chunk"),
        *not_floating("q"),
        *mixed("dtype", "q", "k", "v", "gates"),
        *mixed("device", "q", "k", "v", "gates"),
        refused("zero window", "window must be at least 1, got 0", window=0),
        refused("nothing selected", "num_selected must be at least 1, got 0", num_selected=0),
        refused("negative block", "select_block must be at least 1, got -4", select_block=-4),
        refused(
            "stride above the block",
            "compress_stride must be at most compress_block (5), or tokens are in no block; got 6",
            compress_stride=6,
            compress_block=5,
        ),
        refused(
            "gates for fewer heads",
            "gates must have shape [2, 5, 3, 3, 3] to go with q, got [2, 5, 3, 2, 3]",
            gates=lambda t: t[:, :, :, :2],
        ),
        refused("flat gates", "gates must be [B, T, G, R, 3], got shape [2, 5, 3, 3]", gates=lambda t: t[..., 0]),
        refused("ungrouped q", "q must be [B, T, G, R, D], got shape [2, 5, 9, 5]", q=lambda t: t.flatten(2, 3)),
        refused("short v", "v must have shape [2, 5, 3, 5] to go with q, got [2, 4, 3, 5]", v=lambda t: t[:, 1:]),
        refused("wide k", "k must have shape [2, 5, 3, 5] to go with q", k=lambda t: t.repeat(1, 1, 1, 2)),
        refused(
            "no tokens",
            "q must have at least one element, got shape [2, 0, 3, 3, 5]",
            **dict.fromkeys(("q", "k", "v", "gates"), lambda t: t[:, :0]),
        ),
        refused(
            "embedding of another block",
            "position_embedding must have shape [5, 5] to go with q, got [4, 5]",
            position_embedding=lambda _: torch.zeros(4, 5),
        ),
    ],
    repeats_backward=True,
)
