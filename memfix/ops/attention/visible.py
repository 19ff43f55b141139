"""Combines mask, bias and causality into one mask in which every query sees a key: else kernels return NaN or zeros."""

# Q queries, K keys

from __future__ import annotations

from typing import NamedTuple

import torch


class Visible(NamedTuple):
    """Which keys each query sees. ``mask`` is bool, or numbers to add to the scores. ``blind`` marks the queries that
    see no key; here they see all keys, and their result must be set to zero, which makes their gradients zero too."""

    mask: torch.Tensor | None = None
    blind: torch.Tensor | None = None

    def zero_blind(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.blind is None else rows.masked_fill(self.blind, 0)


def causal_mask(queries: slice, num_keys: int, device: torch.device) -> torch.Tensor:
    """Return a mask that is True where one of ``queries`` sees a key: query i sees keys 0 to i."""
    return torch.arange(num_keys, device=device) <= torch.arange(queries.start, queries.stop, device=device)[:, None]


def visible(mask: torch.Tensor | None, bias: torch.Tensor | None, causal_QK: torch.Tensor | None = None) -> Visible:
    """Combine all three into one mask."""
    if mask is None and bias is None:
        return Visible(causal_QK)  # every query sees the first key, so none is blind
    seen = mask if causal_QK is None else causal_QK if mask is None else mask & causal_QK
    if bias is None:
        assert seen is not None
        blind = ~seen.any(-1, keepdim=True)
        return Visible(seen | blind, blind)
    if seen is not None:
        bias = bias.masked_fill(~seen, -torch.inf)
    blind = (bias.detach() == -torch.inf).all(-1, keepdim=True)
    return Visible(bias.masked_fill(blind, 0), blind)
