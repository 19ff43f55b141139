"""Where the memory of one train step goes, stage by stage, in the stages of the report and beside its figures.

The step is measured as it runs. On the way three things are tried that it does not do, and dropped again, because the
report did them: a RoPE table in every layer, a layer whose activations are all kept, and other ways to the loss.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from ...errors import UsageError
from ...meters.base import Reading, Step
from ...meters.stages import listening, stage
from ...ops.linear_cross_entropy.reported import reported_linear_cross_entropy
from ...units import GiB, format_bytes
from ..decoder_parts import FeedForward
from ..one_rank import one_rank_of
from ..profile import BACKWARD, GRADIENTS, LATER_STEP, OPTIMIZER, PARAMETERS, STATES, Beside, Profile, Row
from ..stage_meter import first_line, gpu_bytes, held_at_peaks, measured_step, stage_meter
from .model import EMBEDDING, next_labels
from .private_rope import private_tables
from .stand_ins import simulated_functions
from .step import WARMUP_TOKENS, LayerFunctions, StepSettings, TrainState

ROPE_TABLES = "with a RoPE table in every layer"
WHOLE_LAYER = "first layer, all kept"
LOGITS = "with the logits"
STANDARD, STANDARD_BACKWARD = "loss, standard", "loss, standard: backward"
REPORTED, REPORTED_BACKWARD = "loss, chunked as reported", "loss, chunked as reported: backward"

ASIDES = {ROPE_TABLES, WHOLE_LAYER, LOGITS, STANDARD, STANDARD_BACKWARD, REPORTED, REPORTED_BACKWARD}

REPORT_CAPACITY_BYTES = int(94.97 * GiB)
REPORT_SETTINGS = StepSettings()


def profile(
    settings: StepSettings,
    *,
    meter: str = "simulated",
    gpu: str = "H200",
    say: Callable[[str], object] = lambda doing: None,
) -> Profile:
    """Measure one train step of the incident's model, the first, and the peak of those that follow it."""
    if meter != "simulated" and settings.world_size > 1:
        raise UsageError(f"world_size {settings.world_size} is one rank without the others: use the simulated meter")
    chosen = stage_meter(meter, gpu)
    is_simulated = meter == "simulated"
    functions, notes = simulated_functions(settings, chosen, say) if is_simulated else (None, ())
    build = ProfiledStep(settings, functions, warmup_tokens=WARMUP_TOKENS if is_simulated else None)
    say(f"{settings.model_size}: two train steps of {settings.context_length:,} tokens")
    with one_rank_of(settings.world_size) if settings.world_size > 1 else contextlib.nullcontext():
        reading = measured_step(chosen, build, notes)
    found = _Found(settings, reading, build.seen)
    return Profile(
        title=_title(settings, reading),
        settings=dataclasses.asdict(settings),
        reading=reading,
        rows=found.rows(),
        capacity_bytes=gpu_bytes(chosen, gpu),
        conclusions=found.conclusions(),
    )


def _title(settings: StepSettings, reading: Reading) -> str:
    words = [
        f"long_context_loss {settings.model_size}",
        settings.attention_type,
        f"{settings.context_length:,} tokens" + (f" x {settings.batch_size}" if settings.batch_size > 1 else ""),
        "checkpointed" if settings.gradient_checkpointing else "not checkpointed",
        settings.precision,
        f"loss {settings.loss}",
    ]
    if settings.world_size > 1:
        words.append(f"rank 0 of {settings.world_size}, FSDP2")
    return f"{', '.join(words)}, {reading.device}"


@dataclass
class Seen:
    """What a step says of itself beside the meter's reading."""

    parameter_bytes: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    """Of what was tried beside the step: what the GPU said where it was too much."""


