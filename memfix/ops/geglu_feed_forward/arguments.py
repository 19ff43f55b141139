"""The arguments of every form of the feed-forward layer: its tensors and its options, both checked."""

# N tokens, D width, F hidden width, H rows of the first weight: 2F, or F without a gate

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..arguments import (
    require_at_least_one,
    require_floating,
    require_int,
    require_number,
    require_one_of,
    require_same,
    require_shape,
    require_tensor,
)
from ..call import takes
from ..products import autocast_dtype

ACTIVATIONS = ("geglu", "swiglu", "gelu")
TOKENS_PER_CHUNK = 16_384


class FeedForwardTensors(NamedTuple):
    """The tensors of a call, in the order of the contract."""

    hidden: torch.Tensor
    up_weight: torch.Tensor
    down_weight: torch.Tensor
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None
    norm_bias: torch.Tensor | None = None

    @classmethod
    def checked(cls, *tensors: Any, **by_name: Any) -> FeedForwardTensors:
        """Make the tensors of a call and refuse invalid ones, before anything is allocated."""
        made = cls(*tensors, **by_name)
        hidden = require_tensor("hidden", made.hidden)
        require_shape("up_weight", made.up_weight, "H D")
        require_shape("down_weight", made.down_weight, "D F")
        given = {name: tensor for name, tensor in made._asdict().items() if tensor is not None}
        for name in tuple(given)[3:]:
            require_shape(name, given[name], "H" if name == "up_bias" else "D")
        require_floating(**given)
        require_same("device", **{name: tensor.device for name, tensor in given.items()})
        if made.autocast_dtype is None:
            require_same("dtype", **{name: tensor.dtype for name, tensor in given.items()})
        if 0 in (hidden.numel(), made.up_weight.numel()):
            raise ValueError(
                "hidden and up_weight must have at least one element, "
                f"got shapes {list(hidden.shape)} and {list(made.up_weight.shape)}"
            )
        made._check_widths(given)
        return made

    def _check_widths(self, given: dict[str, torch.Tensor]) -> None:
        widths = {name: tensor.shape[0] for name, tensor in given.items() if name.startswith("norm") or name[0] == "d"}
        widths |= {"hidden": self.hidden.shape[-1] if self.hidden.dim() else 0, "up_weight": self.up_weight.shape[1]}
        require_same("width D", **{name: widths[name] for name in given if name in widths})
        if self.up_bias is not None:
            require_same("number of rows H", up_weight=self.up_weight.shape[0], up_bias=self.up_bias.shape[0])

    def require_rows_for(self, activation: str) -> None:
        """Refuse an ``up_weight`` without a row for each value and, if ``activation`` has a gate, for each gate."""
        rows, hidden_width = self.up_weight.shape[0], self.down_weight.shape[1]
        expected = hidden_width if activation == "gelu" else 2 * hidden_width
        if rows != expected:
            raise ValueError(
                f"up_weight must have {expected} rows for activation {activation!r} and down_weight "
                f"{list(self.down_weight.shape)}, got {rows}"
            )

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of the products under autocast, where the tensors may have different dtypes; else None."""
        return autocast_dtype(*self)

    def cast(self, product_dtype: torch.dtype, norm_dtype: torch.dtype) -> FeedForwardTensors:
        """Return the tensors with the parameters in these dtypes; ``hidden`` is not cast."""
        parameters = {name: t for name, t in self._asdict().items() if t is not None and name != "hidden"}
        return self._replace(
            **{name: t.to(norm_dtype if "norm" in name else product_dtype) for name, t in parameters.items()}
        )

    @property
    def has_norm(self) -> bool:
        return self.norm_weight is not None or self.norm_bias is not None


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that define the result."""

    activation: str = "geglu"
    residual: bool = False
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        require_one_of("activation", self.activation, ACTIVATIONS)
        require_number("norm_eps", self.norm_eps, "at least 0", lambda value: value >= 0)
        if not isinstance(self.residual, bool):
            raise TypeError(f"residual must be True or False, got {self.residual!r}")


@dataclass(frozen=True, kw_only=True)
class ChunkOptions(Options):
    """The options of a chunked form. ``tokens_kept`` tokens keep their first product for backward, others recompute."""

    tokens_per_chunk: int = TOKENS_PER_CHUNK
    tokens_kept: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least_one("tokens_per_chunk", self.tokens_per_chunk)
        require_int("tokens_kept", self.tokens_kept, at_least=0)


Decorate = Callable[[Callable[[FeedForwardTensors, Any], torch.Tensor]], Callable[..., torch.Tensor]]
plain_form: Decorate = takes(FeedForwardTensors, Options)
chunked_form: Decorate = takes(FeedForwardTensors, ChunkOptions)
"""A decorator of forms that visit tokens in chunks: callers pass seven tensors in order and the options by name."""
