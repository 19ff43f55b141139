"""Decoders with the structure and the names that transformers gives its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, FFN_WIDTH, LAYERS = 6, 10, 3


class Conv1D(nn.Module):
    """Keeps its weight as ``[D, F]``."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class Attention(nn.Module):
    """Returns a tuple, and is called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.out(hidden_states.cumsum(-2)), None


class GPT2MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(FFN_WIDTH, WIDTH), Conv1D(WIDTH, FFN_WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class LlamaMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, FFN_WIDTH, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(FFN_WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class GPT2Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = Attention(), GPT2MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended, _ = self.attn(hidden_states=self.ln_1(x))
        x = attended + x
        return x + self.mlp(self.ln_2(x))


class LlamaDecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.self_attn, self.mlp = Attention(), LlamaMLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(x))
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Of blocks of one class; its layers are called as that model calls them."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.name = "h" if block is GPT2Block else "layers"
        setattr(self, self.name, nn.ModuleList(block() for _ in range(LAYERS)))
        self.double()

    @property
    def blocks(self) -> nn.ModuleList:
        blocks: nn.ModuleList = getattr(self, self.name)
        return blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def hidden_states(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
