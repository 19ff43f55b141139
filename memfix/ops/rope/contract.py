"""The contract of rope. The incident has 131,072 positions of 32 heads of width 80, in bfloat16."""

from __future__ import annotations

from ...contract import Contract, Dim, Form, TensorSpec
from ...laws import Scaling, SpeedBudget, Tolerance, at_most, below_naive
from ..bad_inputs import bad_chunk_sizes, not_floating, refused
from .floor import two_copies
from .naive import naive_rope
from .reported import reported_low_precision_rope
from .shared_table import shared_table_rope
from .triton import Tiles, triton_rope

_FROM_THE_START = {"offset": 0, "dtype": "bfloat16"}
X = "B*T*H*D*e"
# 16-bit inputs: float32 scratch for half of a chunk's width; wider dtypes are written straight into the output
SCRATCH = "B*min(positions_per_chunk, T)*H*D//2*max(0, 8 - 2*e)"
# with tiles of 8 pairs even small calls have several programs, and masked heads and tokens
KERNEL = Form(triton_rope, has_kernels=True, compared_with={f"{__package__}.triton.TILES": Tiles(pairs=8)})
_TABLE = "max(2048, 2*(T + offset))*D*max(e, 4)"
DIMS = {"B": Dim(1, 3), "T": Dim(1, 20), "H": Dim(1, 3), "D": Dim(2, 10, multiple_of=2)}

contract = Contract(
    "rope",
    naive=naive_rope,
    floor=two_copies,
    forms={
        "reported_low_precision": Form(
            reported_low_precision_rope,
            reported=True,
            known_unequal={
                "float64": "frequencies are rounded to float32",
                "float32": "angles are rounded to float32: off by up to 0.009 radians below position 131,072",
                "bfloat16": "positions above 256 are rounded: 1,409 of 131,072 are distinct",
                "float16": "positions above 2,048 are rounded, and infinite from 65,520 on",
            },
        ),
        "shared_table": shared_table_rope,
        "triton": KERNEL,
    },
    # the last position is at most 131,071: beyond it the table of every width that is drawn would double once more
    dims={**DIMS, "offset": Dim(0, 131_052), "positions_per_chunk": Dim(1, 24)},
    choices={"base": (10_000.0, 500_000.0)},
    inputs=[TensorSpec("x", "B T H D", grad=True)],
    cases={
        "incident": {"B": 1, "T": 131_072, "H": 32, "D": 80, **_FROM_THE_START, "positions_per_chunk": 4096},
        "medium": {"B": 2, "T": 4096, "H": 32, "D": 128, **_FROM_THE_START, "positions_per_chunk": 1024},
        "small": {"B": 2, "T": 128, "H": 4, "D": 32, **_FROM_THE_START, "positions_per_chunk": 64, "dtype": "float32"},
    },
    budgets=[
        # a rotation is linear: backward needs the angles but not ``x``. Only the output is held, and only the table
        # that all calls share is kept
        *below_naive("shared_table", "incident", forward=15, train=8),
        *at_most(
            "shared_table", saved="0", forward=f"{X} + {SCRATCH}", held=X, train=f"2*{X} + {SCRATCH}", kept=_TABLE
        ),
        # one kernel without scratch allocates nothing but the results
        *below_naive("triton", "incident", forward=16, train=8),
        *at_most("triton", saved="0", forward=X, held=X, train=f"2*{X}", kept=_TABLE),
    ],
    scaling=[
        Scaling("shared_table", dim="T", at_most=1, case="small"),
        Scaling("triton", dim="T", at_most=1, case="small"),
    ],
    speed=[
        SpeedBudget("shared_table", case="small", times_naive=1.0),
        SpeedBudget("shared_table", case="medium", times_naive=1.0, device="cuda"),
        SpeedBudget("shared_table", case="incident", times_naive=1.0, device="cuda"),
        SpeedBudget("triton", case="medium", times_naive=1.0, device="cuda"),
        SpeedBudget("triton", case="incident", times_naive=1.0, device="cuda"),
    ],
    bad_inputs=[
        *bad_chunk_sizes("positions_per_chunk"),
        *not_floating("x"),
        refused("odd width", "x must have an even width D of at least 2, got D=3", x=lambda t: t[..., 1:]),
        refused("no heads", "x must be [..., T, H, D], got shape [3, 4]", x=lambda t: t[0, 0]),
        refused("negative offset", "offset must be at least 0, got -1", offset=-1),
        refused("fractional offset", "offset must be an int, got 0.5", TypeError, offset=0.5),
        refused("base of zero", "base must be above 0 and finite, got 0.0", base=0.0),
        refused("infinite base", "base must be above 0 and finite, got inf", base=float("inf")),
        refused("base that is no number", "base must be a number, got '10000'", TypeError, base="10000"),
    ],
    tolerance=Tolerance(rms_factor=1.5),
    repeats_backward=True,
)
