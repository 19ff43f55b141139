"""Transformer blocks with flash attention, with and without checkpoints, up to a whole train step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from memfix.meters.base import Step, StepBuilder

from .registry import Workloads, drop_gradients, leaf


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, device: str) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width, **options), nn.LayerNorm(width, **options)
        self.qkv = nn.Linear(width, 3 * width, bias=False, **options)
        self.out = nn.Linear(width, width, bias=False, **options)
        self.up, self.down = nn.Linear(width, 4 * width, **options), nn.Linear(4 * width, width, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        # the mixed values have no name: without a graph they are gone before the second half
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, tokens, width)
        )
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


def _blocks(*, checkpoint_reentrant: bool | None = None) -> StepBuilder:
    """Not checkpointed where ``checkpoint_reentrant`` is None."""

    def build(device: str) -> Step:
        blocks = nn.ModuleList(_Block(1024, 16, device) for _ in range(4))
        x = leaf(2, 4096, 1024, device=device)

        def step() -> None:
            drop_gradients(blocks, x)
            hidden = x
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                for block in blocks:
                    if checkpoint_reentrant is None:
                        hidden = block(hidden)
                    else:
                        hidden = checkpoint(block, hidden, use_reentrant=checkpoint_reentrant)
                hidden.sum().backward()

        return step

    return build


class _GPT(nn.Module):
    """The output layer shares the embedding's weight."""

    def __init__(self, vocabulary: int, width: int, heads: int, num_blocks: int, device: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, device=device, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(_Block(width, heads, device) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width, device=device, dtype=torch.bfloat16)

    def forward(self, ids: torch.Tensor, target: torch.Tensor, checkpointed: bool) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if checkpointed else block(hidden)
        logits = F.linear(self.norm(hidden), self.embedding.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), target.view(-1))


def _gpt_train_step(*, checkpointed: bool, **adamw_options: Any) -> StepBuilder:
    def build(device: str) -> Step:
        model = _GPT(vocabulary=32768, width=1024, heads=16, num_blocks=6, device=device)
        ids = torch.randint(0, 32768, (2, 2048), device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **adamw_options)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                model(ids, ids, checkpointed).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        return step

    return build


WORKLOADS = Workloads(
    blocks4=_blocks(),
    blocks4_ckpt=_blocks(checkpoint_reentrant=False),
    blocks4_ckpt_reentrant=_blocks(checkpoint_reentrant=True),
    gpt_train_step=_gpt_train_step(checkpointed=False),
    gpt_train_step_ckpt_fused=_gpt_train_step(checkpointed=True, fused=True),
)
