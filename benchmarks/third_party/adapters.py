"""Steps of ``peft``: a frozen model with small trainable parts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from memfix.meters.base import Step, StepBuilder

from .language import model_of
from .training import padded_text, train


def adapted(config_name: str, device: str, *, checkpointed: bool = False, **settings: Any) -> Step:
    import peft

    config = getattr(peft, config_name)(task_type="CAUSAL_LM", **settings)
    model = model_of("Llama", num_key_value_heads=2)
    if checkpointed:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    return train(peft.get_peft_model(model, config), padded_text(4, 256), device, autocast=torch.bfloat16)


_PARTS: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
_SCALED: dict[str, Any] = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}

STEPS: dict[str, tuple[str, StepBuilder]] = {
    f"peft {name}": ("peft", build)
    for name, build in {
        "LoRA": partial(adapted, "LoraConfig", r=8, lora_dropout=0.1, **_PARTS),
        "LoRA, checkpointed": partial(adapted, "LoraConfig", checkpointed=True, r=8, target_modules="all-linear"),
        "DoRA": partial(adapted, "LoraConfig", r=8, use_dora=True, **_PARTS),
        "IA3": partial(adapted, "IA3Config", **_SCALED),
        "prompt tuning": partial(adapted, "PromptTuningConfig", num_virtual_tokens=16),
    }.items()
}
