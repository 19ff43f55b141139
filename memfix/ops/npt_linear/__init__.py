"""A linear layer whose weight each token changes by a modulated product of low rank, without a weight a token."""

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
    """Equals ``hidden @ (weight + a @ diag(modulation) @ b)``, where each token has a modulation of its own.

    ``hidden`` is ``[..., D]``, or a tuple whose first element is that, as decoder layers return it; ``weight`` is
    ``[D, F]``, ``a`` is ``[D, R]``, ``b`` is ``[R, F]`` and ``modulation`` is ``[..., R]``, with the leading dims of
    ``hidden``. A modulation that was made with ``a`` gives ``a`` that gradient too.

    ``form="auto"`` takes ``factored``: ``hidden @ weight + ((hidden @ a) * modulation) @ b``. It keeps its inputs and
    ``hidden @ a`` for backward, and computes no gradient that nobody asks for. ``triton`` is the same with kernels of
    its own for the products of low rank: less time on the GPU and more on the host, so for CUDA graphs.
    ``token_chunks`` makes the weights of ``tokens_per_chunk`` tokens at a time, 1 unless it is given. ``offload``
    computes what has rank R on the host, 512 tokens at a time unless ``tokens_per_chunk`` is given. Only first
    derivatives.
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
    """The hidden states themselves, or the first element of the tuple that a decoder layer returned."""
    if hidden == ():
        raise ValueError("hidden must be a tensor or a tuple that starts with one, got an empty tuple")
    first = hidden[0] if isinstance(hidden, tuple) else hidden
    if not isinstance(first, torch.Tensor):
        got = f"a tuple that starts with {type(first).__name__}" if isinstance(hidden, tuple) else type(hidden).__name__
        raise TypeError(f"hidden must be a tensor or a tuple that starts with one, got {got}")
    return first
