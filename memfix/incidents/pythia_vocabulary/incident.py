"""Pythia-70M's vocabulary as an incident: its model and data, and the report's breakdown beside ours.

The report blames the vocabulary. During a step, two things are tried and dropped that fill a GPU sooner: an embedding
by one-hot rows, and a loss by one-hot targets, as a small framework computes them.
"""

# B batch, T tokens, D width, V vocabulary, N tokens of a batch

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch

from ...units import format_bytes
from ..config import RunConfig
from ..examples import Examples
from ..incident import Growth, Incident
from ..judging import decimal
from ..profile import OPTIMIZER, PARAMETERS, ReportedFigure
from ..staged_reading import Asides, StagedReading, on_first_output
from ..tokens import TokenBatch, num_token_targets
from .calculator import breakdown
from .data import TextData, open_windows
from .model import GATHER, ONE_HOT, STANDARD, Pythia, PythiaConfig, logits_loss, one_hot_embedding

ONE_HOT_EMBEDDING, ONE_HOT_LOSS = "embedding, one-hot", "loss, one-hot"


def _data(config: RunConfig) -> Callable[[Examples], TokenBatch]:
    windows = open_windows(config)
    return lambda examples: windows.batch(examples.numbers)


def _describe(config: RunConfig) -> list[str]:
    model = config.model
    return [
        f"{model.vocab_size:,} words, {model.get_total_params():,} parameters",
        f"{config.batch_size} x {config.data.context_length:,} tokens",
        f"windows of {model.window}" if model.use_sparse_attention else "dense",
    ]


# ---------------------------------------------------------------- tried during the step
@contextlib.contextmanager
def _asides(model: Pythia, batch: TokenBatch, asides: Asides) -> Iterator[None]:
    """Try one-hot rows of the vocabulary, for the embedding and for the loss."""
    ids_BT, target_BT = batch

    def by_one_hot_rows() -> object:
        embedded_BTD = one_hot_embedding(ids_BT, model.embedding.weight)
        return asides.gradients(embedded_BTD.sum(), (model.embedding.weight,))

    def by_one_hot_targets(hidden_BTD: torch.Tensor) -> None:
        def gradients() -> object:
            loss = logits_loss(ONE_HOT, model.head(hidden_BTD).flatten(0, 1), target_BT.flatten())
            return asides.gradients(loss, (hidden_BTD, model.head.weight))

        asides.attempt(ONE_HOT_LOSS, gradients)

    asides.attempt(ONE_HOT_EMBEDDING, by_one_hot_rows)
    with on_first_output(model.norm, by_one_hot_targets):
        yield


# ---------------------------------------------------------------- beside the report
def is_of_the_report(config: RunConfig) -> bool:
    """Whether the report's figures belong to this step; attention, dropout and forms may differ."""
    model = config.model
    shape = (model.vocab_size, model.layers, model.width, config.batch_size, config.data.context_length)
    return shape == (10_000, 6, 512, 32, 128) and config.training.precision == "float32"


def _reported_figures(measured: StagedReading) -> Mapping[str, ReportedFigure]:
    """The report's figure for each stage and why ours differs. Figures in the sentences are computed, not quoted."""
    if not is_of_the_report(measured.config):
        return {}
    model = measured.config.model
    kept = measured.stages[Pythia.loss_stage].end_bytes - measured.stages[PARAMETERS].end_bytes
    return {
        PARAMETERS: ReportedFigure(
            "304 MB", f"a layer has {model.layer_params / 1e6:.2f}M parameters, not 11M", "PYT-28, PYT-30"
        ),
        Pythia.loss_stage: ReportedFigure(
            "~2 GB", f"{format_bytes(kept)} are kept for backward, logits included", "PYT-34, PYT-44"
        ),
        OPTIMIZER: ReportedFigure("608 MB", "two moments of the right number of parameters", "PYT-33"),
    }


def _conclusions(measured: StagedReading) -> Iterator[str]:
    config = measured.config
    if is_of_the_report(config):
        yield from _report_rows(config)
    yield measured.peak_sentence
    tried = max(one.peak_bytes for one in measured.reading.stages if one.name in measured.asides.names)
    yield f"{format_bytes(tried)} by one-hot rows of {config.model.vocab_size:,} words, for embedding and loss"


def report_breakdown(config: RunConfig) -> list[tuple[str, str, int, str]]:
    """The rows of the report's breakdown: name, the report's figure, the right bytes, and the claim."""
    model = config.model
    of = breakdown(model, batch_size=config.batch_size, context_length=config.data.context_length)
    table = model.vocab_size * model.width * 4
    return [
        ("token embeddings", "20 MB", table, "PYT-26"),
        ("position embeddings", "0.3 MB", model.max_positions * model.width * 4, "PYT-27"),
        ("transformer layers", "264 MB", model.layers * model.layer_params * 4, "PYT-28"),
        ("head", "20 MB", table, "PYT-29"),
        ("parameters", "304 MB", of.parameters, "PYT-31"),
        ("gradients", "304 MB", of.gradients, "PYT-32"),
        ("Adam's states", "608 MB", of.adam_states, "PYT-33"),
        ("activations", "~2 GB", of.activations, "PYT-34"),
        ("logits, three copies", "not counted", of.logits, "PYT-44"),
        ("peak", "~3.2 GB", of.peak, "PYT-35"),
    ]


def _report_rows(config: RunConfig) -> Iterator[str]:
    if (config.model.embedding_form, config.model.loss_form) == (GATHER, STANDARD):
        for name, figure, size, claim in report_breakdown(config):
            yield f"{name:<22} {figure:>12} in the report  {decimal(size, 'MB'):>12} here  {claim}"


incident = Incident(
    package=__package__,
    model_schema=PythiaConfig,
    data_schema=TextData,
    build=lambda config: Pythia(config.model, gradient_checkpointing=config.training.gradient_checkpointing),
    data=_data,
    examples_per_epoch=lambda config: len(open_windows(config)),
    loss=lambda model, batch: model(*batch),
    num_targets=num_token_targets,
    layers=lambda model: model.layers,
    config="report.yaml",
    capacity="80GiB",  # the report's card
    grows=(Growth("training.batch_size", unit="sequences"),),
    describe=_describe,
    asides=_asides,
    reported_figures=_reported_figures,
    conclusions=_conclusions,
)
