"""Calls of the loss's kernels, to be made where they are interpreted, with naive's and float64's answers beside."""

# N tokens, D width, V vocabulary

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from memfix.ops.linear_cross_entropy import chunks
from memfix.ops.linear_cross_entropy.naive import naive_linear_cross_entropy
from memfix.ops.linear_cross_entropy.triton import ExponentialsPass, triton_linear_cross_entropy

Answer = list[torch.Tensor]


def answers(name: str) -> dict[str, Answer]:
    """Loss and gradients of hidden and weight at one of ``CALLS``."""
    hidden, weight, target, options, rows_per_chunk = CALLS[name]()
    kernels = {**options, "rows_per_chunk": rows_per_chunk}
    wide = {key: value.double() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    return {
        "kernels": _run(triton_linear_cross_entropy, hidden, weight, target, kernels),
        "naive": _run(naive_linear_cross_entropy, hidden, weight, target, options),
        "truth": _run(naive_linear_cross_entropy, hidden.double(), weight.double(), target, wide),
    }


def everything() -> dict[str, Any]:
    """In one go: a child that interprets kernels takes seconds to start."""
    found: dict[str, Any] = {name: answers(name) for name in CALLS}
    with patch.object(chunks, "_is_worth_a_guess", return_value=True):
        found |= {f"{name}, guessed": answers(name) for name in ("plain", "some_ignored", "all_ignored")}
    found["errors of the weight's gradient"] = errors_of_the_weight_sum(16)
    for width, stride in ((16, 16), (12, 16), (16, 20), (12, 12)):
        found[f"takes {width} of {stride}"] = takes_exponentials(width, stride)
    return found


def _run(function: Any, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, options: Any) -> Answer:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = function(hidden, weight, target, **options)
    loss.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [loss.detach(), hidden.grad, weight.grad]


def _made(
    N: int, D: int, V: int, *, scale: float = 1.0, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = scale * torch.randn(N, D, generator=generator)
    weight = torch.randn(V, D, generator=generator)
    return hidden.bfloat16(), weight.bfloat16(), torch.randint(0, V, (N,), generator=generator)


def plain() -> Any:
    return *_made(40, 16, 77), {}, 64


def many_chunks() -> Any:
    return *_made(96, 16, 50), {}, 6


def strays() -> Any:
    """Losses of hundreds: the target is no reference for the exponentials of its token."""
    return *_made(150, 16, 77, scale=40.0), {}, 140


def some_strays() -> Any:
    """In the second block of each of two chunks, so that the second chunk finds what the first left."""
    hidden, weight, target = _made(500, 16, 300)
    hidden[[140, 200, 260 + 130]] *= 40
    return hidden, weight, target, {"bias_V": _made(1, 300, 1)[0][0]}, 260


def huge() -> Any:
    """Terms so large that sums of them in two orders differ by more than exponentials bear."""
    hidden, weight, target = _made(20, 512, 40, scale=1e9)
    target[:10] = (hidden[:10].double() @ weight.double().T).argmax(1)
    return hidden, weight, target, {}, 1  # a stray would have its whole block done again


def some_ignored() -> Any:
    """By an index that lies far outside of the weight's memory."""
    hidden, weight, target = _made(40, 16, 77)
    target[::3] = -(10**12)
    return hidden, weight, target, {"ignore_index": -(10**12)}, 16


def one_class() -> Any:
    hidden, weight, target = _made(40, 16, 30)
    return hidden, weight, target * 0 + 7, {}, 40


def confident() -> Any:
    """Every token is nearly certain of its target: what is left of the gradient are differences from 1."""
    _, weight, target = _made(24, 16, 40)
    return (3 * weight[target].float() / 4).bfloat16(), weight, target, {}, 24


def nan_in_hidden() -> Any:
    hidden, weight, target = _made(12, 8, 20)
    hidden[3, 2] = float("nan")
    return hidden, weight, target, {"reduction": "none"}, 5


def inf_in_hidden() -> Any:
    hidden, weight, target = _made(12, 8, 20)
    hidden[4, 1] = float("inf")
    return hidden, weight, target, {"reduction": "none"}, 12


def ruled_out() -> Any:
    """A bias of -inf rules classes out, the target's among them."""
    hidden, weight, target = _made(10, 8, 16)
    bias = torch.zeros(16, dtype=torch.bfloat16)
    bias[target[2]] = bias[15] = float("-inf")
    return hidden, weight, target, {"bias_V": bias, "reduction": "none"}, 10


def all_ignored() -> Any:
    hidden, weight, target = _made(9, 8, 20)
    return hidden, weight, target.fill_(-100), {}, 4


CALLS = {
    call.__name__: call
    for call in (
        plain, many_chunks, strays, some_strays, huge, some_ignored, one_class, confident, nan_in_hidden, inf_in_hidden,
        ruled_out, all_ignored,
    )
}  # fmt: skip


def errors_of_the_weight_sum(num_chunks: int) -> tuple[float, float]:
    """The error of the weight's gradient over many chunks, and over one."""
    hidden, weight, target = _made(num_chunks * 4, 16, 24, seed=3)
    truth = _run(naive_linear_cross_entropy, hidden.double(), weight.double(), target, {})[2]

    def error(rows: int) -> float:
        got = _run(triton_linear_cross_entropy, hidden, weight, target, {"rows_per_chunk": rows})[2]
        return float((got.double() - truth).norm() / truth.norm())

    return error(4), error(4 * num_chunks)


def takes_exponentials(width: int, stride: int) -> bool:
    from memfix.ops.linear_cross_entropy.chunks import Head
    from memfix.ops.linear_cross_entropy.options import Options

    weight = torch.empty(10, stride, dtype=torch.bfloat16)[:, :width]
    return ExponentialsPass.suits(Head(weight, None, None, Options()))
