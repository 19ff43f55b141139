"""What the loss is made of beside the logits: its options, what every token's loss is, and what its gradient needs.

With logits ``z``, class weights ``c`` (1 where there are none), smoothing ``e`` and ``lse = logsumexp(z)``, a token
with the target ``t`` adds ``(1-e) c_t (lse - z_t) + (e/V) sum_v c_v (lse - z_v)``, as in torch; ``mean`` divides the
sum by the sum of ``c_t``. The z-loss adds ``z_loss * lse**2``, and its mean divides by the number of tokens that
count.
"""

# K tokens that count, V vocabulary, C tokens of a chunk

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..arguments import require_one_of

REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The options of the loss. ``temperature`` divides the logits last; only log-probabilities use it."""

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0
    softcap: float | None = None
    z_loss: float = 0.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        require_one_of("reduction", self.reduction, REDUCTIONS)
        _require("label_smoothing", self.label_smoothing, "between 0 and 1", lambda value: 0 <= value <= 1)
        _require("z_loss", self.z_loss, "at least 0", lambda value: value >= 0)
        _require("temperature", self.temperature, "above 0", lambda value: value > 0)
        if self.softcap is not None:
            _require("softcap", self.softcap, "above 0", lambda value: value > 0)

    @property
    def is_plain_softmax(self) -> bool:
        """Whether the gradient of the logits is a softmax times one factor a token, but for the target's entry."""
        return self.softcap is None and not self.label_smoothing

    def reduced(self, sums: Sums, target_weight_K: torch.Tensor | None, vocabulary: int) -> torch.Tensor:
        """The loss from its sums: one number, or one for each token that counts."""
        loss_K = self._cross_entropy(sums, target_weight_K, vocabulary)
        square_K = None if sums.logsumexp_K is None else sums.logsumexp_K.square()
        if self.reduction == "none":
            return loss_K if square_K is None else loss_K + self.z_loss * square_K
        loss = loss_K.sum()
        number = loss_K.shape[0]
        if self.reduction == "mean":  # without a token that counts this is 0/0, as in torch
            loss = loss / (number if target_weight_K is None else target_weight_K.sum())
        if square_K is not None:
            square = square_K.sum()
            loss = loss + self.z_loss * (square / number if self.reduction == "mean" else square)
        return loss

    def _cross_entropy(self, sums: Sums, target_weight_K: torch.Tensor | None, vocabulary: int) -> torch.Tensor:
        loss_K = sums.surprise_K if target_weight_K is None else sums.surprise_K * target_weight_K
        if sums.smooth_K is None:
            return loss_K
        return (1 - self.label_smoothing) * loss_K + (self.label_smoothing / vocabulary) * sums.smooth_K

    def common_factor(self, num_tokens: int) -> float:
        """What every gradient is multiplied by, whatever the token: known without looking at the device."""
        return 1 / max(num_tokens, 1) if self.reduction == "mean" else 1.0

    def coefficients(
        self,
        class_weight_V: torch.Tensor | None,
        target_weight_K: torch.Tensor | None,
        vocabulary: int,
        upstream_K: torch.Tensor | None,
        like_K: torch.Tensor,
    ) -> Coefficients | None:
        """What the gradient of each token's logits is made of, up to the common factor; None where all is 1."""
        smoothing = self.label_smoothing
        if upstream_K is None and target_weight_K is None and not smoothing and not self.z_loss:
            return None
        share_K = torch.ones_like(like_K) if upstream_K is None else upstream_K.to(like_K.dtype)
        square_K = 2 * self.z_loss * share_K if self.z_loss else None
        if target_weight_K is not None and self.reduction == "mean":
            # the divisor of the mean is the sum of the weights, and the common factor has divided by the number
            share_K = share_K * (target_weight_K.shape[0] / target_weight_K.sum())
        target_K = (1 - smoothing) * (share_K if target_weight_K is None else share_K * target_weight_K)
        if not smoothing:
            return Coefficients(target_K, target_K, square_K, None)
        all_weights: Any = vocabulary if class_weight_V is None else class_weight_V.sum()
        smooth_K = (smoothing / vocabulary) * share_K
        return Coefficients(target_K + smooth_K * all_weights, target_K, square_K, smooth_K)


@dataclass(frozen=True)
class Sums:
    """What a pass over the logits leaves of every token, in float32 or wider.

    ``surprise`` is ``lse - z_t``; ``logsumexp`` is there for a z-loss; ``smooth``, ``sum_v c_v (lse - z_v)``, for
    smoothing.
    """

    surprise_K: torch.Tensor
    logsumexp_K: torch.Tensor | None
    smooth_K: torch.Tensor | None

    @staticmethod
    def empty(terms: Terms, number: int, device: torch.device, dtype: torch.dtype) -> Sums:
        def made() -> torch.Tensor:
            return torch.empty(number, dtype=dtype, device=device)

        return Sums(made(), made() if terms.z_loss else None, made() if terms.label_smoothing else None)

    def rows(self, rows: slice) -> Sums:
        return Sums(*(None if part is None else part[rows] for part in vars(self).values()))  # type: ignore[arg-type]

    def split(self, rows: int) -> list[Sums]:
        return [Sums(*parts) for parts in _split(self, rows)]  # type: ignore[arg-type]


@dataclass(frozen=True)
class Coefficients:
    """The gradient of a token's logits: ``(softmax + square * lse) p_v - target [v = t] - smooth c_v``."""

    softmax_K: torch.Tensor
    target_K: torch.Tensor
    square_K: torch.Tensor | None
    smooth_K: torch.Tensor | None

    def rows(self, rows: slice) -> Coefficients:
        return replace(self, **{name: part[rows] for name, part in vars(self).items() if part is not None})

    def split(self, rows: int) -> list[Coefficients]:
        return [Coefficients(*parts) for parts in _split(self, rows)]  # type: ignore[arg-type]


def _split(parts: Sums | Coefficients, rows: int) -> list[tuple[torch.Tensor | None, ...]]:
    """``rows`` tokens of each part at a time, by one operator a part rather than one a chunk."""
    given = {name: part.split(rows) for name, part in vars(parts).items() if part is not None}
    num_chunks = len(next(iter(given.values())))
    return [tuple(given[name][i] if name in given else None for name in vars(parts)) for i in range(num_chunks)]


def _require(name: str, value: object, rule: str, holds: Callable[[float], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not holds(value) or not math.isfinite(value):
        raise ValueError(f"{name} must be {rule}, got {value}")
