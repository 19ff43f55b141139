"""The contract of matmul: cuBLAS's result, and no memory but the output."""

from __future__ import annotations

from ...contract import Contract, Dim, Form, TensorSpec
from ...laws import SpeedBudget, Tolerance, at_most
from ..bad_inputs import mixed, refused
from .naive import naive_matmul
from .one_thread import one_thread_matmul
from .tiled import tiled_matmul
from .triton import Tile, triton_matmul

# with these tiles small calls have several, as with the 16 x 16 tiles of the CUDA kernels
_SMALL_TILES = {f"{__package__}.triton.TILE": Tile(rows=16, columns=16, terms=16)}
_FORMS = {
    "one_thread": Form(one_thread_matmul, has_kernels=True, language="cuda"),
    "tiled": Form(tiled_matmul, has_kernels=True, language="cuda"),
    "triton": Form(triton_matmul, has_kernels=True, compared_with=_SMALL_TILES),
}

contract = Contract(
    "matmul",
    naive=naive_matmul,
    forms=_FORMS,
    # up to three tiles of 16 in each direction
    dims={"M": Dim(1, 40), "N": Dim(1, 40), "K": Dim(1, 40)},
    inputs=[TensorSpec("left", "M K", grad=True), TensorSpec("right", "K N", grad=True)],
    dtypes=("float32",),
    cases={
        "square": {"M": 4096, "N": 4096, "K": 4096, "dtype": "float32"},
        # the model's head: 32 sequences of 128 tokens, width 512, 10,000 words
        "head": {"M": 4096, "N": 10_000, "K": 512, "dtype": "float32"},
        "odd": {"M": 1023, "N": 1025, "K": 511, "dtype": "float32"},
        "small": {"M": 512, "N": 512, "K": 512, "dtype": "float32"},
    },
    # kernels sum in the order of the terms, cuBLAS in another
    tolerance=Tolerance(),
    budgets=[
        budget
        for form in _FORMS
        for budget in at_most(form, forward="M*N*e", held="M*N*e", saved="M*K*e + K*N*e", train="M*N*e + M*K*e + K*N*e")
    ],
    speed=[
        SpeedBudget("one_thread", case="small", times_naive=60.0, device="cuda"),
        SpeedBudget("tiled", case="small", times_naive=60.0, device="cuda"),
        SpeedBudget("triton", case="small", times_naive=20.0, device="cuda"),
    ],
    bad_inputs=[
        *mixed("device", "left", "right"),
        refused("wide left", "left must be float32, got torch.float64", left=lambda t: t.double()),
        refused("narrow right", "right must be float32, got torch.bfloat16", right=lambda t: t.bfloat16()),
        refused("batched left", "left must be [M, K], got shape [1, 5, 5]", left=lambda t: t[None]),
        refused("flat right", "right must be [K, N], got shape [25]", right=lambda t: t.flatten()),
        refused("short right", "must have the same number of terms K, got 5, 4", right=lambda t: t[1:]),
    ],
    repeats_backward=True,
)