@dataclass(frozen=True)
class ProfiledStep:
    """Builds a first step in stages, and one more: by then AdamW's states are there from the start."""

    settings: StepSettings
    functions: LayerFunctions | None
    warmup_tokens: int | None
    seen: Seen = field(default_factory=Seen)

    def __call__(self, device: str) -> Step:
        state = TrainState(self.settings, device, self.functions)
        self.seen.parameter_bytes = state.parameter_bytes
        asides = _Asides(state, self.seen.failures)
        is_warm = False

        def step() -> None:
            nonlocal is_warm
            if not is_warm:
                # no optimizer: the step that is measured is the first, as the report's was
                state.loss(self.warmup_tokens).backward()
                state.forget_gradients()
                is_warm = True
                return
            stage(PARAMETERS)
            with asides.tried() if self.settings.world_size == 1 else contextlib.nullcontext():
                stage(EMBEDDING)  # a sharded model gathers its outermost parameters before its forward begins
                state.train(between=stage)
            state.forget_gradients()
            stage(LATER_STEP)
            with listening(None):
                state.train()
            state.forget_gradients()

        return step


class _Asides:
    """What is tried on the way, in a step that does not know of it: between the model's own parts."""

    def __init__(self, state: TrainState, failures: dict[str, str]) -> None:
        self._state, self._failures = state, failures
        self._trying = ""

    @contextlib.contextmanager
    def tried(self) -> Iterator[None]:
        model, settings = self._state.model, self._state.settings
        self._try(
            ROPE_TABLES,
            lambda: private_tables(
                settings.size, settings.context_length, device=self._state.device, dtype=settings.dtype
            ),
        )
        hooks = [
            model.embedding.register_forward_hook(self._after_embedding),
            model.norm.register_forward_hook(self._after_layers),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _after_embedding(self, module: Any, args: Any, x_BTD: torch.Tensor) -> None:
        x_BTD = x_BTD.detach().requires_grad_()
        self._try(WHOLE_LAYER, lambda: self._state.model.layers[0](x_BTD))

    def _after_layers(self, module: Any, args: Any, hidden_BTD: torch.Tensor) -> None:
        head = self._state.model.head
        hidden_BTD = hidden_BTD.detach().requires_grad_()
        self._try(LOGITS, lambda: head(hidden_BTD))
        self._try(STANDARD, lambda: self._loss(_standard_loss, hidden_BTD, STANDARD_BACKWARD))
        self._try(REPORTED, lambda: self._loss(reported_linear_cross_entropy, hidden_BTD, REPORTED_BACKWARD))

    def _loss(self, loss_of: Callable[..., torch.Tensor], hidden_BTD: torch.Tensor, backward_name: str) -> Any:
        weight_VD = self._state.model.head.weight
        target_N = next_labels(self._state.ids_BT).flatten()
        loss = loss_of(hidden_BTD.flatten(0, 1), weight_VD, target_N)
        self._enter(backward_name)
        return torch.autograd.grad(loss, (hidden_BTD, weight_VD))

    def _enter(self, name: str) -> None:
        self._trying = name
        stage(name)

    def _try(self, name: str, make: Callable[[], object]) -> None:
        self._enter(name)
        try:
            kept = make()  # noqa: F841 - alive until the stage has ended
        except torch.OutOfMemoryError as error:
            self._failures[self._trying] = first_line(error)
        stage(None)


def _standard_loss(hidden_ND: torch.Tensor, weight_VD: torch.Tensor, target_N: torch.Tensor) -> torch.Tensor:
    """The report's old code."""
    return F.cross_entropy(F.linear(hidden_ND, weight_VD), target_N, ignore_index=-100)


class _Found:
    """The stages of a reading, with what the report says of each where it is of the same step."""

    def __init__(self, settings: StepSettings, reading: Reading, seen: Seen) -> None:
        self._settings, self._reading, self._seen = settings, reading, seen
        self._stages = {one.name: one for one in reading.stages}

    def rows(self) -> tuple[Row, ...]:
        held = held_at_peaks(self._reading, self._seen.parameter_bytes)
        return tuple(
            Row(one, one.name in ASIDES, self._beside(one.name), self._seen.failures.get(one.name), kinds, rest)
            for one, (kinds, rest) in zip(self._reading.stages, held, strict=True)
        )

    def _beside(self, name: str) -> Beside | None:
        """What the report says of this stage, and why; the figures in the sentence are measured, not quoted."""
        if not _is_of_the_report(self._settings):
            return None
        added = {stage.name: format_bytes(stage.added_bytes) for stage in self._reading.stages}
        peaks = {stage.name: format_bytes(stage.peak_bytes) for stage in self._reading.stages}
        feed_forward = self._feed_forward_bytes()
        of_which = f"{format_bytes(feed_forward)} of {added[WHOLE_LAYER]} are" if feed_forward else "most of it is"
        both = format_bytes(self._seen.parameter_bytes + self._stages[ROPE_TABLES].added_bytes)
        said = {
            PARAMETERS: ("8.72 GB", f"it counts a RoPE table in every layer: {added[ROPE_TABLES]}", "LOG-29"),
            ROPE_TABLES: ("8.72 GB", f"{both} without our tokens and table; its GB are GiB", "LOG-29"),
            EMBEDDING: ("9.35 GB", f"the same tables; hidden states are {added[EMBEDDING]} in both", "LOG-31"),
            WHOLE_LAYER: ("25.87 GB", f"{of_which} the feed-forward's", "LOG-34"),
            LOGITS: ("62.97 GB", f"25.87 and logits of {added[LOGITS]}, called layer activations", "LOG-33"),
            STANDARD: ("OOM (111 GB)", "the loss alone, in a column of totals", "LOG-35"),
            REPORTED: ("~66 GB", f"without gradients; with them {added[REPORTED]} stay", "LOG-36, LOG-37"),
            BACKWARD: ("60-90 GB", f"reached only with a loss that is held; {peaks[BACKWARD]} without", "LOG-38"),
            OPTIMIZER: ("-", "the report counts no gradients and no states of AdamW", "LOG-46"),
        }
        return Beside(*said[name]) if name in said else None

    def _feed_forward_bytes(self) -> int | None:
        """What lines of the feed-forward had made that is alive when a whole layer is kept, where the meter sees it."""
        timeline = self._reading.timeline
        if timeline is None:
            return None
        lines, first = inspect.getsourcelines(FeedForward)
        here = range(first, first + len(lines))
        event = next(end - 1 for _, end, name in timeline.marked_spans() if name == WHOLE_LAYER)
        return sum(
            buffer.bytes
            for buffer in timeline.alive_at(event)
            if buffer.born and buffer.line and buffer.line.file == inspect.getfile(FeedForward)
            and buffer.line.number in here
        )  # fmt: skip

    def conclusions(self) -> tuple[str, ...]:
        """What the table amounts to, in a sentence."""
        stages = self._reading.stages
        highest = max((n for n, one in enumerate(stages) if one.name not in ASIDES), key=lambda n: stages[n].peak_bytes)
        peak = stages[highest].peak_bytes
        if self._settings.model_size != REPORT_SETTINGS.model_size:
            return (f"{format_bytes(peak)} at the highest",)
        if self._settings.world_size == 1:
            fits = "fits" if peak <= REPORT_CAPACITY_BYTES else "does not fit"
            return (f"{format_bytes(peak)} at the highest; the report's {format_bytes(REPORT_CAPACITY_BYTES)}: {fits}",)
        kinds, _ = held_at_peaks(self._reading, self._seen.parameter_bytes)[highest]
        share = sum(kinds[kind] for kind in (PARAMETERS, GRADIENTS, STATES))
        return (
            f"{format_bytes(peak)} at the highest on each of {self._settings.world_size} ranks: {format_bytes(share)} "
            f"are its share of parameters, gradients and states, {format_bytes(peak - share)} are whole on every rank. "
            "The report's 68 GB do not become 34 by a second GPU (LOG-39, LOG-44)",
        )


def _is_of_the_report(settings: StepSettings) -> bool:
    """Whether the report's figures are of this step; attention and checkpointing may differ, and are spoken of."""
    free = {name: getattr(settings, name) for name in ("attention_type", "gradient_checkpointing", "loss")}
    return settings == dataclasses.replace(REPORT_SETTINGS, **free)
