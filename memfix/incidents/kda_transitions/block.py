"""Kimi Delta Attention as a block of a model: norm, projections, gates, the op, and the output projection."""

# B batch, T tokens, D width, H heads, K key width, V value width

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ...ops.arguments import require_at_least_one, require_one_of
from ...ops.kda import kda
from ...ops.kda.arguments import DEFAULT_CHUNK_SIZE
from ...ops.kda.contract import contract

SCAN, SEQUENTIAL = KDA_MODES = ("scan", "sequential")

# forms of the scan; those in REPLAYED are the report's code before and after its fix, the others are forms of the op
REPLAYED = ("naive", "reported")
SCAN_FORMS = ("auto", *REPLAYED, "streamed", "wy", "triton")

# the report's range (KDA-22); it recommends 16 as well, which lies outside (KDA-30)
RECOMMENDED = range(32, 129)

# initial decays, from slow to fast: steps over the channels of a head, rates over the heads
_FIRST_STEPS = (-3.0, -1.0)  # powers of ten
_FIRST_RATES = (1.0, 16.0)


def validated_chunk_size(chunk_size: object) -> int:
    """Return ``chunk_size``, which must be an int of at least 1. Warn if it is outside the recommended range."""
    size = require_at_least_one("memory_chunk_size", chunk_size)
    if size not in RECOMMENDED:
        warnings.warn(
            f"memory_chunk_size {size} is outside the recommended {RECOMMENDED[0]} to {RECOMMENDED[-1]}: "
            "smaller chunks take more launches, larger ones more memory",
            stacklevel=3,
        )
    return size


Attend = Callable[..., torch.Tensor]
"""``attend(q, k, v, g, beta)`` returns an output of v's shape."""


def attend_of(kda_mode: str, form: str, chunk_size: int) -> Attend:
    """The op as a block calls it: its output without the final state."""
    require_one_of("kda_mode", kda_mode, KDA_MODES)
    require_one_of("form", form, SCAN_FORMS)

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        if kda_mode == SEQUENTIAL:
            o_BTHV, _ = kda(*tensors, form=SEQUENTIAL)
        elif form == "naive":
            o_BTHV, _ = contract.naive(*tensors)
        elif form == "reported":
            o_BTHV, _ = contract.function(form)(*tensors, chunk_size=chunk_size)
        else:
            o_BTHV, _ = kda(*tensors, chunk_size=chunk_size, form=form)
        return o_BTHV

    return attend


class KDABlock(nn.Module):
    """``x + out(norm(kda(q, k, v, g, beta)) * sigmoid(gate))``, with ``x`` of ``[B, T, D]``.

    The projections read the normalised ``x``. The vectors of q and k have norm 1. The log-decay of each channel is
    ``g = -exp(log_rate) * softplus(decay(x) + decay_bias)``, in float32 or wider; beta is a sigmoid for each head. The
    paper's short convolutions are left out: they hold hardly any memory.

    ``kda_mode`` is ``scan``, by ``form`` and in chunks of ``memory_chunk_size`` tokens, or ``sequential``, token by
    token. None of these three arguments changes a parameter or, but for rounding, a result.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        head_width: int,
        value_width: int | None = None,
        *,
        memory_chunk_size: int = DEFAULT_CHUNK_SIZE,
        kda_mode: str = SCAN,
        form: str = "auto",
    ) -> None:
        super().__init__()
        self.memory_chunk_size = validated_chunk_size(memory_chunk_size)
        self.attend = attend_of(kda_mode, form, self.memory_chunk_size)
        self.num_heads = num_heads
        keys, values = num_heads * head_width, num_heads * (value_width or head_width)
        self.norm = nn.RMSNorm(width)
        self.query = nn.Linear(width, keys, bias=False)
        self.key = nn.Linear(width, keys, bias=False)
        self.value = nn.Linear(width, values, bias=False)
        self.decay = nn.Linear(width, keys, bias=False)
        self.decay_bias = nn.Parameter(torch.empty(keys))
        self.log_rate = nn.Parameter(torch.empty(num_heads))
        self.beta = nn.Linear(width, num_heads, bias=False)
        self.gate = nn.Linear(width, values, bias=False)
        self.out_norm = nn.RMSNorm(values // num_heads)
        self.out = nn.Linear(values, width, bias=False)
        self.init_decay()

    @torch.no_grad()
    def init_decay(self) -> None:
        """Spread the initial decays evenly over channels and heads, without random numbers."""
        steps_K = torch.logspace(*_FIRST_STEPS, self.decay_bias.numel() // self.num_heads)
        # the inverse of softplus
        self.decay_bias.copy_(steps_K.expm1().log().repeat(self.num_heads))
        self.log_rate.copy_(torch.linspace(*_FIRST_RATES, self.num_heads).log())

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        normed_BTD = self.norm(x_BTD)
        mixed_BTHV = self._mixed(normed_BTD)
        gate_BTHV = self._heads(self.gate(normed_BTD)).sigmoid()
        return x_BTD + self.out((self.out_norm(mixed_BTHV) * gate_BTHV).flatten(-2))

    def _mixed(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.attend(
            F.normalize(self._heads(self.query(x_BTD)), dim=-1),
            F.normalize(self._heads(self.key(x_BTD)), dim=-1),
            self._heads(self.value(x_BTD)),
            self._log_decay(x_BTD),
            self.beta(x_BTD).sigmoid(),
        )

    def _log_decay(self, x_BTD: torch.Tensor) -> torch.Tensor:
        # in 16 bits a decay near 1 would be rounded to 1
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        steps_BTHK = F.softplus(self._heads(self.decay(x_BTD).to(wide) + self.decay_bias.to(wide)))
        rate_H1 = self.log_rate.to(wide).exp()[:, None]
        return -rate_H1 * steps_BTHK

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.num_heads, -1))
