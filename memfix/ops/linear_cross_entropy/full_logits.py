"""The loss by torch's own operators, the logits of some rows or of all made in full and left to autograd."""

# N tokens, C tokens of a chunk, or all of them; D width, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F

from .arguments import require_linear_cross_entropy
from .targets import require_targets_in_range
from .terms import Terms


def full_logits_loss(
    hidden_CD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_C: torch.Tensor,
    bias_V: torch.Tensor | None,
    class_weight_V: torch.Tensor | None,
    terms: Terms,
    reduction: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The cross entropy and, for a z-loss, the squared logsumexp of the tokens that count: summed, or one a token."""
    logits_CV = F.linear(hidden_CD, weight_VD, bias_V)
    if terms.softcap is not None:
        logits_CV = terms.softcap * torch.tanh(logits_CV / terms.softcap)
    if terms.temperature != 1:
        logits_CV = logits_CV / terms.temperature
    loss = F.cross_entropy(
        logits_CV,
        target_C,
        weight=class_weight_V,
        ignore_index=terms.ignore_index,
        reduction=reduction,
        label_smoothing=terms.label_smoothing,
    )
    if not terms.z_loss:
        return loss, None
    square_C = logits_CV.logsumexp(1).square().where(target_C != terms.ignore_index, 0)
    return loss, square_C if reduction == "none" else square_C.sum()


def chunks_of_full_logits(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    target_N: torch.Tensor,
    bias_V: torch.Tensor | None,
    class_weight_V: torch.Tensor | None,
    terms: Terms,
    rows_per_chunk: int | None = None,
    run: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = full_logits_loss,
) -> torch.Tensor:
    """The loss of all tokens, at once or ``rows_per_chunk`` at a time; ``run`` is how ``full_logits_loss`` is called.

    On a GPU a target out of range stops the device, as in torch: looking for it would make the host wait.
    """
    rows = 1 if rows_per_chunk is None else rows_per_chunk
    require_linear_cross_entropy(hidden_ND, weight_VD, target_N, bias_V, class_weight_V, rows)
    require_targets_in_range(target_N, weight_VD.shape[0], terms.ignore_index)
    of_a_chunk = "none" if terms.reduction == "none" else "sum"
    rows = hidden_ND.shape[0] if rows_per_chunk is None else rows_per_chunk
    parts = (
        run(hidden_CD, weight_VD, target_C, bias_V, class_weight_V, terms, of_a_chunk)
        for hidden_CD, target_C in zip(hidden_ND.split(rows), target_N.split(rows), strict=True)
    )
    return joined(parts, target_N, class_weight_V, terms)


def joined(
    parts: Iterable[tuple[torch.Tensor, torch.Tensor | None]],
    target_N: torch.Tensor,
    class_weight_V: torch.Tensor | None,
    terms: Terms,
) -> torch.Tensor:
    """The loss of all tokens from that of its chunks, which are summed, or one a token for ``none``."""
    if terms.reduction == "none":
        losses, squares = zip(*parts, strict=True)
        return torch.cat(losses) + terms.z_loss * torch.cat(squares) if terms.z_loss else torch.cat(losses)
    loss = square = torch.zeros((), device=target_N.device)
    dtype = loss.dtype
    for loss_of_chunk, square_of_chunk in parts:
        dtype = loss_of_chunk.dtype
        loss = loss + loss_of_chunk  # promotes: a 16-bit loss is added up in float32
        square = square if square_of_chunk is None else square + square_of_chunk
    counts_N = target_N != terms.ignore_index
    if terms.reduction == "mean" and class_weight_V is None:
        loss = loss / counts_N.sum()
    elif terms.reduction == "mean" and class_weight_V is not None:
        # an ignored target may be no class: look up class 0 instead and drop what is found
        weight_N = class_weight_V.index_select(0, target_N.where(counts_N, 0))
        loss = loss / weight_N.where(counts_N, 0).sum(dtype=loss.dtype)
    if terms.z_loss:
        loss = loss + terms.z_loss * (square / counts_N.sum() if terms.reduction == "mean" else square)
    return loss.to(dtype)
