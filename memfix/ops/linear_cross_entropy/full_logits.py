"""The loss by torch's own operators under plain autograd, on the full logits of a chunk or of all tokens."""

# C tokens of a chunk, or all of them; V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F

from .options import LossTensors, Options
from .targets import require_targets_in_range

Parts = tuple[torch.Tensor, torch.Tensor | None]
"""The cross entropy and, for a z-loss, the squared logsumexp: summed over the tokens that count, or one per token."""


def full_logits_loss(tensors: LossTensors, options: Options) -> Parts:
    """Return the parts of the loss of these tokens, whose logits are made at once."""
    hidden_CD, weight_VD, target_C, bias_V, class_weight_V = tensors
    reduction = "none" if options.reduction == "none" else "sum"
    logits_CV = F.linear(hidden_CD, weight_VD, bias_V)
    if options.softcap is not None:
        logits_CV = options.softcap * torch.tanh(logits_CV / options.softcap)
    if options.temperature != 1:
        logits_CV = logits_CV / options.temperature
    loss = F.cross_entropy(
        logits_CV,
        target_C,
        weight=class_weight_V,
        ignore_index=options.ignore_index,
        reduction=reduction,
        label_smoothing=options.label_smoothing,
    )
    if not options.z_loss:
        return loss, None
    square_C = logits_CV.logsumexp(1).square().where(target_C != options.ignore_index, 0)
    return loss, square_C if reduction == "none" else square_C.sum()


def chunks_of_full_logits(
    tensors: LossTensors, options: Options, run: Callable[..., Parts] = full_logits_loss
) -> torch.Tensor:
    """Compute the loss of all tokens, at once or a chunk at a time; ``run`` may wrap ``full_logits_loss``.

    On a GPU a target out of range is a device-side assert, as in torch: a check here would make the host wait.
    """
    require_targets_in_range(tensors.target_N, tensors.vocabulary, options.ignore_index)
    rows = options.rows_of(tensors.hidden_ND.shape[0])
    chunks = zip(tensors.hidden_ND.split(rows), tensors.target_N.split(rows), strict=True)
    return joined((run(tensors.of_rows(*chunk), options) for chunk in chunks), tensors, options)


def joined(parts: Iterable[Parts], tensors: LossTensors, options: Options) -> torch.Tensor:
    """Return the loss of all tokens from the parts of the chunks."""
    target_N, class_weight_V = tensors.target_N, tensors.class_weight_V
    if options.reduction == "none":
        losses, squares = zip(*parts, strict=True)
        return torch.cat(losses) + options.z_loss * torch.cat(squares) if options.z_loss else torch.cat(losses)
    loss = square = torch.zeros((), device=target_N.device)
    dtype = loss.dtype
    for loss_of_chunk, square_of_chunk in parts:
        dtype = loss_of_chunk.dtype
        loss = loss + loss_of_chunk  # type promotion: a 16-bit loss is added up in float32
        square = square if square_of_chunk is None else square + square_of_chunk
    is_counted_N = target_N != options.ignore_index
    if options.reduction == "mean" and class_weight_V is None:
        loss = loss / is_counted_N.sum()
    elif options.reduction == "mean" and class_weight_V is not None:
        # an ignored target may be out of range: look up class 0 instead and drop the result
        weight_N = class_weight_V.index_select(0, target_N.where(is_counted_N, 0))
        loss = loss / weight_N.where(is_counted_N, 0).sum(dtype=loss.dtype)
    if options.z_loss:
        loss = loss + options.z_loss * (square / is_counted_N.sum() if options.reduction == "mean" else square)
    return loss.to(dtype)
