"""What every form of KDA demands of its arguments, and which tokens and states belong together."""

# B batch, T tokens, H heads, K width of a key, V width of a value, S sequences

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from ..arguments import require_at_least_one, require_floating, require_integer, require_same, require_shape

DEFAULT_CHUNK_SIZE = 64


@dataclass(frozen=True)
class Span:
    """Sequences that are scanned together: the tokens of all of them along T, and their places among the states."""

    tokens: slice
    states: slice

    @property
    def num_tokens(self) -> int:
        return self.tokens.stop - self.tokens.start

    def cut(self, chunk_size: int) -> list[slice]:
        """Its tokens, ``chunk_size`` at a time; none where the sequence is empty."""
        stop = self.tokens.stop
        return [slice(start, min(start + chunk_size, stop)) for start in range(self.tokens.start, stop, chunk_size)]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a form computes in and what states are kept in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def scale_of(q_BTHK: torch.Tensor, scale: float | None) -> float:
    return float(q_BTHK.shape[-1] ** -0.5) if scale is None else scale


def require_kda(
    q_BTHK: torch.Tensor,
    k_BTHK: torch.Tensor,
    v_BTHV: torch.Tensor,
    g_BTHK: torch.Tensor,
    beta_BTH: torch.Tensor,
    initial_state_SHKV: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> list[Span]:
    """Refuse what cannot be computed, before anything is allocated; the sequences that are left.

    Packed sequences are spans of their own. Their lengths are read on the host, which waits for a GPU
    that ``cu_seqlens`` is on: keep them on the CPU where that matters.
    """
    require_shape("q", q_BTHK, "B T H K")
    require_shape("k", k_BTHK, "B T H K")
    require_shape("v", v_BTHV, "B T H V")
    require_shape("g", g_BTHK, "B T H K")
    require_shape("beta", beta_BTH, "B T H")
    tensors = {"q": q_BTHK, "k": k_BTHK, "v": v_BTHV, "g": g_BTHK, "beta": beta_BTH}
    require_floating(**tensors)
    require_same("dtype", q=q_BTHK.dtype, k=k_BTHK.dtype, v=v_BTHV.dtype)
    batch, num_tokens, num_heads, key_width = q_BTHK.shape
    _require_size("k", k_BTHK, q_BTHK.shape)
    _require_size("v", v_BTHV, (batch, num_tokens, num_heads, v_BTHV.shape[-1]))
    _require_size("g", g_BTHK, q_BTHK.shape)
    _require_size("beta", beta_BTH, (batch, num_tokens, num_heads))
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            raise ValueError(f"{name} must have at least one element, got shape {list(tensor.shape)}")
    bounds = None if cu_seqlens is None else _bounds_of(cu_seqlens, batch, num_tokens)
    if initial_state_SHKV is not None:
        num_states = batch if bounds is None else len(bounds) - 1
        require_state(
            "initial_state", initial_state_SHKV, (num_states, num_heads, key_width, v_BTHV.shape[-1]), q_BTHK.dtype
        )
        tensors["initial_state"] = initial_state_SHKV
    require_same("device", **{name: tensor.device for name, tensor in tensors.items()})
    require_at_least_one("chunk_size", chunk_size)
    if bounds is None:
        return [Span(slice(0, num_tokens), slice(0, batch))]
    return [Span(slice(*bounds[i : i + 2]), slice(i, i + 1)) for i in range(len(bounds) - 1)]


def require_state(name: str, state_SHKV: torch.Tensor, size: tuple[int, ...], dtype: torch.dtype) -> None:
    """A state is wide: rounded to 16 bits after every piece of a sequence, it would forget what it was told."""
    require_shape(name, state_SHKV, "S H K V")
    wide = wide_dtype(dtype)
    if state_SHKV.dtype != wide:
        raise ValueError(f"{name} must be {wide} to go with {dtype} inputs, got {state_SHKV.dtype}")
    _require_size(name, state_SHKV, size)


def _bounds_of(cu_seqlens: torch.Tensor, batch: int, num_tokens: int) -> list[int]:
    """The first token of every sequence, and the end of the last."""
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


def _require_size(name: str, tensor: torch.Tensor, size: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != tuple(size):
        raise ValueError(f"{name} must have shape {list(size)} to go with q, got {list(tensor.shape)}")
