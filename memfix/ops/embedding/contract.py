"""The contract of embedding. The incident: Pythia-70m's vocabulary at one batch of 16 x 2048 tokens."""

from __future__ import annotations

from ...contract import Contract, Dim, Integers, TensorSpec
from ...laws import Scaling, SpeedBudget, Tolerance, at_most, below_naive
from ..bad_inputs import mixed, not_floating, not_integer, refused
from .gather import gather_embedding
from .naive import naive_embedding

contract = Contract(
    "embedding",
    naive=naive_embedding,
    forms={"gather": gather_embedding},
    dims={"N": Dim(1, 300), "V": Dim(1, 50), "D": Dim(1, 40)},  # few rows, so that each is used often
    inputs=[
        TensorSpec("ids", "N", dtype="int64", values=Integers("V")),
        TensorSpec("weight", "V D", grad=True),
    ],
    cases={
        "incident": {"N": 32_768, "V": 50_304, "D": 512, "dtype": "bfloat16"},
        # the sizes of the one-hot loss's incident: 32 sequences of 128 tokens, before the vocabulary was capped
        "report": {"N": 4096, "V": 50_000, "D": 512, "dtype": "float32"},
        "capped": {"N": 4096, "V": 10_000, "D": 512, "dtype": "float32"},
        "medium": {"N": 8192, "V": 10_000, "D": 512, "dtype": "float32"},
        "small": {"N": 1024, "V": 2000, "D": 64, "dtype": "float32"},
    },
    budgets=[
        *below_naive("gather", "incident", forward=100, train=50),
        *at_most(
            "gather",
            saved="8*N",  # the ids, the rows to which backward adds gradients
            forward="N*D*e",
            held="N*D*e",
            # the output is alive in backward; 16-bit gradients are cast to float32 for the sum, then back
            train="N*D*e + V*D*max(e, 4) + max(N*D*4, V*D*e)",
        ),
    ],
    scaling=[
        Scaling("gather", dim="N", at_most=1, case="small"),
        Scaling("gather", dim="V", at_most=1, case="small"),
    ],
    speed=[
        SpeedBudget("gather", case="small", times_naive=1.0),
        SpeedBudget("gather", case="medium", times_naive=0.5, device="cuda"),
        SpeedBudget("gather", case="incident", times_naive=0.1, device="cuda"),
    ],
    bad_inputs=[
        *not_integer("ids"),
        *not_floating("weight"),
        *mixed("device", "ids", "weight"),
        refused("two-dimensional ids", "ids must be [N], got shape [1, 5]", ids=lambda t: t[None]),
        refused("flat weight", "weight must be [V, D], got shape [25]", weight=lambda t: t.flatten()),
    ],
    tolerance=Tolerance(rms_factor=1.5),
    repeats_backward=True,
)
