"""The memory of what every layer does in many small pieces, simulated once instead of in every layer."""

# B batch, T tokens, H query heads, G key-value heads, K head width, L places of a compressed block

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...meters.base import Meter
from ...ops.nsa import nsa
from ...ops.rope import RotaryEmbedding
from ..stand_in import StandIn, measure_footprint
from .model import Rotate, SparseAttend
from .step import WARMUP_TOKENS, LayerFunctions, StepSettings


def simulated_functions(
    settings: StepSettings, meter: Meter, say: Callable[[str], object] = lambda doing: None
) -> tuple[LayerFunctions | None, tuple[str, ...]]:
    """What the layers call in a simulation, None for the functions themselves; and why that is an estimate, if it is.

    Every precision computes both in bfloat16, so that is what they are measured in.
    """
    if settings.context_length <= WARMUP_TOKENS:
        return None, ()
    size, batch, tokens = settings.size, settings.batch_size, settings.context_length
    query_shape = (batch, tokens, size.heads, size.head_width)
    key_shape = (batch, tokens, size.kv_heads, size.head_width)
    rope = RotaryEmbedding(size.head_width, max_positions=tokens)
    say(f"{tokens:,} tokens: rotation and attention of one layer")
    rotations = {
        shape: measure_footprint(meter, rope, [(shape, torch.bfloat16)], keeps_tables=True)
        for shape in (query_shape, key_shape)
    }
    rotate = _Rotation(rope, {shape: StandIn(footprint, keeps_inputs=False) for shape, footprint in rotations.items()})
    footprints = list(rotations.values())
    sparse_attend: SparseAttend = nsa
    if settings.attention_type == "nsa":
        sizes = dataclasses.asdict(size.sparse)

        def attend(*tensors: torch.Tensor) -> torch.Tensor:
            *q_k_v_gates, places_LK = tensors
            return nsa(*q_k_v_gates, position_embedding=places_LK, **sizes)

        gates_shape, places_shape = (batch, tokens, size.heads, 3), (size.sparse.compress_block, size.head_width)
        shapes = (query_shape, key_shape, key_shape, gates_shape, places_shape)
        taken = measure_footprint(meter, attend, [(shape, torch.bfloat16) for shape in shapes], keeps_tables=False)
        footprints.append(taken)
        sparse_attend = _as_nsa(StandIn(taken, keeps_inputs=True))
    notes = dict.fromkeys(note for footprint in footprints for note in footprint.notes)
    return LayerFunctions(rotate, sparse_attend), tuple(notes)


@dataclass(frozen=True)
class _Rotation:
    """The real one for other shapes than a whole batch's; the warm-up makes its table."""

    real: Rotate
    stand_ins: dict[tuple[int, ...], StandIn] = field(default_factory=dict)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.stand_ins.get(tuple(x.shape), self.real)(x)


def _as_nsa(stand_in: StandIn) -> SparseAttend:
    def attend(*tensors: torch.Tensor, position_embedding: torch.Tensor, **sizes: Any) -> torch.Tensor:
        return stand_in(*tensors, position_embedding)

    return attend
