"""The contracts of the ops, as memfix init wrote them from example_calls.py; the entry point memfix.contracts."""

from memfix import Budget, Contract, Dim, Integers, Scaling, TensorSpec

from .entropy import chunked_entropy, dense_entropy
from .mlp import checkpointed_mlp, plain_mlp
from .segments import masked_segment_mean, summed_segment_mean

entropy = Contract(
    "entropy",
    naive=dense_entropy,
    forms={"chunked": chunked_entropy},
    dims={"N": Dim(1, 70), "D": Dim(1, 70), "rows": Dim(1, 70)},
    inputs=[
        TensorSpec("logits", "N D", grad=True),
    ],
    cases={
        "example": {"N": 1024, "D": 8000, "rows": 64, "dtype": "float32"},
        # the sizes at which memory ran out: nothing is computed at them
        "policy": {"N": 16_384, "D": 151_936, "rows": 512, "dtype": "bfloat16"},
    },
    budgets=[
        Budget("chunked", phase="train", case="example", times_below_naive=2.3),
        Budget("chunked", phase="train", bytes="2*N*D*e + 2.5*D*rows*e + 4096"),
        Budget("chunked", phase="held", bytes="N*e + 4096"),
    ],
    scaling=[
        Scaling("chunked", dim="N", case="example", phase="train"),
        Scaling("chunked", dim="D", case="example", phase="train"),
    ],
)

segment_mean = Contract(
    "segment_mean",
    naive=masked_segment_mean,
    forms={"summed": summed_segment_mean},
    dims={"N": Dim(1, 70), "D": Dim(1, 70), "segments": Dim(1, 70)},
    inputs=[
        TensorSpec("features", "N D", grad=True),
        TensorSpec("segment", "N", dtype="int64", values=Integers("segments")),
    ],
    cases={"example": {"N": 600, "D": 24, "segments": 40, "dtype": "float32"}},
    budgets=[
        Budget("summed", phase="train", case="example", times_below_naive=36),
        Budget("summed", phase="train", bytes="2*N*D*max(e, 4) + 5.75*D*segments + 4096"),
        Budget("summed", phase="train", case="example", bytes=68544),
        Budget("summed", phase="held", bytes="4.25*N*D + 4096"),
        Budget("summed", phase="held", case="example", bytes=4200),
    ],
    scaling=[
        Scaling("summed", dim="N", case="example", phase="train"),
        Scaling("summed", dim="D", case="example", phase="train"),
        Scaling("summed", dim="segments", case="example", phase="train"),
    ],
)

mlp = Contract(
    "mlp",
    naive=plain_mlp,
    forms={"checkpointed": checkpointed_mlp},
    dims={"N": Dim(1, 70), "D": Dim(1, 70), "V": Dim(1, 70), "K": Dim(1, 70), "rows": Dim(1, 70)},
    inputs=[
        TensorSpec("x", "N D", grad=True),
        TensorSpec("up", "D V", grad=True),
        TensorSpec("down", "V K", grad=True),
    ],
    cases={"example": {"N": 2048, "D": 64, "V": 256, "K": 80, "rows": 128, "dtype": "float32"}},
    budgets=[
        Budget("checkpointed", phase="train", case="example", times_below_naive=3.6),
        Budget("checkpointed", phase="train", bytes="1.25*N*K*e + 1.75*N*D*e + 3*V*rows*e + 4096"),
        Budget("checkpointed", phase="held", bytes="N*K*e + 4096"),
    ],
    scaling=[
        Scaling("checkpointed", dim="N", case="example", phase="train"),
        Scaling("checkpointed", dim="V", case="example", phase="train"),
    ],
)
