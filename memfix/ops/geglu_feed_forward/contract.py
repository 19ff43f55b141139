"""The contract of the gated feed-forward layer. The incident: 64 sequences of 1024 tokens, width 512, hidden width
2048, float32, with a norm before it."""

from __future__ import annotations

from typing import Any

import torch

from ...contract import Contract, Dim, Form, Normal, TensorSpec
from ...laws import Scaling, SpeedBudget, Tolerance, at_most, below_naive
from ..bad_inputs import bad_chunk_sizes, mixed, not_floating, refused
from .checkpoint import checkpoint_geglu_feed_forward
from .fused import Tiles, fused_geglu_feed_forward
from .naive import naive_geglu_feed_forward
from .token_chunks import token_chunks_geglu_feed_forward

OPTIONAL = ("up_bias", "down_bias", "norm_weight", "norm_bias")
_INPUTS = ("hidden", "up_weight", "down_weight")
_W = "max(e, 4)"
_T = "B*N"
_C = f"min(tokens_per_chunk, {_T})"
_KEPT = f"2*min(tokens_kept, {_T})*F*e"
# one tensor of the size of hidden: the result, a gradient, or a copy if two leading dims do not fold into one
_ROWS = f"{_T}*D*e"
_PARAMETERS = "(3*F*D + 2*F + 3*D)"
# the norm of a chunk: three tensors of width D (its output and gradients), and two statistics per token
_NARROW = f"{_C}*(3*D*e + 2*{_W})"
# the partial sums of a chunk's gradients for up_bias
_SMALL = f"ceil_div({_C}, 64)*8*F + 16*F + KiB"
_BLOCKS = f"6*min(max(MiB, F), {_C}*F)*{_W}"  # float32 temporaries of the activation in torch's operators

CHUNK_BUDGETS = [
    budget
    for form, blocks in (("token_chunks", f"{_BLOCKS} + "), ("fused", ""))
    for budget in at_most(
        form,
        forward=f"2*{_ROWS} + 2*{_C}*F*e + {_NARROW} + {blocks}{_SMALL}",
        held=f"{_ROWS} + {_KEPT}",
        train=f"4*{_ROWS} + {_KEPT} + 3*{_C}*F*e + {_NARROW} + {_PARAMETERS}*({_W} + e) + {blocks}{_SMALL}",
    )
]
"""Budgets of the chunked forms, at every shape."""

# products are rounded to the working dtype as in naive; over several chunks they are summed in float32, but the
# gradients of a norm are rounded before they are summed
TOLERANCE = Tolerance(ulps=2, rms_factor=1.5)
COMPARED_WITH = {f"{__package__}.token_chunks._BLOCK_ELEMENTS": 24, "memfix.ops.products._UPCAST_ELEMENTS": 64}
SMALL_TILES = {**COMPARED_WITH, f"{__package__}.fused.TILES": Tiles(tokens=2, columns=8, steps=2)}

DIMS = {
    "B": Dim(1, 3),
    "N": Dim(1, 9),
    "D": Dim(1, 20),
    "F": Dim(1, 24),
    "tokens_per_chunk": Dim(1, 28),
    "tokens_kept": Dim(0, 28),
}
COMMON_INPUTS = [TensorSpec(name, "D", grad=True, optional=True) for name in ("down_bias", "norm_weight", "norm_bias")]

_SMALL_CASE: dict[str, Any] = {"B": 2, "N": 64, "D": 64, "F": 128, "tokens_per_chunk": 32, "tokens_kept": 0}
_INCIDENT: dict[str, Any] = {"B": 64, "N": 1024, "D": 512, "F": 2048, "present": OPTIONAL}

