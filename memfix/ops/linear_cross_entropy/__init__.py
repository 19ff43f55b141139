"""Cross entropy of a linear classifier without its logits."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from ...units import parse_bytes
from ..arguments import require_at_least_one, require_one_of
from ..availability import triton_is_there
from .arguments import require_leading_dims
from .chunk_size import rows_within, usual_rows
from .log_probabilities import token_log_probabilities
from .module import LinearCrossEntropy
from .terms import Terms

__all__ = ["FORMS", "LinearCrossEntropy", "chosen_form", "linear_cross_entropy", "token_log_probabilities"]

FORMS = ("auto", "standard", "checkpoint", "recompute", "triton")
_NUM_FULL_LOGITS = 3  # alive at the peak of the standard path


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    class_weight: torch.Tensor | None = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
    rows_per_chunk: int | None = None,
    max_bytes: int | str | None = None,
    form: str = "auto",
    standard_up_to: int | str = "10 GiB",
) -> torch.Tensor:
    """Equals ``F.cross_entropy((hidden @ weight.T + bias).flatten(0, -2), target.flatten())``, with the same leading
    dims for ``hidden`` (``[..., D]``) and ``target`` (``[...]``); ``weight`` is ``[V, D]``.

    ``ignore_index``, ``label_smoothing``, ``class_weight`` and ``reduction`` are torch's; ``none`` gives one loss per
    token in the shape of ``target``. ``softcap`` bends the logits to ``softcap * tanh(logits / softcap)``. ``z_loss``
    adds that many times the squared logsumexp of the logits; its mean divides by the number of tokens that count,
    also where ``class_weight`` makes the mean of the loss divide by the sum of their weights.

    ``form="auto"`` takes the standard path, torch's own operators, while the logits of all tokens take at most
    ``standard_up_to`` bytes, and above it a chunked form: ``triton`` on a GPU that has it, else ``recompute``. Those
    make no tensor of size tokens x vocabulary, leave ignored tokens out before the first product, keep the logits in
    float32 where the standard path rounds them, and add up the gradient of the weight in float32. They take the
    gradient in the forward and give it away in backward, so a second backward of the same loss is refused (``none``
    repeats it); ``form="checkpoint"`` is slower and repeats any. Only first derivatives.

    A chunk has ``rows_per_chunk`` tokens, or as many as ``max_bytes`` (``"2 GiB"``) holds: it bounds what a chunk
    takes, its logits, their gradient and float32 tiles, and not the gradients that are the result. Without both, as
    many as keep a train step within 2.7 GiB above its inputs, and 2048 at least. With ``max_bytes``, ``auto`` takes
    the standard path only where three times the logits fit as well.

    With every target ignored ``mean`` is NaN and all gradients are zero, as in torch. An empty batch is refused. What
    is in the hidden row of an ignored token does not matter in a chunked form, not even NaN.
    """
    require_one_of("form", form, FORMS)
    require_leading_dims("target", hidden, target)
    if rows_per_chunk is not None and max_bytes is not None:
        raise ValueError(f"give rows_per_chunk or max_bytes, not both; got {rows_per_chunk} and {max_bytes!r}")
    if rows_per_chunk is not None:
        require_at_least_one("rows_per_chunk", rows_per_chunk)  # also where no chunk is made
    if max_bytes is not None and form == "standard":
        raise ValueError(f"max_bytes bounds a chunk, and form 'standard' makes none; got {max_bytes!r}")
    chosen = chosen_form(hidden, weight, max_bytes, standard_up_to) if form == "auto" else form
    options: dict[str, Any] = {}
    if chosen != "standard":
        if rows_per_chunk is None:
            width, vocabulary, dtype = hidden.shape[-1], weight.shape[0], _product_dtype(hidden)
            terms = Terms(label_smoothing=label_smoothing, softcap=softcap)
            if max_bytes is not None:
                rows_per_chunk = rows_within(max_bytes, chosen, width, vocabulary, dtype, terms)
            else:
                rows_per_chunk = usual_rows(chosen, max(1, target.numel()), width, vocabulary, dtype, terms)
        options["rows_per_chunk"] = rows_per_chunk
    loss = _function(chosen)(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        target.reshape(-1),
        bias,
        class_weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        softcap=softcap,
        z_loss=z_loss,
        **options,
    )
    return loss.reshape(target.shape) if reduction == "none" else loss


def chosen_form(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    max_bytes: int | str | None = None,
    standard_up_to: int | str = "10 GiB",
) -> str:
    """What ``form="auto"`` takes for these tensors. Only shapes, dtypes and the device are looked at."""
    num_tokens = hidden.shape[:-1].numel()
    logits_bytes = num_tokens * weight.shape[0] * _product_dtype(hidden).itemsize
    fits = max_bytes is None or _NUM_FULL_LOGITS * logits_bytes <= parse_bytes(max_bytes)
    if logits_bytes <= parse_bytes(standard_up_to) and fits:
        return "standard"
    return "triton" if hidden.is_cuda and triton_is_there() else "recompute"


def _product_dtype(hidden: torch.Tensor) -> torch.dtype:
    device = hidden.device.type
    narrows = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if narrows and hidden.dtype != torch.float64 else hidden.dtype


def _function(form: str) -> Callable[..., torch.Tensor]:
    """Imported when it is first called: a kernel's compiler is loaded only where it is used."""
    module = importlib.import_module(f".{form}", __name__)
    function: Callable[..., torch.Tensor] = getattr(module, f"{form}_linear_cross_entropy")
    return function
