"""The architectures of ``transformers``: train steps of every task, and generation.

Language models are also trained with less memory: under autocast, with checkpoints and SGD.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfix.meters.base import Step, StepBuilder

from ..third_party.training import Batch, train
from .package import Attempt, Package
from .steps import Made, require_few_parameters

_SMALL: dict[str, Any] = {
    name: value
    for value, names in {
        128: "hidden_size d_model n_embd dim embed_dim",
        256: "intermediate_size ffn_dim d_ff n_inner ffn_hidden_size encoder_ffn_dim decoder_ffn_dim",
        2: "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers "
        "num_decoder_layers num_key_value_heads num_experts_per_tok moe_topk eos_token_id",
        4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads",
        8: "num_experts num_local_experts n_routed_experts moe_num_experts",
        16: "qk_rope_head_dim state_size",
        32: "head_dim d_kv kv_lora_rank qk_nope_head_dim v_head_dim",
        64: "moe_intermediate_size q_lora_rank",
        1: "n_group topk_group bos_token_id decoder_start_token_id",
        512: "max_position_embeddings n_positions",
        1000: "vocab_size",
        7: "num_labels",
        0: "pad_token_id",
    }.items()
    for name in names.split()
} | {"use_cache": False}
"""Settings of small configurations. Each is given to the architectures that have it."""
_FEWER: tuple[Callable[[str], bool], ...] = (
    lambda name: True,
    lambda name: name not in ("head_dim", "num_key_value_heads"),
    lambda name: "layer" in name or "expert" in name or name.endswith("token_id") or name == "vocab_size",
    lambda name: name == "num_labels",
)
"""Which of the settings to try in turn: an architecture may refuse some of them."""


# ---------------------------------------------------------------- batches
def _drawn(*shape: int, below: int) -> torch.Tensor:
    return torch.randint(min(3, below - 1), below, shape)


def _ids(config: Any) -> torch.Tensor:
    ids = _drawn(2, 128, below=min(1000, config.get_text_config().vocab_size))
    ids[:, -1] = 2  # the end of a sequence, which some classifiers look for
    return ids


def _text(config: Any, model: nn.Module) -> Batch:
    return {"input_ids": (ids := _ids(config)), "labels": ids}


def _translation(config: Any, model: nn.Module) -> Batch:
    return {"input_ids": (ids := _ids(config)), "labels": ids[:, :64].contiguous()}


def _labelled(config: Any, model: nn.Module, *shape: int) -> Batch:
    return {"input_ids": _ids(config), "labels": _drawn(2, *shape, below=config.num_labels)}


def _answers(config: Any, model: nn.Module) -> Batch:
    return {"input_ids": _ids(config), "start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 9])}


def _images(config: Any, model: nn.Module) -> torch.Tensor:
    size = getattr(config, "image_size", None) or getattr(getattr(config, "backbone_config", None), "image_size", 224)
    if isinstance(size, Mapping):
        size = [*size.values()]
    height, width = (size, size) if isinstance(size, int) else size[:2]
    return torch.randn(2, getattr(config, "num_channels", 3), height, width)


def _pictures(config: Any, model: nn.Module) -> Batch:
    return {"pixel_values": _images(config, model), "labels": _drawn(2, below=config.num_labels)}


def _segments(config: Any, model: nn.Module) -> Batch:
    pixels = _images(config, model)
    return {"pixel_values": pixels, "labels": _drawn(2, *pixels.shape[2:], below=config.num_labels)}


def _films(config: Any, model: nn.Module) -> Batch:
    frames = torch.randn(1, getattr(config, "num_frames", 8), 3, config.image_size, config.image_size)
    return {"pixel_values": frames, "labels": _drawn(1, below=config.num_labels)}


def _sounds(config: Any, model: Any) -> torch.Tensor:
    bins = getattr(config, "num_mel_bins", None)
    if bins is None:
        wide = getattr(config, "feature_projection_input_dim", None)
        return torch.randn(2, 16000) if model.main_input_name == "input_values" else torch.randn(2, 200, wide or 80)
    if hasattr(config, "max_source_positions"):
        return torch.randn(2, bins, 2 * config.max_source_positions)
    return torch.randn(2, getattr(config, "max_length", 200), bins)


def _spoken(config: Any, model: Any) -> Batch:
    return {model.main_input_name: _sounds(config, model), "labels": _drawn(2, 8, below=30)}


def _heard(config: Any, model: Any) -> Batch:
    return {model.main_input_name: _sounds(config, model), "labels": _drawn(2, below=config.num_labels)}


# ---------------------------------------------------------------- steps


def _trained(make: Made, batch: Batch, device: str) -> Step:
    return train(make(), batch, device, loss_of=_loss)


def _checkpointed(make: Made, batch: Batch, device: str) -> Step:
    """Train under autocast to bfloat16, with SGD, and with checkpoints if the architecture has them."""
    model: Any = make()
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return train(model, batch, device, loss_of=_loss, autocast=torch.bfloat16, optimizer=torch.optim.SGD)


def _generating(make: Made, batch: Batch, device: str) -> Step:
    """Generate four tokens from two prompts, of which one is padded on the left."""
    model: Any = make().to(device).eval()
    ids = batch["input_ids"][:, :32]
    mask = torch.ones_like(ids)
    mask[1, :7] = 0

    @torch.no_grad()
    def step() -> None:
        model.generate(
            ids.to(device), attention_mask=mask.to(device), max_new_tokens=4, do_sample=False, use_cache=True
        )

    return step


def _loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the model's own loss, or the mean square of its first result where it has none."""
    answer = model(**batch)
    loss = getattr(answer, "loss", None)
    return next(iter(answer.values())).float().pow(2).mean() if loss is None else loss


