"""The 131,072-token loss as an incident: its model and data, and its report's table of stages.

The step is measured as it runs. During the step, three things are tried and dropped that the report did and the step
does not: a RoPE table in every layer, a layer that keeps all its activations, and other losses.
"""

# B batch, T tokens, D width, H query heads, G key-value heads, K head width, V vocabulary, N tokens of a batch

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F

from ...meters.base import Meter
from ...meters.stages import Stage, stage
from ...ops.linear_cross_entropy.reported import reported_linear_cross_entropy
from ...ops.rope import RotaryEmbedding
from ...progress import Say
from ...units import GiB, format_bytes
from ..config import RunConfig
from ..decoder_parts import EMBEDDING, Attention, FeedForward
from ..incident import Growth, Incident
from ..profile import BACKWARD, GRADIENTS, OPTIMIZER, PARAMETERS, STATES, ReportedFigure
from ..staged_reading import Asides, StagedReading, on_first_output
from ..stand_in import StandIn, StandIns, measure_footprint
from ..step import Precision
from ..tokens import IGNORED, TokenBatch, TokenData, labelled_batches, num_token_targets
from .model import NSA, Decoder, ModelConfig, SparseAttention, next_labels, private_tables

ROPE_TABLES = "with a RoPE table in every layer"
WHOLE_LAYER = "first layer, all kept"
LOGITS = "with the logits"
STANDARD, REPORTED = "loss, standard", "loss, chunked as reported"

REPORT_SIZE = "4B"
REPORT_CAPACITY_BYTES = int(94.97 * GiB)

# enough for every part of the model to run, and few enough to cost no time
WARMUP_TOKENS = 64


def _loss(model: torch.nn.Module, batch: TokenBatch) -> torch.Tensor:
    ids_BT1, labels_BT1 = batch
    stage(EMBEDDING)  # begins here, because a sharded model gathers its outermost parameters before its forward
    return model(ids_BT1[:, :-1], labels_BT1)


def _num_targets(batch: TokenBatch) -> int:
    ids_BT1, labels_BT1 = batch
    return num_token_targets((ids_BT1, labels_BT1[:, 1:]))


def _describe(config: RunConfig) -> list[str]:
    model, batch_size = config.model, config.batch_size
    tokens = f"{config.data.context_length:,} tokens" + (f" x {batch_size}" if batch_size > 1 else "")
    return [model.size, model.attention_type, tokens, f"loss {model.loss_form}"]


# ---------------------------------------------------------------- simulated once instead of in every layer
def _stand_ins(config: RunConfig, meter: Meter, say: Say) -> StandIns | None:
    """Stand-ins for rotation and sparse attention, which run many small operators in every layer."""
    size, batch, tokens = config.model.shape, config.batch_size, config.data.context_length
    if tokens <= WARMUP_TOKENS:
        return None
    dtype = Precision.named(config.training.precision).compute
    query_shape = (batch, tokens, size.heads, size.head_width)
    key_shape = (batch, tokens, size.kv_heads, size.head_width)
    rope = RotaryEmbedding(size.head_width, max_positions=tokens)
    say(f"{tokens:,} tokens: rotation and attention of one layer")
    of_shape = {
        shape: StandIn(measure_footprint(meter, rope, [(shape, dtype)], keeps_tables=True), keeps_inputs=[False])
        for shape in (query_shape, key_shape)
    }
    stand_ins = [*of_shape.values()]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        # other shapes than a whole batch's take the real RoPE, whose table the warm-up must make
        return of_shape.get(tuple(x.shape), rope)(x)  # type: ignore[arg-type]

    if config.model.attention_type == NSA:
        others = ((*query_shape[:3], 3), (size.sparse.compress_block, size.head_width))
        of_inputs = [(shape, dtype) for shape in (query_shape, key_shape, key_shape, *others)]
        footprint = measure_footprint(meter, size.sparse.attend, of_inputs, keeps_tables=False)
        stand_ins.append(StandIn(footprint, keeps_inputs=[True] * len(of_inputs)))

    def put_into(model: torch.nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, Attention):
                module.rotate = rotate
            if isinstance(module, SparseAttention):
                module.function = stand_ins[-1]

    notes = dict.fromkeys(note for one in stand_ins for note in one.footprint.notes)
    return StandIns(put_into, notes=tuple(notes))


# ---------------------------------------------------------------- tried during the step, as the report did
@contextlib.contextmanager
def _asides(model: Decoder, batch: TokenBatch, asides: Asides) -> Iterator[None]:
    """Try what the report did, in hooks on the model's modules, and drop the results."""
    num_tokens = batch[0].shape[1] - 1

    def whole_layer(x_BTD: torch.Tensor) -> None:
        asides.attempt(WHOLE_LAYER, lambda: model.layers[0](x_BTD))

    def other_losses(hidden_BTD: torch.Tensor) -> None:
        asides.attempt(LOGITS, lambda: model.head(hidden_BTD))
        asides.attempt(STANDARD, lambda: gradients(_standard_loss, hidden_BTD))
        asides.attempt(REPORTED, lambda: gradients(reported_linear_cross_entropy, hidden_BTD))

    def gradients(loss_of: Callable[..., torch.Tensor], hidden_BTD: torch.Tensor) -> object:
        target_N = next_labels(batch[1], num_tokens).flatten()
        weight_VD = model.head.weight  # inside the step, where it may be a copy in the compute dtype
        loss = loss_of(hidden_BTD.flatten(0, 1), weight_VD, target_N)
        return asides.gradients(loss, (hidden_BTD, weight_VD))

    size, weight = model.config.shape, model.head.weight
    asides.attempt(ROPE_TABLES, lambda: private_tables(size, num_tokens, device=weight.device, dtype=weight.dtype))
    with on_first_output(model.embedding, whole_layer), on_first_output(model.norm, other_losses):
        yield


