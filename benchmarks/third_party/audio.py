"""Steps of speech models of ``transformers``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from memfix.meters.base import Step, StepBuilder

from .training import tokens, train, transformer


def _whisper() -> Any:
    return transformer(
        "Whisper", "ForConditionalGeneration", d_model=192, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=3, decoder_attention_heads=3, encoder_ffn_dim=384, decoder_ffn_dim=384,
        vocab_size=8000, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip


def whisper(device: str) -> Step:
    return train(_whisper(), {"input_features": torch.randn(2, 80, 3000), "labels": tokens(2, 48, 8000)}, device)


def whisper_generate(device: str) -> Step:
    model = _whisper().to(device).eval()
    features = torch.randn(2, 80, 3000)
    return lambda: model.generate(input_features=features.to(device), max_new_tokens=6)


def speech(name: str, device: str, **settings: Any) -> Step:
    """Build a step that trains a model with the CTC loss on recordings of different lengths."""
    model = transformer(
        name, "ForCTC", hidden_size=192, num_hidden_layers=2, num_attention_heads=3, intermediate_size=384,
        vocab_size=32, conv_dim=(64,) * 7, num_conv_pos_embeddings=32, num_conv_pos_embedding_groups=4,
        mask_time_prob=0.0, ctc_loss_reduction="mean", **settings,
    )  # fmt: skip
    mask = torch.ones(2, 16_000, dtype=torch.long)
    mask[1, 12_000:] = 0
    labels = torch.randint(1, 32, (2, 12))
    labels[1, 9:] = -100
    batch = {"input_values": torch.randn(2, 16_000), "attention_mask": mask, "labels": labels}
    return train(model, batch, device)


STEPS: dict[str, tuple[str, StepBuilder]] = {
    "Whisper, train step": ("transformers", whisper),
    "Whisper, generate": ("transformers", whisper_generate),
    "wav2vec 2.0, CTC": ("transformers", partial(speech, "Wav2Vec2")),
    "HuBERT, CTC": ("transformers", partial(speech, "Hubert", feat_extract_norm="layer", do_stable_layer_norm=True)),
}
