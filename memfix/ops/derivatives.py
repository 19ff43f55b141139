"""Helpers that the ops' subclasses of ``torch.autograd.Function`` share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad


def first_derivative_only(op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the ``backward`` of a ``torch.autograd.Function``: refuse ``create_graph=True``, naming the op.

    Otherwise the gradient would silently have no graph, and a gradient penalty would have no effect.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def checked(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled():  # the engine turns it on for create_graph=True only
                raise RuntimeError(
                    f"{op} has no second derivative; call backward without create_graph=True, or use torch's own op"
                )
            return backward(ctx, *gradients)

        return checked

    return decorate


def without_autocast(tensor: torch.Tensor) -> torch.autocast:
    """Return a context in which autocast changes no dtype on the device of ``tensor``: the caller chose the dtypes."""
    return torch.autocast(tensor.device.type, enabled=False)


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Call ``function.apply``, of a function with ``setup_context``, with the least work on the host.

    Where no gradient is needed, this calls ``forward`` itself, elsewhere the ``apply`` of torch's base class in C++:
    ``Function.apply`` first inspects the signature of ``forward``, which takes three times as long as the rest and
    which only ``torch.func`` and ``torch.compile`` need.
    """
    if torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling():
        return function.apply(*arguments)
    if forward_ad._current_level < 0 and not _needs_graph(arguments):
        return function.forward(*arguments)
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


def _needs_graph(arguments: tuple[Any, ...]) -> bool:
    if not torch.is_grad_enabled():
        return False
    return any(isinstance(argument, torch.Tensor) and argument.requires_grad for argument in arguments)
