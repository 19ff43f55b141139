"""The gated feed-forward layer compared with Liger's and torch.compile of naive, at the incident and with SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from memfix.ops.geglu_feed_forward.contract import contract

from . import Comparison, Entry, Peer, Table

MaybeTensor = torch.Tensor | None


def _liger() -> Callable[..., Any]:
    """The layer as in ``LigerGEGLUMLP`` and ``LigerSwiGLUMLP``: two products for value and gate, gelu by tanh."""
    from liger_kernel.ops.geglu import LigerGELUMulFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def layer(
        hidden: torch.Tensor,
        up_weight: torch.Tensor,
        down_weight: torch.Tensor,
        up_bias: MaybeTensor,
        down_bias: MaybeTensor,
        norm_weight: MaybeTensor,
        norm_bias: MaybeTensor,
        *,
        activation: str,
    ) -> torch.Tensor:
        normed = F.layer_norm(hidden, hidden.shape[-1:], norm_weight, norm_bias)
        biases = (None, None) if up_bias is None else up_bias.chunk(2)
        value, gate = (F.linear(normed, *half) for half in zip(up_weight.chunk(2), biases, strict=True))
        function = LigerGELUMulFunction if activation == "geglu" else LigerSiLUMulFunction
        return F.linear(function.apply(gate, value), down_weight, down_bias)

    return layer


COMPARISON = Comparison(
    peers={
        "liger": Peer("liger-kernel", _liger, ("liger_kernel", "triton")),
        "torch_compile": Peer("torch", lambda: torch.compile(contract.naive), ("triton",)),
    },
    tables={
        "incident": Table(
            [
                Entry(name, settings)
                for name in ("incident_bf16", "incident")
                for settings in ("activation=geglu", "activation=swiglu")
            ],
            simulated=True,
        ),
    },
    error_at={"B": 2},
)
