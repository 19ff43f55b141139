"""The NPT layer (Neuro-Plastic Transformer), in which attention changes the first weight of the feed-forward.

In an NPT layer the output of attention is not added to the hidden states. It gives each token a modulation ``m`` of
``R`` numbers, and the first projection of the feed-forward runs with the weight ``W + A diag(m) B``. ``A`` and ``B``
train and ``W`` is frozen. As published, that projection is ``gate_proj`` of a Llama and ``c_fc`` of a GPT-2.
"""

# D width, F width of the feed-forward, R rank

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...laws import NAIVE
from ...ops.arguments import require_at_least_one, require_one_of
from ...ops.npt_linear import FORMS as OP_FORMS
from ...ops.npt_linear import npt_linear
from ...ops.npt_linear.contract import contract
from ...ops.npt_linear.reported import reported_npt_linear
from .int8_linear import Int8Linear

REPORTED = "reported"
FORMS = (*OP_FORMS, NAIVE, REPORTED)
OFFLOAD = "offload"  # the op's form that computes the low-rank products on the CPU
LINEAR, TANH = "linear", "tanh"
MODULATIONS = (LINEAR, TANH)
TANH_SCALE = 0.1


class NptLinear(nn.Module):
    """``base`` with a weight of its own for every token: ``hidden @ (W + A diag(m) B) + bias``.

    ``m`` is ``attention @ A``, or ``0.1 * tanh(attention @ A)``; :meth:`remember` receives the attention. ``base`` is
    an ``nn.Linear``, a layer with a ``[D, F]`` weight and an attribute ``nf`` (transformers' ``Conv1D``), or a layer
    of 8-bit weights, which computes its own product. ``B`` starts at zero, so the weight starts as ``W``.
    """

    def __init__(
        self, base: nn.Module, rank: int, *, modulation: str = LINEAR, form: str = "auto", drops_attention: bool = True
    ) -> None:
        super().__init__()
        require_at_least_one("rank", rank)
        require_one_of("modulation", modulation, MODULATIONS)
        require_one_of("form", form, FORMS)
        self.base, self.modulation, self.form, self.drops_attention = base, modulation, form, drops_attention
        (width, ffn_width), weight = widths_of(base), _weight(base)
        # 8-bit weights have no floating dtype that A and B could share
        dtype = weight.dtype if weight.is_floating_point() else torch.float32
        self.a = nn.Parameter(torch.randn(width, rank, device=weight.device, dtype=dtype) / width**0.5)
        self.b = nn.Parameter(torch.zeros(rank, ffn_width, device=weight.device, dtype=dtype))
        self._attention: torch.Tensor | None = None

    def remember(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Keep the output of the layer's attention, a tensor or a tuple that starts with one. A forward hook."""
        self._attention = output[0] if isinstance(output, tuple) else output
        if not self.drops_attention:
            return None
        nothing = self._attention.new_zeros(()).expand_as(self._attention)  # to be added to the hidden states
        return (nothing, *output[1:]) if isinstance(output, tuple) else nothing

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._attention is None:
            raise RuntimeError("the feed-forward of this layer ran before its attention: see convert()")
        # so that the layer keeps no tensor after its forward
        attention, self._attention = self._attention, None
        modulation = attention @ self.a
        if self.modulation == TANH:
            modulation = TANH_SCALE * modulation.tanh()
        weight, bias = _weight(self.base), self.base.bias
        if not weight.is_floating_point():
            where = torch.device("cpu") if self.form == OFFLOAD else hidden.device
            return self.base(hidden) + _change(hidden, self.a, self.b, modulation, where)
        weight_DF = weight.T if isinstance(self.base, nn.Linear) else weight
        out = _function(self.form)(hidden, weight_DF, self.a, self.b, modulation)
        return out + bias if isinstance(bias, torch.Tensor) else out


def widths_of(base: nn.Module) -> tuple[int, int]:
    """The widths D and F of a layer that maps ``[..., D]`` to ``[..., F]``."""
    if isinstance(base, (nn.Linear, Int8Linear)):  # bitsandbytes' 8-bit layer is an nn.Linear
        return base.in_features, base.out_features
    if hasattr(base, "nf"):
        width, ffn_width = _weight(base).shape
        return width, ffn_width
    raise TypeError(
        "the first projection of a feed-forward must be an nn.Linear, or have a weight of [D, F] and an attribute nf "
        f"like transformers' Conv1D; got {type(base).__name__}"
    )


def _weight(base: nn.Module) -> torch.Tensor:
    assert isinstance(base.weight, torch.Tensor)
    return base.weight


def _function(form: str) -> Callable[..., torch.Tensor]:
    """The op in ``form``; ``naive`` and ``reported`` are the report's own code."""
    if form in (NAIVE, REPORTED):
        return contract.naive if form == NAIVE else reported_npt_linear
    return functools.partial(npt_linear, form=form)


def _change(
    hidden: torch.Tensor, a_DR: torch.Tensor, b_RF: torch.Tensor, modulation: torch.Tensor, where: torch.device
) -> torch.Tensor:
    """``((hidden @ a) * modulation) @ b``, computed on ``where``. Keeps no tensor of width F for backward."""
    modulated = (hidden.to(where) @ a_DR.to(where)) * modulation.to(where)
    return (modulated @ b_RF.to(where)).to(hidden.device)
