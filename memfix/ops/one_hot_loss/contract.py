"""The contract of the loss without one-hot rows. The incident: 32 sequences of 128 tokens, 50,000 words, float32."""

from __future__ import annotations

from ...contract import Contract, Dim, Form, Integers, TensorSpec
from ...laws import Budget, Scaling, SpeedBudget, Tolerance, at_most, below_naive
from ..bad_inputs import mixed, not_classes, not_floating, not_integer, refused
from .gather import gather_one_hot_loss
from .index import index_one_hot_loss
from .naive import naive_one_hot_loss

# masks, columns and losses of every token
_SMALL = "48*N + KiB"
# log-probabilities of a tile, in float32 or wider
_TILE = "min(N*V, 8*MiB + V)*max(e, 4)"


contract = Contract(
    "one_hot_loss",
    naive=naive_one_hot_loss,
    forms={
        "gather": gather_one_hot_loss,
        # small calls then have several tiles
        "index": Form(index_one_hot_loss, compared_with={f"{__package__}.index.TILE_BYTES": 512}),
    },
    dims={"N": Dim(1, 128), "V": Dim(2, 160)},
    choices={"reduction": ("mean", "sum", "none"), "ignore_index": (-100, 0)},
    inputs=[
        TensorSpec("logits", "N V", grad=True),
        TensorSpec("target", "N", dtype="int64", values=Integers("V"), sometimes="ignore_index"),
    ],
    cases={
        "incident": {"N": 4096, "V": 50_000, "dtype": "float32"},
        # the report's reduced vocabulary
        "capped": {"N": 4096, "V": 10_000, "dtype": "float32"},
        "medium": {"N": 4096, "V": 10_000, "dtype": "bfloat16"},
        "small": {"N": 256, "V": 2000, "dtype": "float32"},
    },
    # the loss of a confident token is a small difference of logits
    tolerance=Tolerance(ulps=2, absolute_ulps=4),
    budgets=[
        # log_softmax copies logits that are not contiguous
        *at_most("gather", forward=f"2*N*V*e + {_SMALL}", held=f"N*V*e + {_SMALL}", train=f"3*N*V*e + {_SMALL}"),
        *below_naive("index", "incident", forward=70, held=1000, train=2.9),
        Budget("index", case="incident", times_below={"gather": 2.9}),
        *at_most(
            "index",
            saved="N*V*e + 8*N",  # the logits
            forward=f"{_TILE} + {_SMALL}",
            held=_SMALL,
            # softmax copies the logits and the result of a tile if they are not contiguous
            train=f"N*V*e + 2*{_TILE} + {_SMALL}",
        ),
    ],
    scaling=[
        Scaling("index", dim="N", at_most=1, case="small", doublings=3),
        Scaling("index", dim="V", at_most=1, case="small", doublings=3),
    ],
    speed=[
        SpeedBudget("gather", case="small", times_naive=1.0),
        SpeedBudget("index", case="small", times_naive=1.0),
        SpeedBudget("index", case="incident", times_naive=0.85, device="cuda"),
    ],
    bad_inputs=[
        *not_floating("logits"),
        *not_integer("target", rule="int64"),
        *mixed("device", "logits", "target"),
        refused("flat logits", "logits must be [N, V], got shape [25]", logits=lambda t: t.flatten()),
        refused("two-dimensional target", "target must be [N], got shape [1, 5]", target=lambda t: t[None]),
        refused("short target", "must have the same number of rows N, got 5, 4", target=lambda t: t[1:]),
        refused("no classes", "at least one row and one class, got shape [5, 0]", logits=lambda t: t[:, :0]),
        refused("unknown reduction", "reduction must be one of mean, sum, none, got 'max'", reduction="max"),
        *not_classes("target"),
    ],
    repeats_backward=True,
)
