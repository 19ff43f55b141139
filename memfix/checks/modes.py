"""Calls in another mode than the usual one: under autocast, and with gradients that are differentiated again.

A form need not know of either. Under autocast it must be as near to the truth as naive is there. A second derivative
must be naive's, or be refused in words: a gradient that silently has no graph would make a penalty on it vanish.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from .inputs import Draw
from .upstream import upstream_gradients

_REFUSALS = ("second derivative", "differentiate twice")
"""What a refusal says where it does not name the op; the second are torch's words for ``once_differentiable``."""


def autocast_of(draw: Draw, tensors: Mapping[str, torch.Tensor]) -> torch.autocast:
    """Bfloat16 autocast on the device of ``tensors``, for a draw in that mode; otherwise none."""
    device = next(iter(tensors.values())).device.type
    return torch.autocast(device, torch.bfloat16, enabled=draw.mode == "autocast")


def known_dtypes(dtypes: Sequence[torch.dtype], naives: Sequence[torch.dtype], draw: Draw) -> tuple[torch.dtype, ...]:
    """``dtypes`` of a form's outputs under autocast, naive's where a form has kept that of its inputs."""
    if len(dtypes) != len(naives):
        return tuple(dtypes)
    working = getattr(torch, draw.case.dtype)
    return tuple(naive if own == working else own for own, naive in zip(dtypes, naives, strict=True))


def second_derivatives(
    outputs: Sequence[torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    draw: Draw,
    nudge: Callable[[torch.Tensor], torch.Tensor] | None,
) -> dict[str, torch.Tensor | None]:
    """The gradients of ``wanted``, and what a random sum of them gives for ``wanted`` and for what arrived.

    None for a gradient without a graph, as for one that does not depend on a tensor.
    """
    upstream = [gradient for gradient in upstream_gradients(outputs, draw, 0) if gradient is not None]
    upstream = [(gradient if nudge is None else nudge(gradient)).requires_grad_() for gradient in upstream]
    gradients = torch.autograd.grad(outputs, list(wanted.values()), upstream, create_graph=True, allow_unused=True)
    found: dict[str, torch.Tensor | None] = {
        f"gradient of {name}": None if gradient is None else gradient.detach()
        for name, gradient in zip(wanted, gradients, strict=True)
    }
    named = {f"second derivative by {name}": tensor for name, tensor in wanted.items()}
    named |= {f"second derivative by the gradient of output {i}": tensor for i, tensor in enumerate(upstream)}
    again = [gradient for gradient in gradients if gradient is not None and gradient.requires_grad]
    if not again:
        return found | dict.fromkeys(named)
    arriving = [gradient for gradient in upstream_gradients(again, draw, 1) if gradient is not None]
    second = torch.autograd.grad(again, list(named.values()), arriving, allow_unused=True)
    return found | dict(zip(named, second, strict=True))


def is_refusal(error: RuntimeError, op: str) -> bool:
    """Whether a form says by ``error`` that it has no second derivative."""
    return any(words in str(error) for words in (op, *_REFUSALS))
