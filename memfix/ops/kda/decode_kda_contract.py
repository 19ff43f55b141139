"""The contract of one generation step: naive's results for a sequence of one token, and few copies of the state."""

from __future__ import annotations

import torch

from ...contract import WIDE, BadInput, Contract, Dim, LogUniform, TensorSpec, Uniform, setting
from ...laws import Budget, Scaling, Tolerance
from ..bad_inputs import mixed, not_floating
from .decode import decode_kda
from .naive import naive_kda

_W = "max(e, 4)"
_STATE = f"B*H*K*V*{_W}"
# a token's vectors, upcast, and those that autograd saves
_VECTORS = f"B*H*(8*K + 6*V + 4)*{_W}"


def naive_decode_kda(
    q_BHK: torch.Tensor,
    k_BHK: torch.Tensor,
    v_BHV: torch.Tensor,
    g_BHK: torch.Tensor,
    beta_BH: torch.Tensor,
    state_BHKV: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``naive_kda`` of a sequence of one token."""
    q, k, v, g, beta = (tensor.unsqueeze(1) for tensor in (q_BHK, k_BHK, v_BHV, g_BHK, beta_BH))
    o_B1HV, state_BHKV = naive_kda(q, k, v, g, beta, state_BHKV, scale=scale)
    return o_B1HV.squeeze(1), state_BHKV


contract = Contract(
    "decode_kda",
    naive=naive_decode_kda,
    forms={"step": decode_kda},
    dims={"B": Dim(1, 4), "H": Dim(1, 3), "K": Dim(1, 12), "V": Dim(1, 12)},
    choices={"scale": (None, 0.3)},
    inputs=[
        TensorSpec("q", "B H K", grad=True),
        TensorSpec("k", "B H K", grad=True),
        TensorSpec("v", "B H V", grad=True),
        TensorSpec("g", "B H K", grad=True, values=LogUniform(-1000.0, -0.001), sometimes=0.0, also_in=("float32",)),
        TensorSpec("beta", "B H", grad=True, values=Uniform(-2.0, 2.0), also_in=("float32",)),
        TensorSpec("state", "B H K V", dtype=WIDE, grad=True),
    ],
    cases={
        "batch": {"B": 64, "H": 16, "K": 128, "V": 128, "dtype": "bfloat16"},
        "small": {"B": 2, "H": 2, "K": 16, "V": 16},
    },
    tolerance=Tolerance(rms_factor=1.5),
    budgets=[
        Budget("step", phase="forward", bytes=f"3*{_STATE} + {_VECTORS}"),
        Budget("step", phase="held", bytes=f"3*{_STATE} + {_VECTORS}"),
        Budget("step", phase="train", bytes=f"5*{_STATE} + 2*{_VECTORS}"),
        Budget("step", phase="forward", case="batch", times_below_naive=1.2),
    ],
    scaling=[Scaling("step", dim="K", at_most=1, case="small")],
    bad_inputs=[
        *not_floating("q", "g"),
        *mixed("dtype", "q", "k", "v"),
        *mixed("device", "q", "state"),
        BadInput("a token axis", setting(q=lambda t: t.unsqueeze(1)), "q must be [B, H, K], got shape [4, 1, 3, 5]"),
        BadInput("beta a channel", setting(beta=lambda t: t[..., None]), "beta must be [B, H], got shape [4, 3, 1]"),
        BadInput(
            "16-bit state",
            setting(state=lambda t: t.bfloat16()),
            "state must be torch.float32 to go with torch.float32 inputs, got torch.bfloat16",
        ),
        BadInput(
            "state of another shape",
            setting(state=lambda t: t[..., 1:]),
            "state must have shape [4, 3, 5, 5] to go with q, got [4, 3, 5, 4]",
        ),
        BadInput("no state", setting(state=None), "state must be a tensor, got NoneType", TypeError),
    ],
    repeats_backward=True,
)
