"""Linear cross entropy compared with Liger, cut-cross-entropy and torch's own function."""

# N tokens, D width, V vocabulary

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memfix.contract import Form
from memfix.ops.linear_cross_entropy import linear_cross_entropy
from memfix.ops.linear_cross_entropy.contract import contract

from . import Comparison, Entry, Peer, Table, Tensors, Unavailable

PEAKED_LOGITS_STD = 8.0  # the largest of 151,936 logits is then near 40
_ROWS_AT_ONCE = 1024
MaybeTensor = Tensor | None


def peaked(tensors: Tensors, generator: torch.Generator) -> None:
    """Scale logits to tens, and make the likeliest class the target of nine tokens in ten, as in a trained model."""
    hidden_ND, weight_VD, target_N = (tensors[name] for name in ("hidden", "weight", "target"))
    hidden_ND *= PEAKED_LOGITS_STD
    likeliest_N = torch.cat([(rows @ weight_VD.T).argmax(-1) for rows in hidden_ND.split(_ROWS_AT_ONCE)])
    place_N = torch.arange(len(target_N), device=target_N.device)
    target_N.copy_(torch.where(place_N % 10 == 0, target_N, likeliest_N))


def untargeted_rows(tensors: Tensors, answer: Tensors) -> Tensors:
    """Return the rows of the weight's gradient without a target, where errors of small probabilities show."""
    gradient_VD, target_N = answer["gradient of weight"], tensors["target"]
    untargeted_V = torch.ones(len(gradient_VD), dtype=torch.bool, device=gradient_VD.device)
    untargeted_V[target_N[target_N >= 0]] = False
    return {"gradient of weight, rows without a target": gradient_VD[untargeted_V]}


def _as_called_by_users(form: str) -> Callable[..., Any]:
    """Return the public function, which chooses the rows of a chunk itself. It takes the options of naive."""

    @functools.wraps(contract.naive)
    def loss(
        hidden: Tensor, weight: Tensor, target: Tensor, bias: MaybeTensor, class_weight: MaybeTensor, **options: Any
    ) -> Tensor:
        return linear_cross_entropy(hidden, weight, target, bias=bias, class_weight=class_weight, form=form, **options)

    return loss


def _in_chunks(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: MaybeTensor, class_weight: MaybeTensor, *, rows_per_chunk: int
) -> Tensor:
    """Call form ``triton`` with the ``rows_per_chunk`` of the shape."""
    return linear_cross_entropy(
        hidden, weight, target, bias=bias, class_weight=class_weight, rows_per_chunk=rows_per_chunk, form="triton"
    )


