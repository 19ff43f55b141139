"""Steps of causal language models of ``transformers``: training and generation."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from memfix.meters.base import Step, StepBuilder

from .training import VOCABULARY, full_text, padded, padded_text, text, tokens, train, transformer

_SMALL: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def qwen3(device: str, *, checkpointed: bool) -> Step:
    """Return a train step of Qwen3: forward, loss, backward, AdamW."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=151_936, max_position_embeddings=4096, use_cache=False,
    )  # fmt: skip
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, config.vocab_size, (2, 2048), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    return step


def model_of(name: str, **settings: Any) -> Any:
    """Make a small causal language model with random weights, such as LlamaForCausalLM for the name ``Llama``."""
    return transformer(name, "ForCausalLM", **{**_SMALL, **settings})


def trained(
    name: str, device: str, *, batch: Any = full_text, autocast: torch.dtype | None = None, **settings: Any
) -> Step:
    """Return a train step on a batch with its attention mask, by default without padding."""
    return train(model_of(name, **settings), batch(4, 256), device, autocast=autocast)


def llama_checkpointed(device: str) -> Step:
    model = model_of("Llama", num_hidden_layers=4)
    model.gradient_checkpointing_enable()
    return train(model, text(4, 256, padded(4, 256)), device, optimizer=torch.optim.SGD)


def llama_adafactor(device: str) -> Step:
    """Return a train step with Adafactor, which computes norms of parameters and updates."""
    from transformers import Adafactor

    return train(model_of("Llama"), text(4, 256), device, optimizer=Adafactor, relative_step=True)


def prefill(device: str) -> Step:
    model = model_of("Llama", num_key_value_heads=2).to(device, torch.bfloat16).eval()
    ids = tokens(2, 1024, VOCABULARY)

    @torch.no_grad()
    def step() -> Any:
        return model(input_ids=ids.to(device), use_cache=True).past_key_values

    return step


def generate(name: str, device: str, **options: Any) -> Step:
    """Build a step that generates tokens from prompts of different lengths, padded on the left."""
    model = model_of(name, num_key_value_heads=2).to(device).eval()
    ids, mask = tokens(4, 256, VOCABULARY), padded(4, 256).flip(1)

    def step() -> None:
        model.generate(ids.to(device), attention_mask=mask.to(device), max_new_tokens=8, **options)

    return step


STEPS: dict[str, tuple[str, StepBuilder]] = {
    name: ("transformers", build)
    for name, build in {
        "Qwen3, train step": partial(qwen3, checkpointed=False),
        "Qwen3, train step, checkpointed": partial(qwen3, checkpointed=True),
        "Llama, attention mask": partial(trained, "Llama"),
        "Llama, padded batch": partial(trained, "Llama", batch=padded_text, num_key_value_heads=2),
        "Llama, autocast bfloat16": partial(trained, "Llama", autocast=torch.bfloat16),
        "Llama, GradScaler float16": partial(trained, "Llama", autocast=torch.float16),
        "Llama, checkpointed, padded batch": llama_checkpointed,
        "Llama, Adafactor": llama_adafactor,
        "Llama, prefill": prefill,
        "Llama, generate": partial(generate, "Llama", do_sample=False),
        "Llama, generate, sampled": partial(generate, "Llama", do_sample=True, top_k=20, top_p=0.9),
        "Mistral, generate, beams": partial(generate, "Mistral", num_beams=3, do_sample=False),
        "GPT-NeoX, train step": partial(trained, "GPTNeoX"),
        "Mistral, sliding window": partial(trained, "Mistral", num_key_value_heads=2, sliding_window=64),
        "Gemma 2, train step": partial(trained, "Gemma2", num_key_value_heads=2, head_dim=64, sliding_window=128),
        "Phi-3, train step": partial(trained, "Phi3"),
        "OPT, train step": partial(trained, "OPT", ffn_dim=704, word_embed_proj_dim=256),
        "BLOOM, train step": partial(trained, "Bloom", n_layer=2, n_head=4),
    }.items()
}
