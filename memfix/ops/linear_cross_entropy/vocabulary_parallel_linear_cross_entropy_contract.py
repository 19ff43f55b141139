"""The contract of the vocabulary-parallel loss: naive's answer on every process, memory bounded by its own classes.

The equality checks run its processes as threads (``threads.py``); ``tests/ops/test_vocabulary_parallel.py`` runs
real processes.
"""

from __future__ import annotations

import torch

from ...contract import Contract, Dim, Form
from ...laws import Scaling, at_most, below_naive
from ..bad_inputs import bad_chunk_sizes, mixed, not_floating, not_integer, refused
from .contract import LOSS_TOLERANCE, chunked_limits
from .contract import contract as whole
from .naive import naive_linear_cross_entropy
from .threads import spread_linear_cross_entropy

contract = Contract(
    "vocabulary_parallel_linear_cross_entropy",
    naive=naive_linear_cross_entropy,
    # not recompute's tolerance: the gradient of hidden is rounded on every process before it is added up
    forms={"spread": Form(spread_linear_cross_entropy, tolerance=LOSS_TOLERANCE)},
    dims={"N": Dim(1, 40), "D": Dim(1, 24), "V": Dim(3, 70), "rows_per_chunk": Dim(1, 44)},
    choices={"num_processes": (2, 3, 1), **whole.choices},
    inputs=[spec for spec in whole.inputs if spec.name != "class_weight"],
    cases={
        "medium": {"N": 8192, "D": 1024, "V": 8000, "rows_per_chunk": 1024, "dtype": "bfloat16"},
        "small": {"N": 512, "D": 64, "V": 1000, "rows_per_chunk": 128},
    },
    budgets=[
        *below_naive("spread", "medium", forward=20, train=5),
        # V is the number of classes of one process: a meter reads one process
        *at_most("spread", **chunked_limits(small="120*N + 40*V + 4*KiB")),
    ],
    scaling=[Scaling("spread", dim="N", at_most=1, case="small", doublings=3)],
    bad_inputs=[
        *bad_chunk_sizes("rows_per_chunk"),
        *not_floating("hidden", "weight"),
        *not_integer("target", rule="int64"),
        *mixed("dtype", "hidden", "weight"),
        *mixed("device", "hidden", "weight", "target"),
        refused("unknown reduction", "reduction must be one of mean, sum, none, got 'max'", reduction="max"),
        refused("narrow weight", "must have the same width D, got 5, 4", weight=lambda t: t[:, 1:]),
        refused("short target", "must have the same number of rows N, got 5, 4", target=lambda t: t[1:]),
        refused("wide bias", "bias and weight must have the same dtype", bias=torch.ones(5).double()),
        refused(
            "fewer classes than processes",
            "weight_shard must have at least one row on every process, got [1, 0]",
            weight=lambda t: t[:1],
        ),
        refused(
            "target above the vocabulary",
            "target must be at least 0 and below the vocabulary of 5, or ignore_index -100; got 7 at index 2",
            target=torch.tensor([0, 1, 7, 2, 3]),
        ),
    ],
)