def _liger_in_chunks() -> Callable[..., Any]:
    """Liger with about ``rows_per_chunk`` rows: it takes a factor of memory, and rounds rows to a power of two."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as loss_of

    if "chunk_mem_const" not in inspect.signature(loss_of).parameters:
        raise Unavailable("this version of Liger chooses the rows itself")

    return lambda hidden, weight, target, bias, class_weight, *, rows_per_chunk: loss_of(
        hidden, weight, target, bias, chunk_mem_const=liger_factor(*hidden.shape, weight.shape[0], rows_per_chunk)
    )


def liger_rows(num_tokens: int, width: int, vocabulary: int, factor: int) -> int:
    """Return the rows of Liger's chunk for a value of its ``chunk_mem_const``."""
    num_parts = -(-vocabulary // (factor * width))
    return min(1 << (-(-num_tokens // num_parts) - 1).bit_length(), num_tokens)


def liger_factor(num_tokens: int, width: int, vocabulary: int, rows_per_chunk: int) -> int:
    """Return the smallest ``chunk_mem_const`` that gives ``rows_per_chunk`` rows or more."""
    wanted = min(rows_per_chunk, num_tokens)
    return next(factor for factor in itertools.count(1) if liger_rows(num_tokens, width, vocabulary, factor) >= wanted)


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
    """Torch's function in chunks, of its own choice or a given size; without options it would take the naive path."""
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise Unavailable(f"not in torch {torch.__version__}")
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows_per_chunk)
    return lambda hidden, weight, target, bias, class_weight: F.linear_cross_entropy(
        hidden, weight, target, options=options
    )


_LARGE = "D=2560 V=151936 dtype=bfloat16"
_CHUNKED = ("naive", "recompute", "triton")
_BY_USERS = ("naive", "reported", "checkpoint", "recompute", "auto", "triton")
_OTHERS = ("liger", "cce", "torch", "torch_4096")
IN_CHUNKS, LIGER_IN_CHUNKS = "triton_rows", "liger_rows"


def _chunks(tokens: int, width: int, classes: int, rows: Sequence[int]) -> list[Entry]:
    """Return one shape at several rows per chunk. Contenders that choose their own rows run once, with the first entry;
    Liger also runs with each number of rows that it supports."""
    shape = f"N={tokens} D={width} V={classes} dtype=bfloat16"
    entries = []
    for number in rows:
        factor = liger_factor(tokens, width, classes, number)
        peers = [LIGER_IN_CHUNKS] if liger_rows(tokens, width, classes, factor) == number else []
        entries.append(
            Entry(
                f"{tokens} tokens, {classes} classes, {number} rows",
                f"{shape} rows_per_chunk={number}",
                [IN_CHUNKS, *(["auto"] if number == rows[0] else [])],
                [*peers, *(["liger", "cce"] if number == rows[0] else [])],
            )
        )
    return entries


_ROWS = (512, 1024, 2048, 4096, 8192)

COMPARISON = Comparison(
    peers={
        "liger": Peer("liger-kernel", _liger, ("liger_kernel", "triton")),
        "cce": Peer("cut-cross-entropy", _cut_cross_entropy, ("cut_cross_entropy", "triton")),
        "torch": Peer("torch", functools.partial(_torch_own, None)),
        "torch_4096": Peer("torch", functools.partial(_torch_own, 4096)),
        LIGER_IN_CHUNKS: Peer("liger-kernel", _liger_in_chunks, ("liger_kernel", "triton")),
    },
    tables={
        "tokens": Table(
            [
                Entry(f"{tokens} tokens", f"N={tokens} {_LARGE}", _BY_USERS, _OTHERS)
                for tokens in (4096, 8192, 32_768, 131_072)
            ],
            values=("flat", "peaked"),
            simulated=True,  # for the manual's table of simulated and measured peaks
        ),
        "sizes": Table(
            [
                Entry(f"{classes} classes, {dtype}", f"N=8192 D=2560 V={classes} dtype={dtype}", _CHUNKED, _OTHERS)
                for classes, dtype in ((32_000, "bfloat16"), (256_000, "bfloat16"), (151_936, "float32"))
            ],
            values=("flat",),
        ),
        "frontier": Table(
            [entry for tokens in (8192, 32_768) for entry in _chunks(tokens, 4096, 128_256, _ROWS)],
            values=("flat",),
        ),
        "small_vocabulary": Table(
            [
                entry
                for classes, width in ((32_000, 2560), (50_304, 2048))
                for tokens in (8192, 16_384)
                for entry in _chunks(tokens, width, classes, (1024, 2048, 4096, tokens))
            ],
            values=("flat",),
        ),
        "ignored": Table(
            [Entry("32768 tokens, half ignored", f"N=32768 {_LARGE} share=0.5", forms=("triton",), peers=())]
        ),
    },
    forms={
        **{form: _as_called_by_users(form) for form in ("auto", "checkpoint", "recompute", "triton")},
        IN_CHUNKS: Form(_in_chunks, has_kernels=True),
    },
    # flat: the values that the contract draws, whose logits have standard deviation 1, as in an untrained model
    values={"flat": lambda tensors, generator: None, "peaked": peaked},
    error_at={"N": 1024},
    parts=untargeted_rows,
)
