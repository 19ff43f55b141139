"""The contract of the feed-forward layer without a gate, whose first weight has ``F`` rows instead of ``2F``."""

from __future__ import annotations

from ...contract import Contract, Form, Normal, TensorSpec
from .contract import CHUNK_BUDGETS, COMMON_INPUTS, COMPARED_WITH, DIMS, OPTIONAL, SMALL_TILES, TOLERANCE
from .fused import fused_geglu_feed_forward
from .naive import naive_geglu_feed_forward
from .token_chunks import token_chunks_geglu_feed_forward

contract = Contract(
    "gelu_feed_forward",
    naive=naive_geglu_feed_forward,
    forms={
        "token_chunks": Form(token_chunks_geglu_feed_forward, compared_with=COMPARED_WITH),
        "fused": Form(fused_geglu_feed_forward, has_kernels=True, compared_with=SMALL_TILES),
    },
    dims=DIMS,
    choices={"activation": ("gelu",), "residual": (False, True)},
    inputs=[
        TensorSpec("hidden", "B N D", grad=True),
        TensorSpec("up_weight", "F D", grad=True, values=Normal(fan_in="D")),
        TensorSpec("down_weight", "D F", grad=True, values=Normal(fan_in="F")),
        TensorSpec("up_bias", "F", grad=True, optional=True),
        *COMMON_INPUTS,
    ],
    cases={
        "small": {"B": 2, "N": 64, "D": 64, "F": 256, "tokens_per_chunk": 32, "tokens_kept": 32, "present": OPTIONAL},
    },
    tolerance=TOLERANCE,
    budgets=CHUNK_BUDGETS,
    repeats_backward=True,
)
