"""Cross entropy of a linear classifier without the full logits."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...units import parse_bytes
from ..arguments import require_leading_dims
from ..dispatch import AUTO, Dispatcher
from ..products import as_rows
from .chunk_size import ChunkMemory, product_dtype, require_one_bound, usual_rows
from .log_probabilities import token_log_probabilities
from .module import LinearCrossEntropy
from .options import Options
from .vocabulary_parallel import vocabulary_parallel_linear_cross_entropy

__all__ = [
    "FORMS",
    "LinearCrossEntropy",
    "chosen_form",
    "linear_cross_entropy",
    "token_log_probabilities",
    "vocabulary_parallel_linear_cross_entropy",
]

DISPATCHER = Dispatcher(
    "linear_cross_entropy",
    __name__,
    forms=("standard", "checkpoint", "recompute", "triton"),
    otherwise="recompute",
    kernels="triton",
)
FORMS = DISPATCHER.names
_NUM_FULL_LOGITS = 3  # tensors of the size of the logits that are alive at the peak of form "standard"


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
    standard_up_to: int | str | None = None,
) -> torch.Tensor:
    """Equals ``F.cross_entropy((hidden @ weight.T + bias).flatten(0, -2), target.flatten())``, with the same leading
    dims for ``hidden`` (``[..., D]``) and ``target`` (``[...]``); ``weight`` is ``[V, D]``.

    ``ignore_index``, ``label_smoothing``, ``class_weight`` and ``reduction`` are torch's; ``none`` gives one loss per
    token in the shape of ``target``. ``softcap`` bends the logits to ``softcap * tanh(logits / softcap)``. ``z_loss``
    adds that many times the squared logsumexp of the logits; its mean divides by the number of tokens that count,
    also where ``class_weight`` makes the mean of the loss divide by the sum of their weights.

    ``form="auto"`` takes a chunked form at any size: ``triton`` on a GPU that has it, else ``recompute``. Both make
    no tensor of size tokens x vocabulary, drop ignored tokens before the first product, keep the logits in float32,
    and sum the gradient of the weight with more digits than its dtype has. They compute the gradient in the forward
    and free it in backward, so a second backward of the same loss is refused (except with ``reduction="none"``);
    ``form="checkpoint"`` is slower and allows a second backward. Only first derivatives. ``form="standard"`` is torch's
    own operators, which have neither limit. With ``standard_up_to`` (``"10 GiB"``), ``auto`` takes them if the logits
    of all tokens take at most that many bytes.

    A chunk has ``rows_per_chunk`` tokens, or as many as fit ``max_bytes`` (``"2 GiB"``). ``max_bytes`` bounds the
    chunk's logits, their gradient and float32 tiles, not the gradients that are returned. Without either, chunks are of
    equal size and have at most 2048 tokens, or 4096 for small vocabularies. With ``max_bytes`` and
    ``standard_up_to``, ``auto`` takes torch's operators only if three times the logits fit ``max_bytes`` as well.

    With every target ignored ``mean`` is NaN and all gradients are zero, as in torch. An empty batch is refused. A
    chunked form never reads the hidden row of an ignored token, so that it may even be NaN.
    """
    require_leading_dims("target", target, of="hidden", whole=hidden)
    require_one_bound(rows_per_chunk, max_bytes)
    options = Options(
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        softcap=softcap,
        z_loss=z_loss,
        rows_per_chunk=rows_per_chunk,
    )
    form = chosen_form(hidden, weight, max_bytes, standard_up_to, form)
    options = _with_rows(options, form, hidden, weight, max_bytes)
    flat = (as_rows(hidden), weight, target.reshape(-1), bias, class_weight)
    return options.shaped(DISPATCHER.function(form, hidden)(*flat, **vars(options)), target)


def chosen_form(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    max_bytes: int | str | None = None,
    standard_up_to: int | str | None = None,
    form: str = AUTO,
) -> str:
    """Return the form that ``form="auto"`` takes for these tensors, by their shapes, dtypes and device."""
    most_logits_bytes = _bytes_of_standard_up_to(standard_up_to)
    if form == AUTO:
        logits_bytes = hidden.shape[:-1].numel() * weight.shape[0] * product_dtype(hidden).itemsize
        fits = max_bytes is None or _NUM_FULL_LOGITS * logits_bytes <= parse_bytes(max_bytes)
        if logits_bytes <= most_logits_bytes and fits:
            return "standard"
    elif form == "standard" and max_bytes is not None:
        raise ValueError(f"max_bytes bounds a chunk, and form 'standard' makes none; got {max_bytes!r}")
    return DISPATCHER.chosen(form, hidden)


def _bytes_of_standard_up_to(given: int | str | None) -> int:
    try:
        return 0 if given is None else parse_bytes(given)
    except ValueError as error:
        raise ValueError(f"standard_up_to: {error}") from None


def _with_rows(
    options: Options, form: str, hidden: torch.Tensor, weight: torch.Tensor, max_bytes: int | str | None
) -> Options:
    """Fill in the rows of a chunk, if the caller gave none and the form makes chunks."""
    if options.rows_per_chunk is not None or form == "standard":
        return options
    if max_bytes is not None:
        return replace(options, rows_per_chunk=ChunkMemory.of(form, hidden, weight, options).rows_within(max_bytes))
    return replace(options, rows_per_chunk=usual_rows(hidden.shape[:-1].numel(), weight.shape[0]))
