"""Steps run by trainers: Lightning's Trainer, the Trainer of transformers (on accelerate), and accelerate itself."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from memfix.meters.base import Step, StepBuilder

from .language import model_of
from .training import padded_text


def _classifier() -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1024, 10))


def _loader() -> DataLoader[Any]:
    data = TensorDataset(torch.randn(512, 256), torch.randint(0, 10, (512,)))
    return DataLoader(data, batch_size=128, shuffle=True)


def transformers_trainer(device: str, **settings: Any) -> Step:
    from transformers import Trainer, TrainingArguments

    batch = padded_text(16, 128)
    data = [{name: tensor[row] for name, tensor in batch.items()} for row in range(16)]
    model = model_of("Llama")

    def step() -> None:
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder, per_device_train_batch_size=4, max_steps=2, logging_steps=1, save_strategy="no", report_to=[],
                disable_tqdm=True, **settings,
            )  # fmt: skip
            Trainer(model, arguments, train_dataset=data).train()

    return step


def lightning_trainer(device: str, **settings: Any) -> Step:
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _classifier()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    model, loader = Classifier(), _loader()

    def step() -> None:
        trainer = lightning.Trainer(
            max_steps=3, accelerator="gpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, **settings,
        )  # fmt: skip
        trainer.fit(model, loader)

    return step


def accelerate_loop(device: str, *, mixed_precision: str) -> Step:
    """Build a step that trains for an epoch with gradient accumulation."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # the precision is a global; steps differ in theirs
    accelerator = Accelerator(mixed_precision=mixed_precision, gradient_accumulation_steps=2)
    net = _classifier()
    model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), _loader())

    def step() -> None:
        total = 0.0
        for inputs, classes in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), classes)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item()

    return step


STEPS: dict[str, tuple[str, StepBuilder]] = {
    "transformers Trainer": ("accelerate", transformers_trainer),
    "transformers Trainer, bfloat16, accumulated": (
        "accelerate", partial(transformers_trainer, bf16=True, gradient_accumulation_steps=2),
    ),
    "Lightning Trainer": ("lightning", lightning_trainer),
    "Lightning Trainer, float16, clipped": (
        "lightning", partial(lightning_trainer, precision="16-mixed", gradient_clip_val=1.0),
    ),
    "accelerate, accumulated": ("accelerate", partial(accelerate_loop, mixed_precision="no")),
    "accelerate, bfloat16": ("accelerate", partial(accelerate_loop, mixed_precision="bf16")),
}  # fmt: skip