@dataclass(frozen=True)
class _Task:
    """The table of its classes in ``transformers``, and what makes its batches and its steps."""

    table: str
    batch: Callable[[Any, Any], Batch]
    step: Callable[[Made, Batch, str], Step] = _trained


_TASKS: dict[str, _Task] = {
    "causal language model": _Task("CAUSAL_LM", _text),
    "causal language model, autocast, checkpoints, SGD": _Task("CAUSAL_LM", _text, _checkpointed),
    "causal language model, generation": _Task("CAUSAL_LM", _text, _generating),
    "masked language model": _Task("MASKED_LM", _text),
    "sequence to sequence": _Task("SEQ_TO_SEQ_CAUSAL_LM", _translation),
    "sequence to sequence, generation": _Task("SEQ_TO_SEQ_CAUSAL_LM", _translation, _generating),
    "sequence classification": _Task("SEQUENCE_CLASSIFICATION", _labelled),
    "token classification": _Task("TOKEN_CLASSIFICATION", lambda config, model: _labelled(config, model, 128)),
    "question answering": _Task("QUESTION_ANSWERING", _answers),
    "image classification": _Task("IMAGE_CLASSIFICATION", _pictures),
    "semantic segmentation": _Task("SEMANTIC_SEGMENTATION", _segments),
    "depth estimation": _Task("DEPTH_ESTIMATION", lambda config, model: {"pixel_values": _images(config, model)}),
    "video classification": _Task("VIDEO_CLASSIFICATION", _films),
    "speech recognition": _Task("CTC", _spoken),
    "audio classification": _Task("AUDIO_CLASSIFICATION", _heard),
}


def _architectures() -> dict[str, tuple[str, str]]:
    """Return the task and the class of every architecture, by its name here."""
    from transformers.models.auto import modeling_auto

    found: dict[str, tuple[str, str]] = {}
    for name, task in _TASKS.items():
        classes: dict[str, str] = {}
        for kind, several in getattr(modeling_auto, f"MODEL_FOR_{task.table}_MAPPING_NAMES").items():
            classes.setdefault(several if isinstance(several, str) else several[0], kind)
        found |= {f"{name}: {kind}": (name, of_class) for of_class, kind in classes.items()}
    return found


# ---------------------------------------------------------------- configurations
def _attempts(task: str, class_name: str) -> Iterator[Attempt]:
    import transformers

    model_class: Any = getattr(transformers, class_name)
    usual = model_class.config_class()
    given = {name: value for name, value in _SMALL.items() if hasattr(usual, name) and _replaces(usual, name)}
    for is_tried in _FEWER:
        settings = {name: value for name, value in given.items() if is_tried(name)}
        yield functools.partial(_configured, task, model_class, settings)


def _configured(task: str, model_class: Any, settings: Mapping[str, Any]) -> StepBuilder:
    config = model_class.config_class(**settings)
    if config.is_encoder_decoder and not hasattr(config, "decoder_start_token_id"):
        config.decoder_start_token_id = 1
    make = functools.partial(model_class, config)
    require_few_parameters(make)
    return functools.partial(_built, task, make, _TASKS[task].batch(config, model_class(config)))


def _built(task: str, make: Made, batch: Batch, device: str) -> Step:
    torch.manual_seed(0)
    return _TASKS[task].step(make, batch, device)


def _replaces(config: Any, name: str) -> bool:
    return isinstance(getattr(config, name), int) or name.endswith("token_id")


PACKAGE = Package("transformers", _architectures, _attempts, runs_on_cpu=False)
