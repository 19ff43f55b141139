"""A training loop as users write it: move a batch, forward, backward, clip, optimizer, read the loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from memfix.meters.base import Step

Batch = Mapping[str, Any]
VOCABULARY = 8000


def tokens(num_rows: int, num_tokens: int, vocabulary: int = 1000) -> torch.Tensor:
    """Make random token ids on the CPU, without the first three ids, which are special."""
    return torch.randint(3, vocabulary, (num_rows, num_tokens))


def padded(num_rows: int, num_tokens: int) -> torch.Tensor:
    """Make an attention mask whose rows have different lengths; the first row is full."""
    mask = torch.ones(num_rows, num_tokens, dtype=torch.long)
    for row in range(1, num_rows):
        mask[row, num_tokens - row * num_tokens // (2 * num_rows) :] = 0
    return mask


def text(num_rows: int, num_tokens: int, mask: torch.Tensor | None = None) -> Batch:
    """Make a batch of token ids that are also the labels, with an attention mask if one is given."""
    ids = tokens(num_rows, num_tokens, VOCABULARY)
    return {"input_ids": ids, **({} if mask is None else {"attention_mask": mask}), "labels": ids}


def full_text(num_rows: int, num_tokens: int) -> Batch:
    return text(num_rows, num_tokens, torch.ones(num_rows, num_tokens, dtype=torch.long))


def padded_text(num_rows: int, num_tokens: int) -> Batch:
    """Make a batch with rows of different lengths; the loss ignores padding."""
    mask = padded(num_rows, num_tokens)
    ids = tokens(num_rows, num_tokens, VOCABULARY)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def transformer(name: str, task: str, **settings: Any) -> Any:
    """Make a ``transformers`` model with random weights, such as ``T5ForConditionalGeneration`` of a ``T5Config``."""
    import transformers

    return getattr(transformers, name + task)(getattr(transformers, f"{name}Config")(**settings))


def moved(value: Any, device: str) -> Any:
    """Return a batch with its tensors moved to the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: moved(item, device) for name, item in value.items()}
    return [moved(item, device) for item in value] if isinstance(value, list) else value


def train(
    model: nn.Module,
    batch: Batch,
    device: str,
    *,
    loss_of: Callable[[nn.Module, Any], torch.Tensor] = lambda model, batch: model(**batch).loss,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    autocast: torch.dtype | None = None,
    **options: Any,
) -> Step:
    """Return a train step of a model on a batch from the CPU. With float16 autocast the loss is scaled."""
    model.to(device).train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    stepper = optimizer(parameters, **(options or {"lr": 1e-4}))
    scaler = torch.amp.GradScaler(enabled=autocast is torch.float16)

    def step() -> None:
        with torch.autocast("cuda", autocast) if autocast else contextlib.nullcontext():
            loss = loss_of(model, moved(batch, device))
        scaler.scale(loss).backward()
        scaler.unscale_(stepper)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(stepper)
        scaler.update()
        stepper.zero_grad()
        if not 0 <= loss.item() < 1e9:
            raise ValueError("the loss is not finite")

    return step


def classified(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the cross-entropy of a model that takes images and returns the scores of classes."""
    return F.cross_entropy(model(batch["images"]), batch["classes"])


def images(num_images: int, size: int = 224, num_classes: int = 10) -> Batch:
    return {"images": torch.randn(num_images, 3, size, size), "classes": torch.randint(0, num_classes, (num_images,))}
