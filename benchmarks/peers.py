"""Everybody's linear cross entropy: ours, form by form, and the public peers."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from memfix.ops.linear_cross_entropy import FORMS, linear_cross_entropy

from .contenders import Contender, Peer, Unavailable, forms_of, those_that_load
from .rounds import LossOf


def our_forms() -> list[Contender]:
    """Each is ``loss_of(hidden, weight, target)``, the mean over targets that are not -100, and so are the peers."""
    return forms_of("linear_cross_entropy", linear_cross_entropy, FORMS)


def peers(device: str) -> tuple[list[Contender], dict[str, str]]:
    """The peers that run on ``device``, and for each that does not, why."""
    return those_that_load(_PEERS, device)


def _liger() -> LossOf:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss_of = LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight, target: loss_of(weight, hidden, target)


def _cut_cross_entropy() -> LossOf:
    from cut_cross_entropy import linear_cross_entropy as loss_of

    return lambda hidden, weight, target: loss_of(hidden, weight, target)


def _torch_own(rows_per_chunk: int | None) -> LossOf:
    """Without options torch takes the naive path; with them it goes in chunks, of its own choice or of a given size."""
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise Unavailable(f"not in torch {torch.__version__}")
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows_per_chunk)
    return functools.partial(F.linear_cross_entropy, options=options)


_PEERS = {
    "liger": Peer("liger-kernel", _liger, "liger_kernel"),
    "cce": Peer("cut-cross-entropy", _cut_cross_entropy, "cut_cross_entropy"),
    "torch": Peer("torch", lambda: _torch_own(None)),
    "torch_4096": Peer("torch", lambda: _torch_own(4096)),
}
