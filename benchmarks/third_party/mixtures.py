"""Steps of ``transformers`` models other than dense attention: mixtures of experts and state space models."""

from __future__ import annotations

from memfix.meters.base import Step, StepBuilder

from .language import model_of
from .training import full_text, text, train


def qwen3_moe(device: str) -> Step:
    """Build a step that trains a mixture whose experts run as grouped matrix products."""
    model = model_of("Qwen3Moe", moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2, num_key_value_heads=2)
    return train(model, full_text(2, 256), device)


def mixtral(device: str) -> Step:
    """Build a step that trains a mixture by a loop over experts that have tokens, with a load balancing loss."""
    model = model_of("Mixtral", num_local_experts=4, num_key_value_heads=2, output_router_logits=True)
    model.set_experts_implementation("eager")
    return train(model, text(2, 256), device)


def mamba(device: str) -> Step:
    """Build a step that trains a Mamba whose scan runs in plain torch, one position after another."""
    return train(model_of("Mamba", state_size=8, use_cache=False), text(2, 48), device)


def mamba2(device: str) -> Step:
    """Build a step that trains a Mamba-2 whose scan runs in plain torch, in chunks."""
    model = model_of("Mamba2", state_size=16, head_dim=64, num_heads=8, n_groups=1, chunk_size=64, use_cache=False)
    return train(model, text(2, 128), device)


STEPS: dict[str, tuple[str, StepBuilder]] = {
    "Qwen3-MoE, train step": ("transformers", qwen3_moe),
    "Mixtral, eager experts": ("transformers", mixtral),
    "Mamba, train step": ("transformers", mamba),
    "Mamba-2, train step": ("transformers", mamba2),
}
