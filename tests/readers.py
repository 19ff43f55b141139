"""What the manual's snippets take from their reader: tensors, models and files, in the shapes that the page names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

Names = dict[str, Any]


@contextmanager
def names_of_the_reader(page: str) -> Iterator[Names]:
    """The names that a page takes from its reader; its snippets run inside, in a folder of their own."""
    if page in _EMULATED:
        from memfix.cuda_kernels.emulated import cannot_emulate, emulated

        if cannot_emulate() is not None:
            pytest.skip(str(cannot_emulate()))
        with emulated():
            yield _READERS[page]()
    else:
        yield _READERS.get(page, dict)()


def _attention() -> Names:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 7)
    return {"q": q, "k": k, "v": v, "mask": torch.ones(5, 6, dtype=torch.bool), "bias": torch.randn(2, 4, 5, 6)}


def _kda() -> Names:
    q, k, g = (torch.randn(1, 6, 2, 4) for _ in range(3))
    names = {"q": q, "k": k, "v": torch.randn(1, 6, 2, 3), "g": -g.abs(), "beta": torch.rand(1, 6, 2)}
    one = {f"{name}1": tensor[:, 0] for name, tensor in names.items()}
    return names | one | {"lengths": torch.tensor([0, 6], dtype=torch.int32)}


def _nsa() -> Names:
    k = torch.randn(1, 70, 2, 8)
    return {"q": torch.randn(1, 70, 4, 8), "k": k, "v": k, "gates": torch.rand(1, 70, 4, 3)}


def _rope() -> Names:
    return {"q": torch.randn(2, 5, 3, 8), "k": torch.randn(2, 5, 1, 8)}


def _embedding() -> Names:
    return {"ids": torch.tensor([[0, 2], [1, 2]]), "weight": torch.randn(3, 4)}


def _feed_forward() -> Names:
    return {"x": torch.randn(3, 8), "up": nn.Linear(8, 24), "down": nn.Linear(12, 8), "norm": nn.LayerNorm(8)}


def _loss() -> Names:
    return {"hidden": torch.randn(3, 4), "head": nn.Linear(4, 7), "target": torch.tensor([0, 6, 2])}


def _npt_linear() -> Names:
    return {
        "attention": torch.randn(3, 4), "hidden": torch.randn(3, 4), "weight": torch.randn(4, 6),
        "a": torch.randn(4, 2), "b": torch.randn(2, 6),
    }  # fmt: skip


def _products() -> Names:
    return {"a": torch.randn(64, 64), "b": torch.randn(64, 64), "x": torch.randn(4, 9)}


def _corpus() -> Names:
    for name in ("corpus.txt", "validation.txt"):
        Path(name).write_text("one two three\n" * 2000)
    return {}


def _decoder() -> Names:
    return {"model": nn.ModuleDict({"layers": nn.ModuleList(_Layer() for _ in range(16))})}


class _Layer(nn.Module):
    """A layer with the parts that a Llama has."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(8), nn.RMSNorm(8)
        self.self_attn, self.mlp = nn.Linear(8, 8), nn.Module()
        self.mlp.gate_proj, self.mlp.up_proj = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.mlp.down_proj = nn.Linear(12, 8, bias=False)


_READERS: dict[str, Callable[[], Names]] = {
    "docs/contracts.md": lambda: {"x": torch.randn(700), "__file__": "kernels.py"},
    "docs/incidents/npt_weight_delta.md": _decoder,
    "docs/ops/attention.md": _attention,
    "docs/ops/batches.md": _corpus,
    "docs/ops/embedding.md": _embedding,
    "docs/ops/geglu_feed_forward.md": _feed_forward,
    "docs/ops/kda.md": _kda,
    "docs/ops/linear_cross_entropy.md": _loss,
    "docs/ops/matmul.md": _products,
    "docs/ops/npt_linear.md": _npt_linear,
    "docs/ops/nsa.md": _nsa,
    "docs/ops/one_hot_loss.md": lambda: {"logits": torch.randn(3, 7), "target": torch.tensor([0, 6, 2])},
    "docs/ops/rope.md": _rope,
    "docs/ops/vocabulary.md": _corpus,
}
_EMULATED = {"docs/contracts.md", "docs/ops/matmul.md"}
"""Pages with kernels in CUDA C++."""