def _standard_loss(hidden_ND: torch.Tensor, weight_VD: torch.Tensor, target_N: torch.Tensor) -> torch.Tensor:
    """The loss as the report's old code computes it."""
    return F.cross_entropy(F.linear(hidden_ND, weight_VD), target_N, ignore_index=IGNORED)


# ---------------------------------------------------------------- beside the report
def is_of_the_report(config: RunConfig, world_size: int = 1) -> bool:
    """Whether the report's figures belong to this step; attention, checkpointing and loss may differ."""
    step = (config.model.size, config.data.context_length, config.batch_size, config.training.precision, world_size)
    return step == (REPORT_SIZE, 131_072, 1, "pure_bfloat16", 1)


def _reported_figures(measured: StagedReading) -> Mapping[str, ReportedFigure]:
    """The report's figure for each stage and why ours differs. Figures in the sentences are measured, not quoted."""
    if not is_of_the_report(measured.config, measured.world_size):
        return {}
    stages = measured.stages
    added = {name: format_bytes(stage.added_bytes) for name, stage in stages.items()}
    peaks = {name: format_bytes(stage.peak_bytes) for name, stage in stages.items()}
    feed_forward = feed_forward_bytes(stages[WHOLE_LAYER])
    of_which = f"{format_bytes(feed_forward)} of {added[WHOLE_LAYER]} are" if feed_forward else "most of it is"
    both = format_bytes(measured.parameter_bytes + stages[ROPE_TABLES].added_bytes)
    return {
        PARAMETERS: ReportedFigure(
            "8.72 GB", f"it includes a RoPE table in every layer: {added[ROPE_TABLES]}", "LOG-29"
        ),
        ROPE_TABLES: ReportedFigure("8.72 GB", f"parameters and tables take {both}; the report's GB are GiB", "LOG-29"),
        EMBEDDING: ReportedFigure(
            "9.35 GB", f"it includes the same tables; hidden states take {added[EMBEDDING]} in both", "LOG-31"
        ),
        WHOLE_LAYER: ReportedFigure("25.87 GB", f"{of_which} the feed-forward's", "LOG-34"),
        LOGITS: ReportedFigure(
            "62.97 GB", f"25.87 GB and the logits, {added[LOGITS]}, which the report calls layer activations", "LOG-33"
        ),
        STANDARD: ReportedFigure("OOM (111 GB)", "it is the loss alone, in a column of totals", "LOG-35"),
        REPORTED: ReportedFigure(
            "~66 GB", f"it leaves out gradients; with them {added[REPORTED]} stay allocated", "LOG-36, LOG-37"
        ),
        BACKWARD: ReportedFigure(
            "60-90 GB",
            f"only a step that holds the loss's tensors needs as much; ours needs {peaks[BACKWARD]}",
            "LOG-38",
        ),
        OPTIMIZER: ReportedFigure("-", "the report counts no gradients and no states of AdamW", "LOG-46"),
    }


def feed_forward_bytes(stage: Stage) -> int:
    """The bytes alive at the end of a stage that the feed-forward allocated; 0 if the meter sees no source lines."""
    source = inspect.getsource(FeedForward.forward)
    return sum(row.bytes for row in stage.alive_at_end if row.code and row.code in source)


def _conclusions(measured: StagedReading) -> Iterator[str]:
    """The highest peak, and whether it fits, in one sentence."""
    own = [place for place, one in enumerate(measured.reading.stages) if one.name not in measured.asides.names]
    highest = max(own, key=lambda place: measured.reading.stages[place].peak_bytes)
    peak = measured.reading.stages[highest].peak_bytes
    if measured.config.model.size != REPORT_SIZE:
        yield f"the peak is {format_bytes(peak)}"
    elif measured.world_size == 1:
        fits = "fits in" if peak <= REPORT_CAPACITY_BYTES else "does not fit in"
        yield f"the peak of {format_bytes(peak)} {fits} the report's {format_bytes(REPORT_CAPACITY_BYTES)}"
    else:
        kinds, _ = measured.held_at_peaks()[highest]
        share = sum(kinds[kind] for kind in (PARAMETERS, GRADIENTS, STATES))
        yield (
            f"the peak on each of {measured.world_size} ranks is {format_bytes(peak)}: {format_bytes(share)} are its "
            f"share of parameters, gradients and states, {format_bytes(peak - share)} are whole on every rank. "
            "A second GPU does not halve the report's 68 GB (LOG-39, LOG-44)"
        )


incident = Incident(
    package=__package__,
    model_schema=ModelConfig,
    data_schema=TokenData,
    build=Decoder,
    data=lambda config: labelled_batches(config.data, config.model.shape.vocabulary),
    loss=_loss,
    num_targets=_num_targets,
    layers=lambda model: model.layers,
    config="report.yaml",
    grows=(
        Growth("data.context_length", "tokens", lambda config: max(64, config.model.shape.context_length // 128)),
        Growth("training.batch_size", "sequences"),
    ),
    describe=_describe,
    stand_ins=_stand_ins,
    warm_up=lambda batch: tuple(tensor_BT1[:, : WARMUP_TOKENS + 1] for tensor_BT1 in batch),
    asides=_asides,
    reported_figures=_reported_figures,
    conclusions=_conclusions,
)
