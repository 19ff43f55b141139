"""The KDA transitions as an incident: its model and data, what layers keep for backward, and how many layers fit."""

# B batch, T tokens, H heads, K key width, V value width

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch

from ...fit import Tried
from ...meters.base import Meter
from ...meters.stages import Stage
from ...progress import Say, silent
from ...units import format_bytes
from ..config import RunConfig
from ..decoder_parts import layer_stage
from ..incident import Growth, Incident
from ..measured_step import repeated_reading
from ..profile import ReportedFigure
from ..staged_reading import StagedReading
from ..stand_in import StandIn, StandIns, kept_inputs, measure_footprint
from ..step import Precision
from ..tokens import TokenData, num_token_targets, token_batches
from .block import REPLAYED, SCAN, SEQUENTIAL, attend_of
from .model import KDAModel, ModelConfig

COMPARED = ("naive", "reported", "streamed", "wy")
COMPARED_UP_TO = 1024  # tokens of a sequence: most forms loop over tokens, which takes minutes for longer sequences


def op_name(config: RunConfig) -> str:
    """The op and its form: ``kda/naive``."""
    return f"kda/{SEQUENTIAL if config.model.kda_mode == SEQUENTIAL else config.model.kda_form}"


def _describe(config: RunConfig) -> list[str]:
    model = config.model
    return [
        f"{model.layers} layers",
        f"{config.batch_size} x {config.data.context_length:,} tokens",
        op_name(config) + ("" if model.kda_mode == SEQUENTIAL else f" in chunks of {model.kda_memory_chunk_size}"),
    ]


# ---------------------------------------------------------------- simulated once instead of in every layer
def _stand_ins(config: RunConfig, meter: Meter, say: Say) -> StandIns | None:
    """A stand-in for the op, which runs thousands of operators per layer in forms that loop over tokens."""
    if Precision.named(config.training.precision).autocast:
        return None  # autocast chooses the dtypes of the op's inputs
    model, tokens, name = config.model, config.data.context_length, op_name(config)
    attend = attend_of(model.kda_mode, model.kda_form, model.kda_memory_chunk_size)

    # a stand-in's output has the shape of its first argument, so v comes first
    def of_v_first(v: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *gates: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, *gates)

    say(f"{name} of one layer, {config.batch_size} x {tokens:,} tokens")
    footprint = measure_footprint(meter, of_v_first, _shapes(config, tokens), keeps_tables=False)
    few = min(tokens, 2 * model.kda_memory_chunk_size)  # the number of tokens does not change which inputs are kept
    stand_in = StandIn(footprint, kept_inputs(meter, of_v_first, _shapes(config, few)))

    def put_into(model: torch.nn.Module) -> None:
        for block in cast(KDAModel, model).blocks:
            block.attend = lambda q, k, v, g, beta: stand_in(v, q, k, g, beta)

    is_many_nodes = model.kda_mode == SEQUENTIAL or model.kda_form in REPLAYED
    estimate = (f"{name} is many nodes of autograd, measured as one: peaks are off by a few tensors of q's size",)
    return StandIns(put_into, footprint, footprint.notes + (estimate if is_many_nodes else ()))


