"""Argument checks that every form of native sparse attention makes, and the sizes of its blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch

from ..arguments import require_at_least_one, require_floating, require_same, require_shape, require_size
from ..call import takes
from ..launches import num_tiles

NUM_BRANCHES = 3  # in the order of the gates: compressed, selected, window

# limits of the calls that the kernels support
WIDEST = 256
MOST_HEADS = 64
"""Query heads per key-value head."""
MOST_SHARED = 256
"""Tokens that a compressed and a selection block have in common: larger counts are not exact in bfloat16."""
MOST_OVERLAPPING = 512
"""Compressed blocks that share tokens with one selection block."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The sizes of blocks and window in tokens, and ``num_selected`` in blocks: the paper's l, d, l', n and w."""

    compress_block: int
    compress_stride: int
    select_block: int
    num_selected: int
    window: int

    def __post_init__(self) -> None:
        for size in fields(Blocks):
            require_at_least_one(size.name, getattr(self, size.name))
        if self.compress_stride > self.compress_block:
            raise ValueError(
                f"compress_stride must be at most compress_block ({self.compress_block}), or tokens are in no block; "
                f"got {self.compress_stride}"
            )

    def num_compressed(self, num_tokens: int) -> int:
        """How many compressed blocks are complete after ``num_tokens``."""
        return max(0, (num_tokens - self.compress_block) // self.compress_stride + 1)

    def num_selectable(self, num_tokens: int) -> int:
        """How many selection blocks have begun after ``num_tokens``."""
        return num_tiles(num_tokens, self.select_block)


@dataclass(frozen=True, kw_only=True)
class NsaOptions(Blocks):
    """The options of a form. ``scale`` is ``D**-0.5`` unless given."""

    queries_per_chunk: int
    scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least_one("queries_per_chunk", self.queries_per_chunk)


class NsaTensors(NamedTuple):
    """The tensors of a call, in the order of the contract."""

    q_BTGRD: torch.Tensor
    k_BTGD: torch.Tensor
    v_BTGD: torch.Tensor
    gates_BTGR3: torch.Tensor
    position_embedding_LD: torch.Tensor | None = None

    @classmethod
    def checked(cls, *given: Any, **by_name: Any) -> NsaTensors:
        tensors = cls(*given, **by_name)
        named = {}
        for (field, tensor), axes in zip(
            tensors._asdict().items(), ("B T G R D", "B T G D", "B T G D", "B T G R 3", "L D"), strict=True
        ):
            if tensor is not None:
                name = field.rpartition("_")[0]
                named[name] = require_shape(name, tensor, axes)
        require_floating(**named)
        require_same("dtype", **{name: tensor.dtype for name, tensor in named.items()})
        require_same("device", **{name: tensor.device for name, tensor in named.items()})
        batch, num_tokens, groups, heads, width = tensors.q_BTGRD.shape
        require_size("k", tensors.k_BTGD, (batch, num_tokens, groups, width))
        require_size("v", tensors.v_BTGD, (batch, num_tokens, groups, width))
        require_size("gates", tensors.gates_BTGR3, (batch, num_tokens, groups, heads, NUM_BRANCHES))
        if tensors.q_BTGRD.numel() == 0:
            raise ValueError(f"q must have at least one element, got shape {list(tensors.q_BTGRD.shape)}")
        return tensors

    @property
    def wants_gradient(self) -> bool:
        """Whether an input needs a gradient. Ask before the Function: inside, grad mode is off."""
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in self)


def nsa_form(form: Callable[[NsaTensors, NsaOptions], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Decorate a form: callers pass the tensors in order and the options by name, and the form gets both checked."""

    @takes(NsaTensors, NsaOptions)
    @functools.wraps(form)
    def called(tensors: NsaTensors, options: NsaOptions) -> torch.Tensor:
        if tensors.position_embedding_LD is not None:
            size = (options.compress_block, tensors.q_BTGRD.shape[-1])
            require_size("position_embedding", tensors.position_embedding_LD, size)
        return form(tensors, options)

    return called


def scale_of(q_BTGRD: torch.Tensor, scale: float | None) -> float:
    return float(q_BTGRD.shape[-1] ** -0.5) if scale is None else scale


def takes_kernels(q_BTGRD: torch.Tensor, blocks: Blocks) -> bool:
    """Whether the kernels support this call; if not, the form ``triton`` runs ``chunked``."""
    heads, width = q_BTGRD.shape[3:]
    shared = min(blocks.compress_block, blocks.select_block)
    overlapping = blocks.compress_block + blocks.select_block
    return (
        q_BTGRD.dtype != torch.float64
        and width <= WIDEST
        and heads <= MOST_HEADS
        and shared <= MOST_SHARED
        and overlapping <= MOST_OVERLAPPING * blocks.compress_stride
    )
