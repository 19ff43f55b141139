"""Checks the arguments of every form of KDA, and says which tokens and states belong to which sequence."""

# B batch, T tokens, H heads, K width of a key, V width of a value, S sequences

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from ..arguments import (
    require_at_least_one,
    require_floating,
    require_integer,
    require_same,
    require_shape,
    require_size,
)
from ..call import takes

DEFAULT_CHUNK_SIZE = 64

Outputs = tuple[torch.Tensor, torch.Tensor]
"""The output of every token, and the final state of every sequence."""


@dataclass(frozen=True)
class Span:
    """Sequences that are scanned together: the slice of T with their tokens, and the slice of S with their states."""

    tokens: slice
    states: slice

    @property
    def num_tokens(self) -> int:
        return self.tokens.stop - self.tokens.start

    def cut(self, chunk_size: int) -> list[slice]:
        """Return slices of T with ``chunk_size`` tokens each; none where the sequence is empty."""
        stop = self.tokens.stop
        return [slice(start, min(start + chunk_size, stop)) for start in range(self.tokens.start, stop, chunk_size)]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of computations and states: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def scale_of(q_BTHK: torch.Tensor, scale: float | None) -> float:
    return float(q_BTHK.shape[-1] ** -0.5) if scale is None else scale


@dataclass(frozen=True, kw_only=True)
class KdaOptions:
    """The options of a form. ``scale`` is ``K**-0.5`` unless given."""

    scale: float | None = None
    chunk_size: int = DEFAULT_CHUNK_SIZE

    def __post_init__(self) -> None:
        require_at_least_one("chunk_size", self.chunk_size)


@dataclass(frozen=True)
class KdaTensors:
    """The tensors of a call, in the order of the contract. The constructor refuses what cannot be computed.

    Each packed sequence is a span of its own. Reading ``cu_seqlens`` from a GPU synchronizes with it: keep
    ``cu_seqlens`` on the CPU where that matters.
    """

    q_BTHK: torch.Tensor
    k_BTHK: torch.Tensor
    v_BTHV: torch.Tensor
    g_BTHK: torch.Tensor
    beta_BTH: torch.Tensor
    initial_state_SHKV: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    spans: list[Span] = field(init=False)

    @classmethod
    def checked(cls, *tensors: Any, **by_name: Any) -> KdaTensors:
        return cls(*tensors, **by_name)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The tensors with a token axis: q, k, v, g and beta."""
        return self.q_BTHK, self.k_BTHK, self.v_BTHV, self.g_BTHK, self.beta_BTH

    @property
    def state_size(self) -> tuple[int, ...]:
        return (self.spans[-1].states.stop, *self.q_BTHK.shape[2:], self.v_BTHV.shape[-1])

    @property
    def wide(self) -> torch.dtype:
        return wide_dtype(self.q_BTHK.dtype)

    def __post_init__(self) -> None:
        q_BTHK = self.q_BTHK
        tensors = dict(zip(("q", "k", "v", "g", "beta"), self.inputs, strict=True))
        for name, axes in (("q", "B T H K"), ("k", "B T H K"), ("v", "B T H V"), ("g", "B T H K"), ("beta", "B T H")):
            require_shape(name, tensors[name], axes)
        require_floating(**tensors)
        require_same("dtype", q=q_BTHK.dtype, k=self.k_BTHK.dtype, v=self.v_BTHV.dtype)
        size_BTHK, size_BTHV = q_BTHK.shape, self.v_BTHV.shape
        batch, num_tokens, *_ = size_BTHK
        require_size("k", self.k_BTHK, size_BTHK)
        require_size("v", self.v_BTHV, (*size_BTHK[:3], size_BTHV[3]))
        require_size("g", self.g_BTHK, size_BTHK)
        require_size("beta", self.beta_BTH, size_BTHK[:3])
        for name, size in (("q", size_BTHK), ("v", size_BTHV)):
            if 0 in size:
                raise ValueError(f"{name} must have at least one element, got shape {list(size)}")
        spans = [Span(slice(0, num_tokens), slice(0, batch))]
        if self.cu_seqlens is not None:
            bounds = _bounds_of(self.cu_seqlens, batch, num_tokens)
            spans = [Span(slice(*ends), slice(i, i + 1)) for i, ends in enumerate(pairwise(bounds))]
        object.__setattr__(self, "spans", spans)
        if self.initial_state_SHKV is not None:
            require_state("initial_state", self.initial_state_SHKV, self.state_size, q_BTHK.dtype)
            tensors["initial_state"] = self.initial_state_SHKV
        require_same("device", **{name: tensor.device for name, tensor in tensors.items()})


kda_form: Callable[[Callable[[KdaTensors, KdaOptions], Outputs]], Callable[..., Outputs]]
kda_form = takes(KdaTensors, KdaOptions)
"""Decorates a form of KDA, which callers then call with the tensors in order and the options by name."""


def require_state(name: str, state_SHKV: torch.Tensor, size: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse a state of another size, or of 16 bits: rounded after every piece of a sequence, it would lose writes."""
    require_shape(name, state_SHKV, "S H K V")
    wide = wide_dtype(dtype)
    if state_SHKV.dtype != wide:
        raise ValueError(f"{name} must be {wide} to go with {dtype} inputs, got {state_SHKV.dtype}")
    require_size(name, state_SHKV, size)


def _bounds_of(cu_seqlens: torch.Tensor, batch: int, num_tokens: int) -> list[int]:
    """Return the first token of every sequence, and the end of the last."""
    require_shape("cu_seqlens", cu_seqlens, "S+1")
    require_integer(cu_seqlens=cu_seqlens)
    if batch != 1:
        raise ValueError(f"cu_seqlens needs a batch of 1, with the sequences packed along T; got a batch of {batch}")
    bounds: list[int] = cu_seqlens.tolist()
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != num_tokens:
        ends = f"{bounds[0]} to {bounds[-1]}" if bounds else "no numbers"
        raise ValueError(f"cu_seqlens must go from 0 to the number of tokens, {num_tokens}; got {ends}")
    for i, (start, stop) in enumerate(pairwise(bounds)):
        if stop < start:
            raise ValueError(f"cu_seqlens must not decrease, got {start} and then {stop} at index {i + 1}")
    return bounds
