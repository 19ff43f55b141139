"""Native sparse attention beside flash-linear-attention's ``parallel_nsa``.

Its compressed blocks are its selection blocks, their plain means; ours may overlap and have a position embedding. It
takes query heads by 16 for a key-value head, where the incident has 4: it gets each of those four times, and three of
the four outputs are dropped. Its window branch needs flash-attention. So both are compared where they compute the same:
the compressed and the selected branch, and a window of one token, which is the token's value. At the incident's own
sizes, whose compressed blocks are four times as many, it does not run.

Errors are taken where every block is selected: it scores them in 16 bits, and of nearly equal ones it takes others.
"""

# B batch, T tokens, G key-value heads, R query heads of each, D width of a head

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import Comparison, Entry, Peer, Table, fla_operators

HEADS = 16
"""Query heads for a key-value head that it takes, or a multiple of them."""


def repeats(heads: int) -> int:
    """How often it gets each query head: the least that makes a multiple of 16."""
    return next(times for times in range(1, HEADS + 1) if heads * times % HEADS == 0)


def _fla() -> Callable[..., Any]:
    return in_its_words(fla_operators("nsa").parallel_nsa)


def in_its_words(parallel_nsa: Callable[..., Any]) -> Callable[..., Any]:
    """``parallel_nsa`` with the signature of a form; refuses sizes that are no blocks of one kind."""

    def nsa(
        q_BTGRD: torch.Tensor,
        k_BTGD: torch.Tensor,
        v_BTGD: torch.Tensor,
        gates_BTGR3: torch.Tensor,
        position_embedding_LD: torch.Tensor | None = None,
        *,
        compress_block: int,
        compress_stride: int,
        select_block: int,
        num_selected: int,
        window: int,
        scale: float | None = None,
    ) -> torch.Tensor:
        if not compress_block == compress_stride == select_block or position_embedding_LD is not None:
            raise ValueError("parallel_nsa has one size of blocks, and no position embedding")
        times = repeats(q_BTGRD.shape[3])
        # [B, T, H, D] and [B, T, H]; copies of a head lie side by side, and the first of them is kept
        q_BTHD = q_BTGRD.repeat_interleave(times, 3).flatten(2, 3)
        gates = gates_BTGR3.repeat_interleave(times, 3).flatten(2, 3).unbind(-1)
        out_BTHD = parallel_nsa(
            q_BTHD, k_BTGD, v_BTGD, g_cmp=gates[0], g_slc=gates[1], g_swa=gates[2], block_counts=num_selected,
            block_size=select_block, window_size=0 if window == 1 else window, scale=scale,
        )  # fmt: skip
        out_BTGRD = out_BTHD.unflatten(2, (k_BTGD.shape[2], -1))[:, :, :, ::times]
        if window > 1:
            return out_BTGRD
        return torch.addcmul(out_BTGRD, gates_BTGR3[..., 2, None], v_BTGD[:, :, :, None])

    return nsa


_FORMS = ("chunked", "triton")  # naive takes terabytes
_AT_INCIDENT = ("triton",)  # chunked takes half a minute a step
_ALIKE = "compress_block=64 compress_stride=64 window=1 absent=position_embedding"

COMPARISON = Comparison(
    peers={"fla": Peer("flash-linear-attention", _fla, ("fla", "triton"))},
    tables={
        "shapes": Table(
            [
                Entry("two branches", _ALIKE, _AT_INCIDENT),
                Entry("two branches, 32,768 tokens", f"T=32768 {_ALIKE}", _FORMS),
                Entry("16 heads of 128 each", f"T=32768 G=4 R=16 D=128 {_ALIKE}", _FORMS),
                Entry("incident", forms=_AT_INCIDENT, peers=()),
                Entry("32,768 tokens", "T=32768", _FORMS, ()),
            ],
            phases=("train", "forward"),
        ),
    },
    # so few tokens that every block is selected
    error_at={"T": 1024},
)
