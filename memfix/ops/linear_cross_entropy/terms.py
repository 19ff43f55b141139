"""The terms of a token's loss (smoothing, class weights, z-loss), and the coefficients of its gradient.

With logits ``z``, class weights ``c`` (1 where there are none), smoothing ``e`` and ``lse = logsumexp(z)``, a token
with the target ``t`` adds ``(1-e) c_t (lse - z_t) + (e/V) sum_v c_v (lse - z_v)``, as in torch; ``mean`` divides the
sum by the sum of ``c_t``. The z-loss adds ``z_loss * lse**2``, and its mean divides by the number of tokens that
count.
"""

# K tokens that count, V vocabulary, C tokens of a chunk

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .options import Options


def reduced_loss(options: Options, sums: Sums, target_weight_K: torch.Tensor | None, vocabulary: int) -> torch.Tensor:
    """Return the loss from the tokens' sums: one number, or one for each token that counts."""
    loss_K = _cross_entropy(options, sums, target_weight_K, vocabulary)
    square_K = None if sums.logsumexp_K is None else sums.logsumexp_K.square()
    if options.reduction == "none":
        return loss_K if square_K is None else loss_K + options.z_loss * square_K
    loss = loss_K.sum()
    number = loss_K.shape[0]
    if options.reduction == "mean":  # without a token that counts this is 0/0, as in torch
        loss = loss / (number if target_weight_K is None else target_weight_K.sum())
    if square_K is not None:
        square = square_K.sum()
        loss = loss + options.z_loss * (square / number if options.reduction == "mean" else square)
    return loss


def _cross_entropy(options: Options, sums: Sums, target_weight_K: torch.Tensor | None, vocabulary: int) -> torch.Tensor:
    loss_K = sums.nll_K if target_weight_K is None else sums.nll_K * target_weight_K
    if sums.smooth_K is None:
        return loss_K
    return (1 - options.label_smoothing) * loss_K + (options.label_smoothing / vocabulary) * sums.smooth_K


@dataclass(frozen=True)
class Sums:
    """The sums of every token that a pass over the logits writes, in float32 or wider.

    ``nll`` is ``lse - z_t``. ``logsumexp`` is not None only for a z-loss, and ``smooth``, which is
    ``sum_v c_v (lse - z_v)``, only for smoothing.
    """

    nll_K: torch.Tensor
    logsumexp_K: torch.Tensor | None
    smooth_K: torch.Tensor | None

    @staticmethod
    def empty(options: Options, number: int, device: torch.device, dtype: torch.dtype) -> Sums:
        def made() -> torch.Tensor:
            return torch.empty(number, dtype=dtype, device=device)

        return Sums(made(), made() if options.z_loss else None, made() if options.label_smoothing else None)

    def split(self, rows: int) -> list[Sums]:
        return [Sums(*parts) for parts in _split(self, rows)]  # type: ignore[arg-type]


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of the logits' gradient ``(softmax + square * lse) p_v - target [v = t] - smooth c_v``."""

    softmax_K: torch.Tensor
    target_K: torch.Tensor
    square_K: torch.Tensor | None
    smooth_K: torch.Tensor | None

    @staticmethod
    def of(
        options: Options,
        class_weight_V: torch.Tensor | None,
        target_weight_K: torch.Tensor | None,
        vocabulary: int,
        upstream_K: torch.Tensor | None,
        like_K: torch.Tensor,
    ) -> Coefficients | None:
        """Return the coefficients of each token, up to the common factor; None if all factors are 1."""
        smoothing = options.label_smoothing
        if upstream_K is None and target_weight_K is None and not smoothing and not options.z_loss:
            return None
        share_K = torch.ones_like(like_K) if upstream_K is None else upstream_K.to(like_K.dtype)
        square_K = 2 * options.z_loss * share_K if options.z_loss else None
        if target_weight_K is not None and options.reduction == "mean":
            # the mean divides by the sum of the weights, but the common factor divides by the number of tokens
            share_K = share_K * (target_weight_K.shape[0] / target_weight_K.sum())
        target_K = (1 - smoothing) * (share_K if target_weight_K is None else share_K * target_weight_K)
        if not smoothing:
            return Coefficients(target_K, target_K, square_K, None)
        all_weights: Any = vocabulary if class_weight_V is None else class_weight_V.sum()
        smooth_K = (smoothing / vocabulary) * share_K
        return Coefficients(target_K + smooth_K * all_weights, target_K, square_K, smooth_K)

    def split(self, rows: int) -> list[Coefficients]:
        return [Coefficients(*parts) for parts in _split(self, rows)]  # type: ignore[arg-type]


def _split(parts: Sums | Coefficients, rows: int) -> list[tuple[torch.Tensor | None, ...]]:
    """Split each part into chunks of ``rows`` tokens: one torch call per part instead of one per chunk."""
    given = {name: part.split(rows) for name, part in vars(parts).items() if part is not None}
    num_chunks = len(next(iter(given.values())))
    return [tuple(given[name][i] if name in given else None for name in vars(parts)) for i in range(num_chunks)]
