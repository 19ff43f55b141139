"""A linear layer whose weight each token modifies by a modulated low-rank product, without a weight per token."""

from __future__ import annotations

import torch

from ..dispatch import Dispatcher

DISPATCHER = Dispatcher(
    "npt_linear",
    __name__,
    forms=("token_chunks", "factored", "triton", "offload"),
    otherwise="factored",
    kernels="triton",
)
FORMS = DISPATCHER.names


def npt_linear(
    hidden: torch.Tensor | tuple[torch.Tensor, ...],
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    modulation: torch.Tensor,
    *,
    tokens_per_chunk: int | None = None,
    form: str = "auto",
) -> torch.Tensor:
    """Equals ``hidden @ (weight + a @ diag(modulation) @ b)``, where each token has its own modulation.

    ``hidden`` is ``[..., D]``, or a tuple that starts with such a tensor, as decoder layers return it; ``weight`` is
    ``[D, F]``, ``a`` is ``[D, R]``, ``b`` is ``[R, F]`` and ``modulation`` is ``[..., R]``, with the leading dims of
    ``hidden``. If the modulation was computed from ``a``, autograd adds that gradient to ``a`` too.

    ``form="auto"`` takes ``factored``: ``hidden @ weight + ((hidden @ a) * modulation) @ b``. It saves its inputs and
    ``hidden @ a`` for backward, and computes only the gradients that are needed. ``triton`` is the same with its own
    kernels for the low-rank products: less time on the GPU and more on the host, so best under CUDA graphs.
    ``token_chunks`` makes the weights of ``tokens_per_chunk`` tokens at a time (default 1). ``offload`` computes the
    low-rank term on the host, ``tokens_per_chunk`` tokens at a time (default 512). Only first derivatives.
    """
    hidden = _first_of(hidden)
    chosen = DISPATCHER.chosen(form, hidden)
    if tokens_per_chunk is not None and chosen not in ("token_chunks", "offload"):
        raise ValueError(
            f"tokens_per_chunk is for form 'token_chunks' or 'offload', and the form is {chosen!r}; leave it out"
        )
    options = {} if tokens_per_chunk is None else {"tokens_per_chunk": tokens_per_chunk}
    result: torch.Tensor = DISPATCHER.function(chosen)(hidden, weight, a, b, modulation, **options)
    return result


def _first_of(hidden: object) -> torch.Tensor:
    """Return the hidden states: ``hidden`` itself, or the first element of the tuple that a decoder layer returned."""
    if hidden == ():
        raise ValueError("hidden must be a tensor or a tuple that starts with one, got an empty tuple")
    first = hidden[0] if isinstance(hidden, tuple) else hidden
    if not isinstance(first, torch.Tensor):
        got = f"a tuple that starts with {type(first).__name__}" if isinstance(hidden, tuple) else type(hidden).__name__
        raise TypeError(f"hidden must be a tensor or a tuple that starts with one, got {got}")
    return first
