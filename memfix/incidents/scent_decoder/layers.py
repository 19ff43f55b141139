"""The layers of the decoder, with the report's names and arguments: PreNorm, Attention, FeedForward, ResidualBlock."""

# B batch, N positions, M tokens of the context, D width, H heads, K width of a head

from __future__ import annotations

import torch
from torch import nn

from ...laws import NAIVE
from ...ops.arguments import require_at_least_one, require_one_of
from ...ops.attention import FORMS as ATTENTION_OP_FORMS
from ...ops.attention import attention
from ...ops.attention.naive import naive_attention
from ...ops.geglu_feed_forward import FORMS as FEED_FORWARD_OP_FORMS
from ...ops.geglu_feed_forward import geglu_feed_forward
from ...ops.geglu_feed_forward.naive import naive_geglu_feed_forward

ATTENTION_FORMS = (*ATTENTION_OP_FORMS, NAIVE)
FEED_FORWARD_FORMS = (*FEED_FORWARD_OP_FORMS, NAIVE)


def require_heads(width: int, heads: int) -> int:
    """The width of a head: ``width / heads``."""
    require_at_least_one("heads", heads)
    if width % heads:
        raise ValueError(f"heads must divide the width {width}, got {heads}")
    return width // heads


class Attention(nn.Module):
    """Attention of ``[B, N, D]`` to itself, or to a context of ``context_dim`` features for each of its tokens.

    ``dim_head`` is ``query_dim / heads`` unless given. ``queries_per_chunk`` is for the form ``query_chunks``.
    """

    def __init__(
        self,
        query_dim: int,
        context_dim: int | None = None,
        heads: int = 8,
        dim_head: int | None = None,
        *,
        form: str = "auto",
        dropout: float = 0.0,
        queries_per_chunk: int | None = None,
    ) -> None:
        super().__init__()
        require_one_of("form", form, ATTENTION_FORMS)
        self.dim_head = require_heads(query_dim, heads) if dim_head is None else dim_head
        self.form, self.dropout, self.queries_per_chunk = form, dropout, queries_per_chunk
        self.context_dim, inner = context_dim, self.dim_head * heads
        self.to_q = nn.Linear(query_dim, inner, bias=False)
        self.to_kv = nn.Linear(context_dim or query_dim, 2 * inner, bias=False)
        self.to_out = nn.Linear(inner, query_dim)

    def forward(self, x_BND: torch.Tensor, context_BMC: torch.Tensor | None = None) -> torch.Tensor:
        q_BHNK, k_BHMK, v_BHMK = (
            part.unflatten(-1, (-1, self.dim_head)).transpose(1, 2)
            for part in (self.to_q(x_BND), *self.to_kv(self._seen(x_BND, context_BMC)).chunk(2, -1))
        )
        dropout = self.dropout if self.training else 0.0
        if self.form == NAIVE:
            mixed: torch.Tensor = naive_attention(q_BHNK.unsqueeze(2), k_BHMK, v_BHMK, dropout=dropout)  # type: ignore[assignment]
            mixed_BHNK = mixed.squeeze(2)
        else:
            mixed_BHNK = attention(
                q_BHNK, k_BHMK, v_BHMK, dropout=dropout, form=self.form, queries_per_chunk=self.queries_per_chunk
            )
        return self.to_out(mixed_BHNK.transpose(1, 2).flatten(-2))

    def _seen(self, x_BND: torch.Tensor, context_BMC: torch.Tensor | None) -> torch.Tensor:
        """The tensor that the queries attend to: ``x_BND`` itself, or the context."""
        if self.context_dim is None:
            return x_BND
        if context_BMC is None:
            raise ValueError(f"this attention has context_dim {self.context_dim}: pass a context")
        if context_BMC.shape[-1] != self.context_dim:
            raise ValueError(f"the context must have {self.context_dim} features, got shape {list(context_BMC.shape)}")
        if len(context_BMC) != len(x_BND):
            raise ValueError(f"the context must have the queries' batch size {len(x_BND)}, got {len(context_BMC)}")
        return context_BMC


class FeedForward(nn.Module):
    """``value * gelu(gate)`` between two linear layers, ``mult`` times as wide as the input."""

    def __init__(self, dim: int, mult: int = 4, *, form: str = "auto") -> None:
        super().__init__()
        require_one_of("form", form, FEED_FORWARD_FORMS)
        self.form = form
        self.up = nn.Linear(dim, 2 * mult * dim)
        self.down = nn.Linear(mult * dim, dim)

    def forward(self, x_BND: torch.Tensor, norm: nn.LayerNorm | None = None, residual: bool = False) -> torch.Tensor:
        """``norm`` and ``residual`` go into the op, so that autograd keeps no result of the norm and none of the op."""
        tensors = [x_BND, self.up.weight, self.down.weight, self.up.bias, self.down.bias]
        if norm is not None:
            tensors += [norm.weight, norm.bias]
        if self.form == NAIVE:
            return naive_geglu_feed_forward(*tensors, residual=residual)
        return geglu_feed_forward(*tensors, residual=residual, form=self.form)


class PreNorm(nn.Module):
    """``fn(norm(x))``, plus ``x`` with ``residual``. A context has a norm of its own."""

    def __init__(
        self, dim: int, fn: Attention | FeedForward, context_dim: int | None = None, *, residual: bool = True
    ) -> None:
        super().__init__()
        self.norm, self.fn, self.residual = nn.LayerNorm(dim), fn, residual
        self.norm_context = nn.LayerNorm(context_dim) if context_dim is not None else None

    def forward(self, x_BND: torch.Tensor, context_BMC: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(self.fn, FeedForward):
            return self.fn(x_BND, self.norm, self.residual)
        if self.norm_context is not None and context_BMC is not None:
            context_BMC = self.norm_context(context_BMC)
        out_BND = self.fn(self.norm(x_BND), context_BMC)
        return x_BND + out_BND if self.residual else out_BND


class ResidualBlock(nn.Module):
    """``x + linear(relu(linear(x)))``: the block of the report's project before it had attention."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x_BND: torch.Tensor, context_BMC: torch.Tensor | None = None) -> torch.Tensor:
        out_BND: torch.Tensor = self.second(self.first(x_BND).relu())
        return x_BND + out_BND


class FourierFeatures(nn.Module):
    """Features of coordinates in ``[0, 1]``: one half are cosines, the other half sines.

    Every axis has the same frequencies, from half a period over the image up to ``bandwidth`` periods.
    """

    frequencies: torch.Tensor

    def __init__(self, feature_dim: int, bandwidth: float, num_axes: int = 2) -> None:
        super().__init__()
        if feature_dim % (2 * num_axes):
            raise ValueError(f"feature_dim must be a multiple of {2 * num_axes}, got {feature_dim}")
        ratio = torch.linspace(0, 1, feature_dim // (2 * num_axes))
        self.register_buffer("frequencies", 0.5 * (2 * bandwidth) ** ratio, persistent=False)

    def forward(self, coordinates_BNA: torch.Tensor) -> torch.Tensor:
        angles = (2 * torch.pi * coordinates_BNA.unsqueeze(-1) * self.frequencies).flatten(-2)
        return torch.cat([angles.cos(), angles.sin()], -1)
