"""The modulated layer compared with its alternatives: plain autograd, torch.compile, and the LoRA layer of peft.

peft's layer has no modulation, so it computes less. It is timed with a frozen modulation of one, where its result is
right. Weights are frozen in all tables, as in fine-tuning.
"""

# N tokens, D width, F width of the result, R rank

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import Comparison, Entry, Peer, Table, Tensors


def ones(tensors: Tensors, generator: torch.Generator) -> None:
    """Set the modulation to one, so that the layer is LoRA."""
    tensors["modulation"].fill_(1.0)


def one_product(hidden: Tensor, weight: Tensor, a: Tensor, b: Tensor, modulation: Tensor) -> None:
    """Compute the product that every forward needs."""
    torch.matmul(hidden, weight)


def autograd(hidden: Tensor, weight: Tensor, a: Tensor, b: Tensor, modulation: Tensor) -> Tensor:
    """Compute the formula in plain torch."""
    return hidden @ weight + ((hidden @ a) * modulation) @ b


def _peft() -> Callable[..., Any]:
    from peft.tuners.lora import LoraConfig
    from peft.tuners.lora.layer import Linear

    made: dict[tuple[int, int], Linear] = {}

    def lora(hidden: Tensor, weight: Tensor, a: Tensor, b: Tensor, modulation: Tensor) -> Tensor:
        """Call a layer that is made once for each ``a`` and ``b``, and uses these tensors. Ignores ``modulation``."""
        key = (id(a), id(b))
        if key not in made:
            base = torch.nn.Linear(*weight.shape, bias=False, device="meta")
            base.weight = torch.nn.Parameter(weight.detach().T, requires_grad=False)
            rank = a.shape[1]
            layer = Linear(
                base, "default", config=LoraConfig(r=rank, lora_alpha=rank, lora_dropout=0.0), r=rank, lora_alpha=rank
            )
            for module, tensor in ((layer.lora_A.default, a), (layer.lora_B.default, b)):
                del module.weight
                module.weight = tensor.T  # a view, so that its gradient flows to a or b
            made[key] = layer
        return made[key](hidden)  # type: ignore[no-any-return]

    return lora


_SIZES = {
    "incident": "",
    "llama_8b": "",
    "rank_64": "R=64",
    "long": "S=4096",
    "long_rank_64": "S=4096 R=64",
}


def _entry(name: str, frozen: str, forms: Sequence[str], peers: Sequence[str]) -> Entry:
    return Entry(name, f"{_SIZES[name]} {frozen} dtype=bfloat16", forms, peers)


def _entries(frozen: str, *peers: str) -> list[Entry]:
    return [_entry(name, frozen, ("factored", "triton"), peers) for name in _SIZES]


COMPARISON = Comparison(
    peers={
        "autograd": Peer("torch", lambda: autograd),
        "compiled": Peer("torch", lambda: torch.compile(autograd, dynamic=False)),
        "peft_lora": Peer("peft", _peft, ("peft",)),
    },
    tables={
        "layers": Table(
            _entries("frozen=weight", "autograd", "compiled"), ("train", "forward"), calls=8, simulated=True
        ),
        "lora": Table(
            _entries("frozen=weight frozen=modulation", "peft_lora"), ("train", "forward"), values=("ones",), calls=8
        ),
        # one layer per step: launches on the host take longer than the kernels, in every form
        "alone": Table(
            [_entry("incident", "frozen=weight", ("factored", "triton", "offload"), ("autograd", "compiled"))],
            ("train", "forward"),
        ),
    },
    values={"ones": ones},
    floors={"forward": one_product},
    error_at={"B": 1, "S": 64, "F": 512},
)
