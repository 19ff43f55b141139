"""The contract of rope with positions from the caller, either shared by all sequences or different for each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...contract import Contract, Dim, Integers, TensorSpec
from ...laws import Scaling, Tolerance, at_most, below_naive
from ..bad_inputs import bad_chunk_sizes, mixed, not_floating, not_integer, refused
from .contract import DIMS, KERNEL, SCRATCH, X
from .naive import naive_rope
from .shared_table import shared_table_rope
from .triton import triton_rope

_ROWS = "B*T*D*max(e, 4)"  # table rows gathered for these positions
_TABLE = "max(2048, 2*max_positions)*D*max(e, 4)"  # shared by all calls


def naive_rope_positions(
    x: torch.Tensor, positions: torch.Tensor, *, base: float = 10_000.0, is_shared: bool = False
) -> torch.Tensor:
    """Call ``naive_rope`` with ``positions`` of ``[B, T]``, or if ``is_shared`` with the first row, as ``[T]``."""
    return naive_rope(x, base=base, positions=positions[0] if is_shared else positions)


def shared_table_rope_positions(
    x: torch.Tensor,
    positions: torch.Tensor,
    *,
    base: float = 10_000.0,
    is_shared: bool = False,
    is_promised: bool = True,
    max_positions: int | None = None,
    positions_per_chunk: int | None = None,
) -> torch.Tensor:
    """Call ``shared_table_rope`` with ``positions``, and with ``max_positions`` if ``is_promised``."""
    keywords = _position_keywords(positions, is_shared, is_promised, max_positions)
    return shared_table_rope(x, base=base, positions_per_chunk=positions_per_chunk, **keywords)


def triton_rope_positions(
    x: torch.Tensor,
    positions: torch.Tensor,
    *,
    base: float = 10_000.0,
    is_shared: bool = False,
    is_promised: bool = True,
    max_positions: int | None = None,
) -> torch.Tensor:
    """Call ``triton_rope`` with ``positions``, and with ``max_positions`` if ``is_promised``."""
    return triton_rope(x, base=base, **_position_keywords(positions, is_shared, is_promised, max_positions))


def _position_keywords(
    positions: torch.Tensor, is_shared: bool, is_promised: bool, max_positions: int | None
) -> dict[str, Any]:
    """Return the keywords ``positions`` and, if ``is_promised``, ``max_positions``.

    Off the CPU ``max_positions`` is always given: without it rope reads the values, and a simulated GPU has none.
    """
    is_given = is_promised or positions.device.type != "cpu"
    return {
        "positions": positions[0] if is_shared else positions,
        "max_positions": max_positions if is_given else None,
    }


contract = Contract(
    "rope_positions",
    naive=naive_rope_positions,
    forms={
        "shared_table": shared_table_rope_positions,
        "triton": replace(KERNEL, function=triton_rope_positions),
    },
    dims={**DIMS, "max_positions": Dim(1, 131_072), "positions_per_chunk": Dim(1, 24)},
    choices={"base": (10_000.0, 500_000.0), "is_shared": (False, True), "is_promised": (True, False)},
    inputs=[
        TensorSpec("x", "B T H D", grad=True),
        TensorSpec("positions", "B T", dtype="int64", values=Integers("max_positions")),
    ],
    cases={
        "packed": {"B": 2, "T": 4096, "H": 32, "D": 128, "max_positions": 4096, "positions_per_chunk": 1024}
        | {"dtype": "bfloat16"},
        "small": {"B": 2, "T": 128, "H": 4, "D": 32, "max_positions": 128, "positions_per_chunk": 64},
    },
    budgets=[
        *below_naive("shared_table", "packed", forward=8),
        *at_most(
            "shared_table",
            forward=f"{X} + {SCRATCH} + {_ROWS}",
            held=f"{X} + {_ROWS}",
            train=f"2*{X} + {SCRATCH} + {_ROWS}",
            kept=_TABLE,
        ),
        # the kernel reads the table's rows in place
        *below_naive("triton", "packed", forward=16),
        *at_most("triton", saved="B*T*8", forward=X, held=X, train=f"2*{X}", kept=_TABLE),
    ],
    scaling=[
        Scaling("shared_table", dim="T", at_most=1, case="small"),
        Scaling("triton", dim="T", at_most=1, case="small"),
    ],
    bad_inputs=[
        *bad_chunk_sizes("positions_per_chunk"),
        *not_floating("x"),
        *not_integer("positions"),
        *mixed("device", "x", "positions"),
        refused(
            "positions beyond what is promised",
            "positions must be below max_positions=5, got",
            positions=lambda t: t + 5,
        ),
        refused("negative positions", "positions must be at least 0, got", positions=lambda t: t - 7),
        refused(
            "too few positions",
            "positions must be [..., T] and broadcast to [3, 5], got shape [3, 4]",
            positions=lambda t: t[:, 1:],
        ),
        refused(
            "positions of other sequences",
            "positions must be [..., T] and broadcast to [3, 5], got shape [2, 5]",
            positions=lambda t: t[:2],
        ),
        refused("odd width", "x must have an even width D of at least 2, got D=3", x=lambda t: t[..., 1:]),
    ],
    tolerance=Tolerance(rms_factor=1.5),
    repeats_backward=True,
)
