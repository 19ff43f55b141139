"""The gradient of the weight, summed in float32 and rounded to 16 bits without both copies being alive at once."""

# V vocabulary, D width, H rows of the first half of the vocabulary, C tokens of a chunk

from __future__ import annotations

import torch

from ..products import sum_dtype
from .logits_gradient import DenseGradient, LogitsGradient

_FIRST_ELEMENTS = 1 << 20  # elements narrowed through a copy; later elements do not overlap their destination


class WeightGradient:
    """The sum of ``G^T X`` over the chunks, and then the gradient in the weight's dtype.

    A 16-bit gradient over several chunks is summed in two float32 buffers, one for each half of the vocabulary. Each
    has the bytes of the whole gradient in 16 bits: the result is written into the first, and the second is freed.
    If one product makes the whole gradient, or the weight has the dtype of sums, there is one buffer: the result.
    """

    def __init__(self, weight_VD: torch.Tensor, *, in_one_product: bool) -> None:
        self.dtype = weight_VD.dtype
        self.shape = weight_VD.shape
        self.is_empty = True
        wide = sum_dtype(self.dtype)
        self.is_summed_wider = self.dtype != wide and not in_one_product
        num_rows = self.shape[0]
        half = -(-num_rows // 2)
        sizes = [half, num_rows - half] if self.is_summed_wider else [num_rows]
        kept_as = wide if self.is_summed_wider else self.dtype
        self.parts = [weight_VD.new_empty((size, self.shape[1]), dtype=kept_as) for size in sizes]

    def add(self, gradient: LogitsGradient, hidden_CD: torch.Tensor, alpha: float) -> None:
        assert isinstance(gradient, DenseGradient)
        start = 0
        for part in self.parts:
            classes = slice(start, start + part.shape[0])
            gradient.into_weight(part, classes, hidden_CD, alpha=alpha, add=not self.is_empty)
            start += part.shape[0]
        self.is_empty = False

    def finished(self, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Return the gradient, times ``scale`` (one element) before it is rounded. This consumes the sums."""
        if self.is_empty:
            for part in self.parts:
                part.zero_()
        if not self.is_summed_wider:
            (whole_VD,) = self.parts
            return whole_VD if scale is None else whole_VD.mul_(scale)
        first_HD, rest_HD = self.parts
        self.parts = []
        narrow = first_HD.view(-1).view(self.dtype)
        _narrow_in_place(first_HD.view(-1), narrow, scale)
        _narrow(rest_HD.view(-1), narrow[first_HD.numel() : first_HD.numel() + rest_HD.numel()], scale)
        return narrow[: self.shape.numel()].view(self.shape)


def _narrow_in_place(wide: torch.Tensor, narrow: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Round in place: element ``i`` moves from byte ``4i`` to ``2i``, so ``a`` to ``2a`` overwrite earlier elements."""
    end = min(_FIRST_ELEMENTS, wide.numel())
    copy = torch.empty_like(narrow[:end])
    _narrow(wide[:end], copy, scale)
    narrow[:end].copy_(copy)
    while end < wide.numel():
        start, end = end, min(2 * end, wide.numel())
        _narrow(wide[start:end], narrow[start:end], scale)


def _narrow(wide: torch.Tensor, narrow: torch.Tensor, scale: torch.Tensor | None) -> None:
    if scale is None:
        narrow.copy_(wide)
    else:
        torch.mul(wide, scale, out=narrow)
