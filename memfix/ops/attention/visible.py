"""Which keys a query sees, as one mask that leaves no query without a key: of such a row kernels make NaN, or zeros."""

# Q queries, K keys

from __future__ import annotations

from typing import NamedTuple

import torch


class Visible(NamedTuple):
    """``mask`` is bool, or numbers to add to the scores. Queries that see no key see all of them here, and are
    ``blind``: their result has to be made zero, which makes their gradients zero as well."""

    mask: torch.Tensor | None = None
    blind: torch.Tensor | None = None

    def zero_blind(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.blind is None else rows.masked_fill(self.blind, 0)


def causal_mask(queries: slice, num_keys: int, device: torch.device) -> torch.Tensor:
    """True where one of ``queries`` sees a key: those up to its own number."""
    return torch.arange(num_keys, device=device) <= torch.arange(queries.start, queries.stop, device=device)[:, None]


def visible(mask: torch.Tensor | None, bias: torch.Tensor | None, causal_QK: torch.Tensor | None = None) -> Visible:
    """One mask that says the same as all three."""
    if mask is None and bias is None:
        return Visible(causal_QK)  # the first key is seen by every query
    seen = mask if causal_QK is None else causal_QK if mask is None else mask & causal_QK
    if bias is None:
        assert seen is not None
        blind = ~seen.any(-1, keepdim=True)
        return Visible(seen | blind, blind)
    if seen is not None:
        bias = bias.masked_fill(~seen, -torch.inf)
    blind = (bias.detach() == -torch.inf).all(-1, keepdim=True)
    return Visible(bias.masked_fill(blind, 0), blind)