def _shapes(config: RunConfig, num_tokens: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of v, q, k, g and beta."""
    model, dtype = config.model, Precision.named(config.training.precision).compute
    beta_BTH = (config.batch_size, num_tokens, model.heads)
    key_BTHK = (*beta_BTH, model.head_width)
    value_BTHV = (*beta_BTH, model.value_width or model.head_width)
    return [(value_BTHV, dtype), (key_BTHK, dtype), (key_BTHK, dtype), (key_BTHK, torch.float32), (beta_BTH, dtype)]


# ---------------------------------------------------------------- layers that fit
@dataclass(frozen=True)
class LayerGrowth:
    """How a step's peak grows with the number of layers. All layers are alike, so it grows in a straight line."""

    op_bytes: int
    """The peak of one layer's op in forward."""
    bytes_a_layer: int
    most: int
    """The largest number of layers that fit."""


def layer_growth(config: RunConfig, capacity_bytes: int, meter: Meter, say: Say = silent) -> LayerGrowth:
    """Measure steps with half of the run's layers and with all, and extrapolate; ``memfix fit`` tries the end too."""
    stand_ins = _stand_ins(config, meter, say)
    tried = []
    for layers in (max(1, config.model.layers // 2), max(2, config.model.layers)):
        say(f"{config.name}, {op_name(config)}: a train step of {layers} layers")
        at = config.replaced({"model.layers": layers})
        tried.append(Tried(layers, repeated_reading(incident, at, meter, stand_ins=stand_ins), capacity_bytes))
    few, many = tried
    bytes_a_layer = (many.bytes - few.bytes) // (many.value - few.value)
    op_bytes = stand_ins.op.forward_peak_bytes if stand_ins and stand_ins.op else 0
    return LayerGrowth(op_bytes, bytes_a_layer, max(0, few.value + (capacity_bytes - few.bytes) // bytes_a_layer))


# ---------------------------------------------------------------- beside the report
def is_of_the_report(config: RunConfig) -> bool:
    """Whether the run has the shape of the report's figures: batch 16, 256 tokens, 8 heads of 64."""
    shape = (config.batch_size, config.data.context_length, config.model.heads, config.model.head_width)
    return shape == (16, 256, 8, 64)


def _reported_figures(measured: StagedReading) -> Mapping[str, ReportedFigure]:
    """The report's figure for the op, before or after its fix, beside the first layer."""
    config = measured.config
    footprint = measured.stand_ins.op if measured.stand_ins else None
    if footprint is None or not is_of_the_report(config):
        return {}
    figure = "~536 MB" if config.model.kda_form == "naive" else "~134 MB"
    took, kept = (format_bytes(size) for size in (footprint.forward_peak_bytes, footprint.held_bytes))
    why = f"the op takes {took} at once, and keeps {kept} until backward"
    return {layer_stage(0): ReportedFigure(figure, why, "KDA-10, KDA-20, KDA-34")}


def _conclusions(measured: StagedReading) -> Iterator[str]:
    config, capacity = measured.config, measured.capacity_bytes
    of_layers = [measured.stages[layer_stage(number)] for number in range(config.model.layers)]
    kept = sum(stage.added_bytes for stage in of_layers)
    yield (
        f"{format_bytes(of_layers[-1].added_bytes)} are kept of each layer until backward, {format_bytes(kept)} of all "
        f"{config.model.layers}: {kept / capacity:.2%} of {format_bytes(capacity)}"
    )
    if measured.stand_ins is not None and measured.stand_ins.op is not None:
        took = measured.stand_ins.op.forward_peak_bytes
        yield f"one {op_name(config)} takes {format_bytes(took)} at once, {took / capacity:.2%} of it"
    yield _crossing(measured.reading.stages, capacity)
    if measured.stand_ins is not None:
        yield from _compared(measured)


def _crossing(stages: tuple[Stage, ...], capacity: int) -> str:
    """The first stage whose peak exceeds ``capacity``, in words."""
    over = next((stage for stage in stages if stage.peak_bytes > capacity), None)
    if over is None:
        highest = max(stage.peak_bytes for stage in stages)
        return f"the step fits in {format_bytes(capacity)}: its peak is {format_bytes(highest)}"
    start = format_bytes(over.start_bytes)
    return f"the step exceeds {format_bytes(capacity)} first in: {over.name}, which starts at {start}"


def _compared(measured: StagedReading) -> Iterator[str]:
    """For each form, how the run's peak grows with its layers, and how many layers fit."""
    if measured.config.data.context_length > COMPARED_UP_TO:
        return
    capacity = measured.capacity_bytes
    for form in COMPARED:
        config = measured.config.replaced({"model.kda_form": form, "model.kda_mode": SCAN})
        found = layer_growth(config, capacity, measured.meter, measured.say)
        yield (
            f"{op_name(config)}: {format_bytes(found.op_bytes)} at once, "
            f"{format_bytes(found.bytes_a_layer)} a layer: {found.most} layers fit in {format_bytes(capacity)}"
        )


incident = Incident(
    package=__package__,
    model_schema=ModelConfig,
    data_schema=TokenData,
    build=KDAModel,
    data=lambda config: token_batches(config.data, config.model.vocabulary),
    loss=lambda model, batch: model(*batch),
    num_targets=num_token_targets,
    layers=lambda model: model.layers,
    config="hn_xs.yaml",
    capacity="24GiB",  # the report's RTX 3090
    grows=(Growth("model.layers", unit="layers", keeps_stand_ins=True),),
    describe=_describe,
    stand_ins=_stand_ins,
    reported_figures=_reported_figures,
    conclusions=_conclusions,
)
