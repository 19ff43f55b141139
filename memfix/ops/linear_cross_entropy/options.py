"""The arguments of every form of linear cross entropy: five tensors and the options of the loss, both checked."""

# N tokens, D width, V vocabulary, C tokens of a chunk

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..arguments import (
    require_at_least_one,
    require_floating,
    require_number,
    require_one_of,
    require_same,
    require_shape,
)
from ..call import takes
from ..products import autocast_dtype

ROWS_PER_CHUNK = 2048
"""Default rows of a chunk. On an H200 within 2 % of the time of 4096 rows and a third smaller; below 1024, launches
and small products cost time."""
FEW_LOGITS = 2**28
"""Logits of a chunk up to which its default rows may double. With 32,000 or 50,304 classes, 4096 rows take 1.08 to 1.10
times the time of the products alone, and 2048 rows 1.10 to 1.14 times."""
REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the loss. ``temperature`` divides the logits after the cap; only log-probabilities use it.

    With ``rows_per_chunk=None`` one chunk has all tokens.
    """

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0
    softcap: float | None = None
    z_loss: float = 0.0
    temperature: float = 1.0
    rows_per_chunk: int | None = ROWS_PER_CHUNK

    def __post_init__(self) -> None:
        require_one_of("reduction", self.reduction, REDUCTIONS)
        require_number("label_smoothing", self.label_smoothing, "between 0 and 1", lambda value: 0 <= value <= 1)
        require_number("z_loss", self.z_loss, "at least 0", lambda value: value >= 0)
        require_number("temperature", self.temperature, "above 0", lambda value: value > 0)
        if self.softcap is not None:
            require_number("softcap", self.softcap, "above 0", lambda value: value > 0)
        if self.rows_per_chunk is not None:
            require_at_least_one("rows_per_chunk", self.rows_per_chunk)

    @property
    def is_plain_softmax(self) -> bool:
        """Whether the gradient of the logits is the softmax times one factor per token, except at the target."""
        return self.softcap is None and not self.label_smoothing

    def rows_of(self, num_tokens: int) -> int:
        """Return how many of ``num_tokens`` tokens a chunk has."""
        return num_tokens if self.rows_per_chunk is None else min(self.rows_per_chunk, num_tokens)

    def common_factor(self, num_tokens: int) -> float:
        """Return the factor of every token's gradient that is known without reading from the device."""
        return 1 / max(num_tokens, 1) if self.reduction == "mean" else 1.0

    def shaped(self, loss: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss, for ``reduction="none"`` in the shape of ``target``."""
        return loss.reshape(target.shape) if self.reduction == "none" else loss


class LossTensors(NamedTuple):
    """The tensors of a call, in the order of the contract."""

    hidden_ND: torch.Tensor
    weight_VD: torch.Tensor
    target_N: torch.Tensor
    bias_V: torch.Tensor | None = None
    class_weight_V: torch.Tensor | None = None

    @classmethod
    def checked(cls, *tensors: Any, target_name: str = "target", **by_name: Any) -> LossTensors:
        """Make the tensors of a call and refuse invalid ones, before anything is allocated."""
        made = cls(*tensors, **by_name)
        made._check(target_name)
        return made

    @property
    def vocabulary(self) -> int:
        return self.weight_VD.shape[0]

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of the products under autocast, where hidden and weight may have different dtypes; else None."""
        return autocast_dtype(self.hidden_ND, self.weight_VD)

    def of_rows(self, hidden_CD: torch.Tensor, target_C: torch.Tensor) -> LossTensors:
        """Return the tensors of some of the tokens, with the same classifier."""
        return self._replace(hidden_ND=hidden_CD, target_N=target_C)

    def _check(self, target_name: str) -> None:
        hidden_ND, weight_VD, target_N, *_ = self
        require_shape("hidden", hidden_ND, "N D")
        require_shape("weight", weight_VD, "V D")
        require_shape(target_name, target_N, "N")
        require_floating(hidden=hidden_ND, weight=weight_VD)
        if target_N.dtype != torch.int64:
            raise ValueError(f"{target_name} must be int64, got {target_N.dtype}")
        if self.autocast_dtype is None:
            require_same("dtype", hidden=hidden_ND.dtype, weight=weight_VD.dtype)
        devices = {"hidden": hidden_ND.device, "weight": weight_VD.device, target_name: target_N.device}
        require_same("device", **devices)
        require_same("width D", hidden=hidden_ND.shape[1], weight=weight_VD.shape[1])
        require_same("number of rows N", **{"hidden": hidden_ND.shape[0], target_name: target_N.shape[0]})
        if hidden_ND.shape[0] == 0 or weight_VD.shape[0] == 0:
            raise ValueError(
                f"hidden and weight must have at least one row, got {hidden_ND.shape[0]} and {weight_VD.shape[0]}"
            )
        self._check_per_class("bias", self.bias_V)
        self._check_per_class("class_weight", self.class_weight_V)
        if self.class_weight_V is not None and self.class_weight_V.requires_grad:
            raise ValueError("class_weight takes no gradient, as in torch; detach it")

    def _check_per_class(self, name: str, tensor_V: torch.Tensor | None) -> None:
        if tensor_V is None:
            return
        weight_VD = self.weight_VD
        require_shape(name, tensor_V, "V")
        require_floating(**{name: tensor_V})
        require_same("number of classes V", **{name: tensor_V.shape[0], "weight": weight_VD.shape[0]})
        require_same("device", **{name: tensor_V.device, "weight": weight_VD.device})
        if self.autocast_dtype is None:
            require_same("dtype", **{name: tensor_V.dtype, "weight": weight_VD.dtype})


loss_form: Callable[[Callable[[LossTensors, Options], torch.Tensor]], Callable[..., torch.Tensor]]
loss_form = takes(LossTensors, Options)
"""A decorator of forms: callers pass five tensors in order and the options by name."""