contract = Contract(
    "geglu_feed_forward",
    naive=naive_geglu_feed_forward,
    forms={
        "checkpoint": checkpoint_geglu_feed_forward,
        "token_chunks": Form(token_chunks_geglu_feed_forward, compared_with=COMPARED_WITH),
        "fused": Form(fused_geglu_feed_forward, has_kernels=True, compared_with=SMALL_TILES),
    },
    dims=DIMS,
    choices={"activation": ("geglu", "swiglu"), "residual": (False, True)},
    inputs=[
        TensorSpec("hidden", "B N D", grad=True),
        TensorSpec("up_weight", "2*F D", grad=True, values=Normal(fan_in="D")),
        TensorSpec("down_weight", "D F", grad=True, values=Normal(fan_in="F")),
        TensorSpec("up_bias", "2*F", grad=True, optional=True),
        *COMMON_INPUTS,
    ],
    cases={
        "incident": {**_INCIDENT, "tokens_per_chunk": 8192, "tokens_kept": 28_672},
        "incident_bf16": {**_INCIDENT, "tokens_per_chunk": 16_384, "tokens_kept": 0, "dtype": "bfloat16"},
        "small": _SMALL_CASE,
        "options": {**_SMALL_CASE, "tokens_kept": 48, "activation": "swiglu", "residual": True, "present": OPTIONAL},
    },
    tolerance=TOLERANCE,
    budgets=[
        *at_most("checkpoint", held=_ROWS, train=f"6*{_ROWS} + 26*{_T}*F*e + 2*{_PARAMETERS}*{_W} + {_T}*16 + KiB"),
        *below_naive("token_chunks", "incident", train=4),
        *below_naive("fused", "incident", forward=7, held=4, train=4),
        *below_naive("fused", "incident_bf16", held=16, train=4),
        *at_most("fused", "incident_bf16", train="0.45 GiB"),
        *CHUNK_BUDGETS,
    ],
    scaling=[
        Scaling("token_chunks", dim="N", at_most=1, case="small", doublings=3),
        Scaling("fused", dim="N", at_most=1, case="incident_bf16", doublings=3),
        Scaling("fused", dim="tokens_per_chunk", at_most=1, case="small", doublings=3),
        Scaling("fused", dim="F", at_most=1, case="small", doublings=3),
    ],
    speed=[
        SpeedBudget("token_chunks", case="small", times_naive=4.0),
        SpeedBudget("fused", case="incident", times_naive=1.15, device="cuda"),
        SpeedBudget("fused", case="incident_bf16", times_naive=1.10, device="cuda"),
    ],
    bad_inputs=[
        *bad_chunk_sizes("tokens_per_chunk"),
        *not_floating(*_INPUTS),
        *mixed("dtype", *_INPUTS),
        *mixed("device", *_INPUTS),
        refused("negative kept", "tokens_kept must be at least 0, got -1", tokens_kept=-1),
        refused("kept in words", "tokens_kept must be an int, got 'all'", TypeError, tokens_kept="all"),
        refused("unknown activation", "activation must be one of geglu, swiglu, gelu, got 'glu'", activation="glu"),
        refused("residual in words", "residual must be True or False, got 'yes'", TypeError, residual="yes"),
        refused("negative epsilon", "norm_eps must be at least 0, got -1e-05", norm_eps=-1e-5),
        refused(
            "no gate",
            "up_weight must have 10 rows for activation 'geglu' and down_weight [5, 5], got 5",
            up_weight=lambda t: t[:5],
        ),
        refused(
            "a gate too many",
            "up_weight must have 5 rows for activation 'gelu' and down_weight [5, 5], got 10",
            activation="gelu",
        ),
        refused("narrow hidden", "must have the same width D, got 4, 5, 5", hidden=lambda t: t[..., 1:]),
        refused("narrow up_weight", "the same width D, got 5, 4, 5", up_weight=lambda t: t[:, 1:]),
        refused("short down_weight", "the same width D, got 5, 5, 4", down_weight=lambda t: t[1:]),
        refused("short norm_weight", "the same width D, got 5, 5, 5, 4", norm_weight=torch.ones(4)),
        refused("short down_bias", "the same width D, got 5, 5, 5, 4", down_bias=torch.ones(4)),
        refused("short up_bias", "must have the same number of rows H, got 10, 5", up_bias=torch.ones(5)),
        refused("norm_bias as a matrix", "norm_bias must be [D], got shape [5, 1]", norm_bias=torch.ones(5, 1)),
        refused("weight as a vector", "up_weight must be [H, D], got shape [5]", up_weight=lambda t: t[0]),
        refused("hidden as a list", "hidden must be a tensor, got list", TypeError, hidden=lambda t: [t]),
        refused(
            "no tokens",
            "hidden and up_weight must have at least one element, got shapes [3, 0, 5] and [10, 5]",
            hidden=lambda t: t[:, :0],
        ),
    ],
    repeats_backward=True,
)
