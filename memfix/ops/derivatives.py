"""What the autograd functions of ops share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def first_derivative_only(op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For the ``backward`` of a ``torch.autograd.Function``: refuse ``create_graph=True`` by the name of the op.

    A gradient that silently has no graph would make a penalty on it vanish.
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


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function.apply``, for one with ``setup_context``: torch reads the signature of its ``forward`` in every call,
    which takes the host three times as long as the rest, and only ``torch.func`` and ``torch.compile`` need it."""
    if torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling():
        return function.apply(*arguments)
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]
