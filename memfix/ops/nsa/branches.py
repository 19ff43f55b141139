"""The three branches over one chunk of queries: which keys and values each reads, and where their gradients go.

Keys and values are read on every call and never stored. In a branch's batched products, a batch item is a key-value
head with all the chunk's queries as its rows; in the selected branch, where every query has keys of its own, a batch
item is one query.
"""

# N batch x key-value heads, C queries of a chunk, R query heads of each, X = C x R, D width of a head, B batch,
# T tokens, G key-value heads, M compressed blocks, n selected blocks, K keys that a query may read;
# Z x Y is N x X, or in the selected branch (N x C) x R

from __future__ import annotations

import torch

from .arguments import Blocks


class Branch:
    """The keys and values of one branch, and which of them a chunk of queries reads."""

    k: torch.Tensor
    v: torch.Tensor
    batch: int
    """Z, the number of batch items in the products."""
    hidden: torch.Tensor
    """True where a query does not see a key; broadcasts to ``[Z, Y, K]``."""
    may_see_nothing = False
    """Whether some query of the chunk may see no key at all."""

    def keys(self) -> torch.Tensor:
        """Return the keys that the chunk reads, ``[Z, K, D]``."""
        return self._read(self.k)

    def values(self) -> torch.Tensor:
        """Return the values that the chunk reads, ``[Z, K, D]``."""
        return self._read(self.v)

    def add_gradient(self, sums: torch.Tensor, grad_ZKD: torch.Tensor) -> None:
        """Add the gradient of what was read, keys or values, to the places in ``sums`` that it was read from."""
        raise NotImplementedError

    def _read(self, of_all: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def as_batch(rows_NXD: torch.Tensor, branch: Branch) -> torch.Tensor:
    """Return the rows of a chunk as the batch of a branch's products, ``[Z, Y, D]``, a view."""
    if rows_NXD.shape[0] == branch.batch:
        return rows_NXD
    return rows_NXD.view(branch.batch, -1, rows_NXD.shape[-1])


class CompressedBranch(Branch):
    """The vectors of compressed blocks; keys, values and sums are ``[N, M, D]``."""

    def __init__(
        self, k_NMD: torch.Tensor, v_NMD: torch.Tensor, hidden_XM: torch.Tensor, may_see_nothing: bool
    ) -> None:
        self.k, self.v, self.hidden, self.may_see_nothing = k_NMD, v_NMD, hidden_XM, may_see_nothing
        self.batch = k_NMD.shape[0]

    def add_gradient(self, sums: torch.Tensor, grad_ZKD: torch.Tensor) -> None:
        sums[:, : grad_ZKD.shape[1]].add_(grad_ZKD)

    def _read(self, of_all: torch.Tensor) -> torch.Tensor:
        return of_all


class SelectedBranch(Branch):
    """The tokens of the selected blocks, gathered for each query; a query's own block is always selected. Sums are
    ``[B, T, G, D]``, contiguous."""

    def __init__(
        self,
        k_BTGD: torch.Tensor,
        v_BTGD: torch.Tensor,
        selected_NCn: torch.Tensor,
        query_C: torch.Tensor,
        blocks: Blocks,
    ) -> None:
        batch, num_tokens, groups, width = k_BTGD.shape
        offset = torch.arange(blocks.select_block, device=k_BTGD.device)
        token_NCK = (selected_NCn.long().mul_(blocks.select_block)[..., None] + offset).flatten(-2)
        # NONE_SELECTED is -1: its tokens lie before the first one, and are hidden
        hidden_NCK = (token_NCK > query_C[:, None]).logical_or_(token_NCK < 0)
        # the keys of all tokens are a table whose row (b*T + token)*G + g is read
        first_N = torch.arange(groups, device=k_BTGD.device)
        if batch > 1:
            start_B = torch.arange(batch, device=k_BTGD.device) * (num_tokens * groups)
            first_N = (start_B[:, None] + first_N).flatten()
        row_NCK = token_NCK.clamp_(0, num_tokens - 1).mul_(groups).add_(first_N[:, None, None])
        self.k, self.v = k_BTGD.view(-1, width), v_BTGD.view(-1, width)
        self.rows = row_NCK.view(-1)  # [Z * K], the row of every key that is read
        self.hidden = hidden_NCK.view(-1, 1, hidden_NCK.shape[-1])
        self.batch = self.hidden.shape[0]

    def add_gradient(self, sums: torch.Tensor, grad_ZKD: torch.Tensor) -> None:
        width = sums.shape[-1]
        sums.view(-1, width).index_add_(0, self.rows, grad_ZKD.view(-1, width))

    def _read(self, of_all: torch.Tensor) -> torch.Tensor:
        return of_all.index_select(0, self.rows).view(self.batch, -1, of_all.shape[1])


class WindowBranch(Branch):
    """The last ``window`` tokens up to each query, its own included. Sums are ``[B, T, G, D]``."""

    def __init__(
        self, k_BTGD: torch.Tensor, v_BTGD: torch.Tensor, query_X: torch.Tensor, chunk: slice, blocks: Blocks
    ) -> None:
        self.k, self.v, self.batch = k_BTGD, v_BTGD, k_BTGD.shape[0] * k_BTGD.shape[2]
        self.tokens = slice(max(0, chunk.start - blocks.window + 1), chunk.stop)
        age_XK = query_X[:, None] - torch.arange(self.tokens.start, self.tokens.stop, device=k_BTGD.device)
        self.hidden = (age_XK < 0).logical_or_(age_XK >= blocks.window)

    def add_gradient(self, sums: torch.Tensor, grad_ZKD: torch.Tensor) -> None:
        read = sums[:, self.tokens]
        read.add_(grad_ZKD.unflatten(0, (read.shape[0], -1)).transpose(1, 2))

    def _read(self, of_all: torch.Tensor) -> torch.Tensor:
        return of_all[:, self.tokens].transpose(1, 2).flatten(0, 1)
