"""The train step of the report's model, as anybody would write it: forward, loss, backward, AdamW."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from ...errors import UsageError, did_you_mean
from ...meters.base import Step
from ...ops.nsa import nsa
from ...ops.rope import RotaryEmbedding
from ..one_rank import shard
from ..profile import BACKWARD, OPTIMIZER
from .model import (
    LOSS_FORMS,
    SIZES,
    Decoder,
    ModelSize,
    Rotate,
    SparseAttend,
    build_model,
    get_size,
    require_attention_type,
)

Precision = Literal["bfloat16", "mixed"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

# as many as any part of the model can do something with, and few enough to cost nothing
WARMUP_TOKENS = 64


@dataclass(frozen=True)
class StepSettings:
    """What the report's command line chooses. Its own figures are those of the defaults.

    ``precision``: ``bfloat16`` keeps parameters, gradients and AdamW's two states in bfloat16, as torch's AdamW does
    for bfloat16 parameters; ``mixed`` keeps them in float32 and computes under autocast.
    """

    model_size: str = "4B"
    context_length: int = 131_072
    attention_type: str = "nsa"
    gradient_checkpointing: bool = True
    batch_size: int = 1
    loss: str = "auto"
    precision: str = "bfloat16"
    world_size: int = 1

    def __post_init__(self) -> None:
        get_size(self.model_size)
        require_attention_type(self.attention_type)
        for name, known in (("loss", LOSS_FORMS), ("precision", PRECISIONS)):
            value = getattr(self, name)
            if value not in known:
                raise UsageError(f"unknown {name} {value!r}{did_you_mean(value, known)}")
        for name in ("context_length", "batch_size", "world_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def size(self) -> ModelSize:
        return SIZES[self.model_size]

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32


def settings_of(**chosen: Any) -> StepSettings:
    """Settings as chosen, with the context that the model size is meant for where none is."""
    size = get_size(chosen.get("model_size", StepSettings.model_size))
    return StepSettings(**{"context_length": size.context_length, **chosen})


@dataclass(frozen=True)
class LayerFunctions:
    """What layers call to rotate queries and keys and, where attention is sparse, to attend."""

    rotate: Rotate
    sparse_attend: SparseAttend


class TrainState:
    """A model, its optimizer and a batch on ``device``."""

    def __init__(self, settings: StepSettings, device: str, functions: LayerFunctions | None = None) -> None:
        rope = RotaryEmbedding(settings.size.head_width, max_positions=settings.context_length)
        functions = functions or LayerFunctions(rope, nsa)
        self.settings, self.device = settings, device
        self.model: Decoder = build_model(
            settings.model_size,
            attention_type=settings.attention_type,
            gradient_checkpointing=settings.gradient_checkpointing,
            loss_form=settings.loss,
            rotate=functions.rotate,
            sparse_attend=functions.sparse_attend,
            device=device,
            dtype=settings.dtype,
        )
        if settings.world_size > 1:
            shard(self.model, self.model.layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        shape = (settings.batch_size, settings.context_length)
        self.ids_BT = torch.randint(settings.size.vocabulary, shape, device=device)

    @property
    def parameter_bytes(self) -> int:
        """Of this rank."""
        return sum(getattr(p, "_local_tensor", p).nbytes for p in self.model.parameters())

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        enabled = self.settings.precision == "mixed"
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=enabled)

    def loss(self, num_tokens: int | None = None) -> torch.Tensor:
        """Of the batch, or of its first tokens only."""
        ids_BT = self.ids_BT[:, :num_tokens]
        with self.autocast():
            loss: torch.Tensor = self.model(ids_BT, ids_BT)
        return loss

    def train(self, num_tokens: int | None = None, between: Callable[[str], object] = lambda name: None) -> None:
        """One step. ``between`` is told what comes next."""
        loss = self.loss(num_tokens)
        between(BACKWARD)
        loss.backward()
        del loss
        between(OPTIMIZER)
        self.optimizer.step()

    def forget_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class TrainStep:
    """Builds the step that is run over and over: gradients come and go, AdamW's states are there already.

    The warm-up is on few tokens. It leaves the same states behind, and a prediction needs no more.
    """

    settings: StepSettings
    functions: LayerFunctions | None = None

    def __call__(self, device: str) -> Step:
        state = TrainState(self.settings, device, self.functions)
        lengths = iter((WARMUP_TOKENS,))

        def step() -> None:
            state.train(next(lengths, None))
            state.forget_gradients()

        return step
