"""What all forms do first: refuse bad arguments, cast to the dtype of autocast, and give masks five dims."""

# B batch, G key-value heads, R query heads of each, Q queries, K keys, D width of a head, V width of a value

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch

from ..arguments import (
    require_at_least_one,
    require_floating,
    require_number,
    require_same,
    require_shape,
    require_tensor,
)
from ..products import autocast_dtype


class AttentionTensors(NamedTuple):
    """The tensors of a call: ``q`` is ``[B, G, R, Q, D]``, ``k`` is ``[B, G, K, D]`` and ``v`` is ``[B, G, K, V]``.

    ``mask`` (bool, True where a query sees a key) and ``bias`` (added to the scores) broadcast to ``[B, G, R, Q, K]``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @classmethod
    def checked(cls, *tensors: torch.Tensor | None, **by_name: torch.Tensor | None) -> Self:
        """Return the tensors, under autocast in its dtype; refuse bad ones before anything is allocated."""
        given = cls(*tensors, **by_name)  # type: ignore[arg-type]
        require_shape("q", given.q, "B G R Q D")
        require_shape("k", given.k, "B G K D")
        require_shape("v", given.v, "B G K V")
        given._check_masks()
        floating = {name: tensor for name, tensor in given._present().items() if name != "mask"}
        require_floating(**floating)
        require_same("device", **{name: tensor.device for name, tensor in given._present().items()})
        given._check_sizes()
        cast = autocast_dtype(*floating.values())
        if cast is not None:
            return given._replace(**{name: tensor.to(cast) for name, tensor in floating.items()})._with_five_dims()
        require_same("dtype", **{name: tensor.dtype for name, tensor in floating.items()})
        return given._with_five_dims()

    @property
    def map_dtype(self) -> torch.dtype:
        """The dtype of the map: under autocast float32, in which torch returns a softmax."""
        return self.q.dtype if autocast_dtype(self.q) is None else torch.float32

    def _present(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self._asdict().items() if tensor is not None}

    def _check_masks(self) -> None:
        if self.mask is not None and require_tensor("mask", self.mask).dtype != torch.bool:
            raise ValueError(
                f"mask must be bool, True where a query sees a key, got {self.mask.dtype}; numbers to add are bias="
            )
        if self.bias is not None:
            require_tensor("bias", self.bias)

    def _check_sizes(self) -> None:
        q, k, v, mask, bias = self
        require_same("batch B", q=q.shape[0], k=k.shape[0], v=v.shape[0])
        require_same("number of key-value heads", q=q.shape[1], k=k.shape[1], v=v.shape[1])
        require_same("number of keys K", k=k.shape[2], v=v.shape[2])
        require_same("width D", q=q.shape[4], k=k.shape[3])
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.numel() == 0:
                raise ValueError(f"{name} must have at least one element, got shape {list(tensor.shape)}")
        scores = (*q.shape[:4], k.shape[2])
        for name, given in (("mask", mask), ("bias", bias)):
            if given is not None and not _broadcasts(given.shape, scores):
                raise ValueError(f"{name} must broadcast to the scores {list(scores)}, got shape {list(given.shape)}")

    def _with_five_dims(self) -> Self:
        return self._replace(
            **{
                name: tensor[(None,) * (5 - tensor.dim())]
                for name in ("mask", "bias")
                if (tensor := getattr(self, name)) is not None
            }
        )


def _broadcasts(shape: torch.Size, to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(
        size in (1, wanted) for size, wanted in zip(reversed(shape), reversed(to), strict=False)
    )


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """The options that every form has."""

    causal: bool = False
    """Whether query i sees only keys 0 to i."""
    scale: float | None = None
    dropout: float = 0.0
    """The share of weights that are dropped. The others are divided by ``1 - dropout``."""
    keep_map: bool = False

    def __post_init__(self) -> None:
        for name in ("causal", "keep_map"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.scale is not None:
            require_number("scale", self.scale, "finite", lambda scale: True)
        require_number("dropout", self.dropout, "at least 0 and below 1", lambda share: 0 <= share < 1)

    def scale_of(self, q: torch.Tensor) -> float:
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale


CHUNK_BYTES = 2**28  # bytes of a chunk's weights where queries_per_chunk is not given


@dataclass(frozen=True, kw_only=True)
class ChunkOptions(AttentionOptions):
    queries_per_chunk: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.queries_per_chunk is not None:
            require_at_least_one("queries_per_chunk", self.queries_per_chunk)

    def fitting(self, tensors: AttentionTensors) -> Self:
        """Return these options, with as many queries per chunk as ``CHUNK_BYTES`` allows where the number is None."""
        if self.queries_per_chunk is not None:
            return self
        q, num_keys = tensors.q, tensors.k.shape[2]
        bytes_per_query = q.shape[:3].numel() * num_keys * q.element_size()
        return replace(self, queries_per_chunk=max(1, min(q.shape[3], CHUNK_BYTES // bytes_per_query)))
