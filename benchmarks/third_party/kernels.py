"""Steps of packages of Triton kernels: Liger and flash-linear-attention."""

from __future__ import annotations

import torch

from memfix.meters.base import Step, StepBuilder

from .training import tokens, train


def liger_loss(device: str) -> Step:
    """Build a step that runs Liger's fused linear cross-entropy, forward and backward."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    hidden = torch.randn(8192, 2560, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(151_936, 2560, device=device, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, 151_936, (8192,), device=device)
    loss_of = LigerFusedLinearCrossEntropyLoss()

    def step() -> None:
        hidden.grad = weight.grad = None
        loss_of(weight, hidden, target).backward()

    return step


def liger_llama(device: str) -> Step:
    """Build a step that trains a Llama with Liger's norms, feed-forwards, rotary embeddings and loss."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=8, vocab_size=32_000
    )
    model = LlamaForCausalLM(config)
    apply_liger_kernel_to_llama(model=model)
    ids = tokens(2, 512, 32_000)
    return train(model, {"input_ids": ids, "labels": ids}, device)


def fla_kda(device: str) -> Step:
    """Build a step that runs flash-linear-attention's chunked KDA, forward and backward."""
    from fla.ops.kda import chunk_kda

    shape = (1, 8192, 16, 128)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gate = torch.rand(shape, device=device).neg_().requires_grad_()
    beta = torch.rand(shape[:3], device=device, dtype=torch.bfloat16).requires_grad_()
    upstream = torch.randn(shape, device=device, dtype=torch.bfloat16)

    def step() -> None:
        for tensor in (q, k, v, gate, beta):
            tensor.grad = None
        out, _ = chunk_kda(q, k, v, gate, beta, use_qk_l2norm_in_kernel=True)
        out.backward(upstream)

    return step


def fla_gated_linear_attention(device: str) -> Step:
    """Build a step that runs a layer of gated linear attention, forward and backward."""
    from fla.layers import GatedLinearAttention

    layer = GatedLinearAttention(hidden_size=512, num_heads=4).to(device, torch.bfloat16)
    x = torch.randn(2, 1024, 512, device=device, dtype=torch.bfloat16)

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        layer(x)[0].float().pow(2).mean().backward()

    return step


STEPS: dict[str, tuple[str, StepBuilder]] = {
    "Liger fused linear cross-entropy": ("liger_kernel", liger_loss),
    "Liger, Llama with all kernels": ("liger_kernel", liger_llama),
    "flash-linear-attention chunk KDA": ("fla", fla_kda),
    "flash-linear-attention, gated linear attention": ("fla", fla_gated_linear_attention),
}
