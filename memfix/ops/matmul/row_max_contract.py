"""The contract of ``row_max``: exactly the result of a fold of ``torch.fmax``."""

from __future__ import annotations

from typing import Any

import torch

from ...contract import Contract, Dim, Form, TensorSpec
from ...laws import Budget, SpeedBudget, Tolerance
from ..bad_inputs import refused
from .naive import naive_row_max
from .row_maxima import cuda_row_max


def _with_nans(shape: tuple[int, ...], generator: torch.Generator, dims: Any) -> torch.Tensor:
    """Draw normal numbers, a third of them replaced by NaN, and one row in eight replaced altogether."""
    x_RC = torch.randn(shape, generator=generator)
    is_nan = torch.rand(shape, generator=generator) < 1 / 3
    is_nan |= torch.rand(shape[0], 1, generator=generator) < 1 / 8
    return x_RC.masked_fill_(is_nan, float("nan"))


contract = Contract(
    "row_max",
    naive=naive_row_max,
    forms={"cuda": Form(cuda_row_max, has_kernels=True, language="cuda")},
    # a block has 256 threads, each of which loads up to three elements of these rows
    dims={"R": Dim(1, 12), "C": Dim(1, 700)},
    inputs=[TensorSpec("x", "R C", values=_with_nans)],
    dtypes=("float32",),
    cases={
        "large": {"R": 16_384, "C": 1024, "dtype": "float32"},
        "small": {"R": 256, "C": 100, "dtype": "float32"},
    },
    tolerance=Tolerance(factor=0, rms_factor=0, ulps=0, sum_ulps=0),  # a maximum rounds nothing
    budgets=[Budget("cuda", phase="forward", bytes="R*e")],
    speed=[SpeedBudget("cuda", case="small", phase="forward", times_naive=1.0, device="cuda")],
    bad_inputs=[
        refused("wide x", "x must be float32, got torch.float64", x=lambda t: t.double()),
        refused("flat x", "x must be [R, C], got shape [25]", x=lambda t: t.flatten()),
        refused("x with a gradient", "row_max has no gradient; detach x", RuntimeError, x=lambda t: t.requires_grad_()),
    ],
)
