"""The contract of the log-probabilities of given tokens: naive's values, without the logits of all tokens."""

from __future__ import annotations

from functools import partial

import torch

from ...contract import Contract, Dim, Integers, Normal, TensorSpec
from ...laws import Scaling, at_most, below_naive
from ..bad_inputs import bad_chunk_sizes, mixed, not_floating, not_integer, refused
from .contract import PATTERNS_WITHOUT_EQUAL_ROWS, UNROUNDED_LOGITS_TOLERANCE, chunked_limits
from .log_probabilities import token_log_probabilities
from .naive import naive_token_log_probabilities

_N = "B*T"
# masks, sums and coefficients of every token; the bias and its gradient
_SMALL = f"80*{_N} + 40*V + 4*KiB"
_ROWS = f"{_N}*D*e"  # the copy of hidden if it is not contiguous
_LIMITS = chunked_limits(num_tokens=_N, small=f"{_SMALL} + {_ROWS}") | {"held": f"{_SMALL} + {_ROWS}"}

contract = Contract(
    "token_log_probabilities",
    naive=naive_token_log_probabilities,
    # the kernels are those of linear_cross_entropy, whose contract interprets and compiles them
    forms={"recompute": partial(token_log_probabilities, form="recompute")},
    # with one class the gradient is zero: naive has no rounding error to compare with
    dims={"B": Dim(1, 3), "T": Dim(1, 16), "D": Dim(1, 24), "V": Dim(2, 80), "rows_per_chunk": Dim(1, 50)},
    choices={"softcap": (None, 20.0), "temperature": (1.0, 0.7), "ignore_index": (-100, 0)},
    inputs=[
        TensorSpec("hidden", "B T D", grad=True, patterns=PATTERNS_WITHOUT_EQUAL_ROWS),
        TensorSpec("weight", "V D", grad=True, values=Normal(fan_in="D"), patterns=PATTERNS_WITHOUT_EQUAL_ROWS),
        TensorSpec("token", "B T", dtype="int64", values=Integers("V"), sometimes="ignore_index"),
        TensorSpec("bias", "V", grad=True, optional=True),
    ],
    cases={
        "policy": {"B": 8, "T": 2048, "D": 1024, "V": 32_000, "rows_per_chunk": 2048, "dtype": "bfloat16"},
        "small": {"B": 4, "T": 128, "D": 64, "V": 1000, "rows_per_chunk": 128},
    },
    tolerance=UNROUNDED_LOGITS_TOLERANCE,
    budgets=[
        *at_most("recompute", **_LIMITS),
        *below_naive("recompute", "policy", forward=20, train=8),
    ],
    scaling=[
        Scaling("recompute", dim="T", at_most=1, case="small", doublings=3),
        Scaling("recompute", dim="V", at_most=1, case="small"),
    ],
    bad_inputs=[
        *bad_chunk_sizes("rows_per_chunk"),
        *not_floating("hidden", "weight"),
        *not_integer("token", rule="int64"),
        *mixed("dtype", "hidden", "weight"),
        *mixed("device", "hidden", "weight", "token"),
        refused("temperature of zero", "temperature must be above 0, got 0.0", temperature=0.0),
        refused("softcap of zero", "softcap must be above 0, got 0.0", softcap=0.0),
        refused("short token", "token must have the shape of hidden without its", token=lambda t: t[:, 1:]),
        refused("narrow weight", "must have the same width D, got 5, 4", weight=lambda t: t[:, 1:]),
        refused("wide bias", "bias and weight must have the same dtype", bias=torch.ones(5).double()),
        refused("short bias", "must have the same number of classes V, got 4, 5", bias=torch.ones(4)),
        refused(
            "token above the vocabulary",
            "must be at least 0 and below the vocabulary of 5, or ignore_index -100; got",
            token=lambda t: t + 5,
        ),
    ],
    repeats_backward=True,
)
