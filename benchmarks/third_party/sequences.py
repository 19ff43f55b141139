"""Steps of encoders and of sequence-to-sequence models of ``transformers``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from memfix.meters.base import Step, StepBuilder

from .training import padded, tokens, train, transformer

_ENCODER: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 8000,
}  # fmt: skip


def encoder(name: str, task: str, device: str, **settings: Any) -> Step:
    """Build a step that trains an encoder with the head of a task on a padded batch."""
    model = transformer(name, f"For{task}", **{**_ENCODER, **settings})
    ids, mask = tokens(4, 128, 8000), padded(4, 128)
    labels = {
        "MaskedLM": torch.where(torch.rand(4, 128) < 0.15, ids, -100),
        "TokenClassification": torch.randint(0, 2, (4, 128)),
        "SequenceClassification": torch.randint(0, 2, (4,)),
    }[task]
    return train(model, {"input_ids": ids, "attention_mask": mask, "labels": labels}, device)


def _t5() -> Any:
    return transformer(
        "T5", "ForConditionalGeneration", d_model=256, d_ff=512, num_layers=2, num_heads=4, vocab_size=8000,
        decoder_start_token_id=0,
    )  # fmt: skip


def _bart() -> Any:
    return transformer(
        "Bart", "ForConditionalGeneration", d_model=256, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=512, decoder_ffn_dim=512, vocab_size=8000, encoder_layerdrop=0.1,
        decoder_layerdrop=0.1,
    )  # fmt: skip


def translate(make: Callable[[], Any], device: str) -> Step:
    labels = tokens(4, 48, 8000)
    labels[:, 40:] = -100
    batch = {"input_ids": tokens(4, 96, 8000), "attention_mask": padded(4, 96), "labels": labels}
    return train(make(), batch, device)


def t5_generate(device: str) -> Step:
    model = _t5().to(device).eval()
    ids, mask = tokens(8, 256, 8000), padded(8, 256)
    return lambda: model.generate(input_ids=ids.to(device), attention_mask=mask.to(device), max_new_tokens=6)


STEPS: dict[str, tuple[str, StepBuilder]] = {
    name: ("transformers", build)
    for name, build in {
        "BERT, masked words": partial(encoder, "Bert", "MaskedLM"),
        "RoBERTa, token classification": partial(encoder, "Roberta", "TokenClassification"),
        "DistilBERT, sequence classification": partial(
            encoder, "DistilBert", "SequenceClassification", dim=256, hidden_dim=512, n_layers=2, n_heads=4
        ),
        "DeBERTa-v2, masked words": partial(
            encoder, "DebertaV2", "MaskedLM", relative_attention=True, position_buckets=32, pos_att_type=["p2c", "c2p"]
        ),
        "ELECTRA, sequence classification": partial(encoder, "Electra", "SequenceClassification", embedding_size=128),
        "ModernBERT, masked words": partial(encoder, "ModernBert", "MaskedLM", pad_token_id=0),
        "T5, train step": partial(translate, _t5),
        "T5, generate": t5_generate,
        "BART, layer drop": partial(translate, _bart),
    }.items()
}
