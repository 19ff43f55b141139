"""Native sparse attention compared with flash-linear-attention's ``parallel_nsa``.

``parallel_nsa`` uses the means of its selection blocks as compressed blocks; memfix's compressed blocks may overlap and
have a position embedding. It needs a multiple of 16 query heads per key-value head, and the incident has 4: each head
is passed four times, and three of the four outputs are dropped. Its window branch needs flash-attention. So both are
compared where they compute the same: the compressed and the selected branch, and a window of one token, which is the
token's value. It does not run at the incident's own sizes, which have four times as many compressed blocks.

Errors are computed at a size at which every block is selected: it scores blocks in 16 bits, and so may select others
among nearly equal ones.
"""

# B batch, T tokens, G key-value heads, R query heads of each, D width of a head

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import Comparison, Entry, Peer, Table, fla_operators

HEADS = 16
"""``parallel_nsa`` requires a multiple of this number of query heads per key-value head."""


def repeats(heads: int) -> int:
    """Return how often each query head is passed: the smallest factor that makes ``heads`` a multiple of ``HEADS``."""
    return next(times for times in range(1, HEADS + 1) if heads * times % HEADS == 0)


def _fla() -> Callable[..., Any]:
    return with_form_signature(fla_operators("nsa").parallel_nsa)


def with_form_signature(parallel_nsa: Callable[..., Any]) -> Callable[..., Any]:
    """Give ``parallel_nsa`` the signature of a form; refuse compressed blocks that differ from selection blocks."""

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
        # [B, T, H, D] and [B, T, H]; copies of a head are adjacent, and the output of the first copy is kept
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
_AT_INCIDENT = ("triton",)  # chunked takes half a minute per step
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
    # few enough tokens that every block is selected
    error_at={"T": 1024},
)
