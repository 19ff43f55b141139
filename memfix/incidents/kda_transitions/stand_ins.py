"""The memory of the KDA op of one layer, simulated once instead of in every layer."""

# B batch, T tokens, H heads, K key width, V value width

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch

from ...meters.base import Meter
from ..config import RunConfig
from ..stand_in import Footprint, StandIn, kept_inputs, measure_footprint
from ..training import COMPUTE_DTYPES
from .block import REPLAYED, SEQUENTIAL, attend_of
from .model import LanguageModel


@dataclass(frozen=True)
class SimulatedOp:
    """What the op of each layer takes, in the place of the op itself."""

    footprint: Footprint
    keeps_inputs: tuple[bool, ...]
    notes: tuple[str, ...]
    """Why a step with it is an estimate, where it is."""

    def put_into(self, model: torch.nn.Module) -> None:
        """Token by token, a layer's op is thousands of operators, and every layer calls it alike."""
        stand_in = StandIn(self.footprint, self.keeps_inputs)
        for block in cast(LanguageModel, model).blocks:
            block.attend = lambda q, k, v, g, beta: stand_in(v, q, k, g, beta)


def simulated_op(config: RunConfig, meter: Meter, say: Callable[[str], object] = lambda doing: None) -> SimulatedOp:
    """Measured at the shapes that the layers of a run call it with."""
    model, tokens = config.model, config.data.context_length
    attend = attend_of(model.kda_mode, model.kda_form, model.kda_memory_chunk_size)

    # the output is like v, which therefore comes first
    def of_v_first(v: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *gates: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, *gates)

    name = op_name(config)
    say(f"{name} of one layer, {config.batch_size} x {tokens:,} tokens")
    footprint = measure_footprint(meter, of_v_first, _shapes(config, tokens), keeps_tables=False)
    few = min(tokens, 2 * model.kda_memory_chunk_size)  # which inputs are kept does not depend on how many tokens
    keeps_inputs = kept_inputs(meter, of_v_first, _shapes(config, few))
    is_many_nodes = model.kda_mode == SEQUENTIAL or model.kda_form in REPLAYED
    estimate = (f"{name} is many nodes of autograd, measured as one: peaks are off by a few tensors of q's size",)
    return SimulatedOp(footprint, keeps_inputs, footprint.notes + (estimate if is_many_nodes else ()))


def op_name(config: RunConfig) -> str:
    """``kda/naive``"""
    return f"kda/{SEQUENTIAL if config.model.kda_mode == SEQUENTIAL else config.model.kda_form}"


def _shapes(config: RunConfig, num_tokens: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Of v, q, k, g and beta."""
    model, dtype = config.model, COMPUTE_DTYPES[config.training.precision]
    beta_BTH = (config.batch_size, num_tokens, model.heads)
    key_BTHK = (*beta_BTH, model.head_width)
    value_BTHV = (*beta_BTH, model.value_width or model.head_width)
    return [(value_BTHV, dtype), (key_BTHK, dtype), (key_BTHK, dtype), (key_BTHK, torch.float32), (beta_BTH, dtype)]
