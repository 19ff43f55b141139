"""A gated feed-forward layer that never holds its wide tensors for all tokens."""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch import Dispatcher
from .arguments import ACTIVATIONS

__all__ = ["ACTIVATIONS", "FORMS", "geglu_feed_forward", "gelu_feed_forward"]

DISPATCHER = Dispatcher(
    "geglu_feed_forward",
    __name__,
    forms=("checkpoint", "token_chunks", "fused"),
    otherwise="token_chunks",
    kernels="fused",
)
FORMS = DISPATCHER.names


def geglu_feed_forward(
    hidden: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    *,
    activation: str = "geglu",
    residual: bool = False,
    norm_eps: float = 1e-5,
    tokens_per_chunk: int | None = None,
    tokens_kept: int | None = None,
    form: str = "auto",
) -> torch.Tensor:
    """Equals ``F.linear(value * F.gelu(gate), down_weight, down_bias)``, where ``value`` and ``gate`` are the halves of
    ``F.linear(hidden, up_weight, up_bias)``.

    ``hidden`` is ``[..., D]``, ``up_weight`` is ``[2F, D]`` and ``down_weight`` is ``[D, F]``, as in ``nn.Linear``.
    ``activation`` is ``geglu``, ``swiglu`` (``F.silu`` of the gate) or ``gelu``, which has no gate: ``up_weight``
    is then ``[F, D]``. If ``norm_weight`` or ``norm_bias`` is given, ``F.layer_norm`` of ``hidden`` comes first;
    ``residual`` adds ``hidden`` to the result.

    ``form="auto"`` takes ``fused`` on a GPU where Triton is installed, and ``token_chunks`` elsewhere. Both visit
    ``tokens_per_chunk`` tokens at a time (default 16,384), save only the input and recompute the wide tensors of a
    chunk in backward; gradients of weights are summed in float32. ``tokens_kept`` tokens keep their first product for
    backward, ``2*F`` elements each, which saves time at the cost of memory. Only first derivatives.
    """
    chosen = DISPATCHER.chosen(form, hidden if isinstance(hidden, torch.Tensor) else None)
    chunks = {"tokens_per_chunk": tokens_per_chunk, "tokens_kept": tokens_kept}
    given = {name: value for name, value in chunks.items() if value is not None}
    if given and chosen == "checkpoint":
        raise ValueError(f"{' and '.join(given)}: form 'checkpoint' makes no chunks; leave it out, or take 'fused'")
    result: torch.Tensor = DISPATCHER.function(chosen)(
        hidden, up_weight, down_weight, up_bias, down_bias, norm_weight, norm_bias,
        activation=activation, residual=residual, norm_eps=norm_eps, **given,
    )  # fmt: skip
    return result


def gelu_feed_forward(
    hidden: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """:func:`geglu_feed_forward` without a gate: ``activation="gelu"``, and ``up_weight`` is ``[F, D]``."""
    tensors = (hidden, up_weight, down_weight, up_bias, down_bias, norm_weight, norm_bias)
    return geglu_feed_forward(*tensors, **options, activation="gelu")
