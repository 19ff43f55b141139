"""Linear cross entropy beside Liger, cut-cross-entropy and torch's own."""

# N tokens, D width, V vocabulary

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from memfix.ops.linear_cross_entropy import linear_cross_entropy

from . import Comparison, Entry, Peer, Table, Tensors, Unavailable

PEAKED_LOGITS_STD = 8.0  # the largest of 151,936 logits is then near 40
_ROWS_AT_ONCE = 1024
MaybeTensor = torch.Tensor | None


def flat(tensors: Tensors, generator: torch.Generator) -> None:
    """Values as the contract draws them: logits of standard deviation 1, as those of a fresh model."""


def peaked(tensors: Tensors, generator: torch.Generator) -> None:
    """Logits of tens, and for nine tokens in ten their likeliest class as the target, as of a trained model."""
    hidden_ND, weight_VD, target_N = (tensors[name] for name in ("hidden", "weight", "target"))
    hidden_ND *= PEAKED_LOGITS_STD
    likeliest_N = torch.cat([(rows @ weight_VD.T).argmax(-1) for rows in hidden_ND.split(_ROWS_AT_ONCE)])
    place_N = torch.arange(len(target_N), device=target_N.device)
    target_N.copy_(torch.where(place_N % 10 == 0, target_N, likeliest_N))


def untargeted_rows(tensors: Tensors, answer: Tensors) -> Tensors:
    """Rows of the weight's gradient that only the softmax reaches: dropped small probabilities show here."""
    gradient_VD, target_N = answer["gradient of weight"], tensors["target"]
    untargeted_V = torch.ones(len(gradient_VD), dtype=torch.bool, device=gradient_VD.device)
    untargeted_V[target_N[target_N >= 0]] = False
    return {"gradient of weight, rows without a target": gradient_VD[untargeted_V]}


def _as_called_by_users(form: str) -> Callable[..., Any]:
    """The public function, which chooses the rows of a chunk itself."""

    def loss(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        bias: MaybeTensor,
        class_weight: MaybeTensor,
        *,
        reduction: str,
        ignore_index: int,
        label_smoothing: float,
        softcap: float | None,
        z_loss: float,
    ) -> torch.Tensor:
        return linear_cross_entropy(
            hidden, weight, target, bias=bias, class_weight=class_weight, reduction=reduction,
            ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=softcap, z_loss=z_loss, form=form,
        )  # fmt: skip

    return loss


def _liger() -> Callable[..., Any]:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss_of = LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight, target, bias, class_weight: loss_of(weight, hidden, target, bias)


def _cut_cross_entropy() -> Callable[..., Any]:
    from cut_cross_entropy import linear_cross_entropy as loss_of

    return lambda hidden, weight, target, bias, class_weight: loss_of(
        hidden, weight, target, **({} if bias is None else {"bias": bias})
    )


def _torch_own(rows_per_chunk: int | None) -> Callable[..., Any]:
    """Without options torch takes the naive path; with them it goes in chunks, of its own choice or of a given size."""
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise Unavailable(f"not in torch {torch.__version__}")
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows_per_chunk)
    return lambda hidden, weight, target, bias, class_weight: F.linear_cross_entropy(
        hidden, weight, target, options=options
    )


_LARGE = "D=2560 V=151936 dtype=bfloat16"
_CHUNKED = ("naive", "recompute", "triton")

COMPARISON = Comparison(
    peers={
        "liger": Peer("liger-kernel", _liger, ("liger_kernel", "triton")),
        "cce": Peer("cut-cross-entropy", _cut_cross_entropy, ("cut_cross_entropy", "triton")),
        "torch": Peer("torch", functools.partial(_torch_own, None)),
        "torch_4096": Peer("torch", functools.partial(_torch_own, 4096)),
    },
    tables={
        "tokens": Table(
            [Entry(f"{tokens} tokens", f"N={tokens} {_LARGE}") for tokens in (4096, 8192, 32_768, 131_072)],
            values=("flat", "peaked"),
            simulated=True,  # the manual's table of agreement
        ),
        "sizes": Table(
            [
                Entry(f"{classes} classes, {dtype}", f"N=8192 D=2560 V={classes} dtype={dtype}", forms=_CHUNKED)
                for classes, dtype in ((32_000, "bfloat16"), (256_000, "bfloat16"), (151_936, "float32"))
            ],
            values=("flat",),
        ),
        "ignored": Table(
            [Entry("32768 tokens, half ignored", f"N=32768 {_LARGE} share=0.5", forms=("triton",), peers=())]
        ),
    },
    forms={form: _as_called_by_users(form) for form in ("auto", "checkpoint", "recompute", "triton")},
    values={"flat": flat, "peaked": peaked},
    error_at={"N": 1024},
    parts=untargeted_rows,
)
