"""Rotary position embedding with one table of cosines and sines for all layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..dispatch import AUTO, Dispatcher
from .module import RotaryEmbedding
from .shared_table import shared_table_rope
from .tables import RopeTables, default_tables

__all__ = ["FORMS", "RopeTables", "RotaryEmbedding", "default_tables", "rope", "rope_positions"]

DISPATCHER = Dispatcher("rope", __name__, forms=("shared_table", "triton"), otherwise="shared_table", kernels="triton")
FORMS = DISPATCHER.names


def rope(
    x: torch.Tensor,
    *,
    base: float = 10_000.0,
    offset: int = 0,
    positions: torch.Tensor | None = None,
    max_positions: int | None = None,
    tables: RopeTables | None = None,
    form: str = "auto",
) -> torch.Tensor:
    """Rotate ``x`` of ``[..., T, H, D]`` by its positions: ``offset`` to ``offset + T - 1``, or ``positions``.

    Pair ``i`` is element ``i`` of the first half of D with element ``i`` of the second, as in Llama, Qwen and GPT-NeoX
    (not neighbours, as in GPT-J), and is rotated by ``position * base**(-2i/D)`` radians. The result has the dtype of
    ``x`` and is rounded once, whatever dtype the model was cast to; it can be differentiated twice.

    ``positions`` are integers of ``[T]`` or ``[..., T]``. Their maximum is read from the device, which synchronizes,
    unless ``max_positions`` promises that all are below it. Without ``positions``, ``max_positions`` only makes the
    table that long at once. ``tables`` owns the cosines and sines; by default all calls of the process share one.

    ``form="auto"`` is ``triton`` on a GPU where Triton is installed, and ``shared_table`` elsewhere and under
    ``torch.compile``, which compiles its operators into kernels.
    """
    is_traced = form == AUTO and torch.compiler.is_compiling()
    function: Callable[..., torch.Tensor] = shared_table_rope if is_traced else DISPATCHER.function(form, x)
    return function(x, base=base, offset=offset, positions=positions, max_positions=max_positions, tables=tables)


def rope_positions(x: torch.Tensor, positions: torch.Tensor, **options: Any) -> torch.Tensor:
    """Call ``rope`` on ``x`` (``[..., T, H, D]``) with token ``t`` at position ``positions[..., t]``, not at ``t``."""
    return rope(x, positions=positions, **options)
