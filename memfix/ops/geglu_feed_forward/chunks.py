"""The loop that the chunked forms share: it makes the wide tensors of a chunk at a time, and again in backward.

A form supplies the :class:`Activation` of a chunk. Everything else is here. In backward the first product of a chunk is
overwritten by its gradient, and the gradient of the activated values by those values: a chunk needs ``3*C*F`` elements,
whatever the activation. The products of kept tokens are in one buffer. Backward visits these tokens first, and then
reuses the buffer for the other chunks.
"""

# N tokens, D width, F hidden width, H rows of the first weight: 2F, or F without a gate; C tokens of a chunk, K tokens
# whose product is kept

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..derivatives import first_derivative_only
from ..products import as_rows, is_column_major, product_into, sum_dtype
from .arguments import ChunkOptions, FeedForwardTensors


class Activation(NamedTuple):
    """The functions that a form supplies: ``value * act(gate)`` of a chunk, and its backward.

    ``forward(product_CH, out_CF, activation)`` may overwrite the first columns of the product.
    ``backward(product_CH, gradient_CF, activation, wants_sums)`` replaces the product by its gradient, and the gradient
    of the activated values by those values. With ``wants_sums`` it returns the product's gradient summed over tokens.
    """

    forward: Callable[[torch.Tensor, torch.Tensor, str], None]
    backward: Callable[[torch.Tensor, torch.Tensor, str, bool], torch.Tensor | None]


@dataclass(frozen=True)
class Plan:
    """The choices of one call: its options, the dtype of the norm, and the number of tokens that keep their product."""

    options: ChunkOptions
    activation: Activation
    norm_dtype: torch.dtype
    tokens_kept: int


def chunked_feed_forward(tensors: FeedForwardTensors, options: ChunkOptions, activation: Activation) -> torch.Tensor:
    """Compute the layer chunk by chunk, with the activation of a form.

    Peak above inputs in a train step, ``e`` the item size and ``C = tokens_per_chunk``: the result and the gradient of
    ``hidden``, ``2*N*D*e``; ``3*C*F*e`` for a chunk, and ``2*C*D*e`` more with a norm; and the gradients of weights,
    which are summed in float32. ``tokens_kept`` tokens hold ``2*F*e`` bytes each from forward to backward; a chunk's
    ``2*C*F*e`` bytes are then a part of this memory.
    """
    tensors.require_rows_for(options.activation)
    norm_dtype, product_dtype = tensors.hidden.dtype, tensors.autocast_dtype
    if product_dtype is not None:
        # as torch does under autocast: products in the narrow dtype, a norm in float32
        norm_dtype = torch.float32
        tensors = tensors.cast(product_dtype, norm_dtype)
    # read requires_grad here: inside a Function grad mode is off, and requires_grad says nothing
    is_trained = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    num_tokens = tensors.hidden.shape[:-1].numel()
    kept = min(options.tokens_kept, num_tokens) if is_trained else 0
    result: torch.Tensor = _Chunked.apply(Plan(options, activation, norm_dtype, kept), *tensors)
    return result


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, *given: torch.Tensor | None) -> torch.Tensor:
        layer = _Layer(plan, FeedForwardTensors(*given))  # type: ignore[arg-type]
        with torch.autocast(layer.hidden_ND.device.type, enabled=False):
            result, kept_KH = layer.forward()
        ctx.save_for_backward(*given, kept_KH)
        ctx.plan, ctx.kept_is_valid = plan, kept_KH is not None
        return result

    @staticmethod
    @first_derivative_only("geglu_feed_forward")
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *given, kept_KH = ctx.saved_tensors
        layer = _Layer(ctx.plan, FeedForwardTensors(*given))
        wanted = FeedForwardTensors(*ctx.needs_input_grad[1:])
        kept_is_valid, ctx.kept_is_valid = ctx.kept_is_valid, False  # a second backward recomputes all products
        with torch.autocast(upstream.device.type, enabled=False):  # backward uses the dtypes of forward
            # .data: overwriting the kept products must not stop a second backward from unpacking the saved tensor
            kept = None if kept_KH is None else kept_KH.data
            return None, *_Backward(layer, wanted, kept, kept_is_valid).gradients(upstream)


class _Chunk(NamedTuple):
    tokens: slice
    kept: slice | None
    """The rows of the chunk's product among the kept products; None if it is not kept."""


class _Layer:
    """The tensors of a call, the chunks of its tokens, and the steps that forward and backward share."""

    def __init__(self, plan: Plan, tensors: FeedForwardTensors) -> None:
        self.plan, self.tensors = plan, tensors
        self.hidden_ND = as_rows(tensors.hidden)
        self.num_tokens, self.width = self.hidden_ND.shape
        self.tokens_per_chunk = min(plan.options.tokens_per_chunk, self.num_tokens)
        self.hidden_width = tensors.down_weight.shape[1]
        self.dtype = tensors.up_weight.dtype

    def chunks(self) -> list[_Chunk]:
        """Return the chunks in forward's order: those with a kept product last, so that backward visits them first."""
        size, num_made = self.tokens_per_chunk, self.num_tokens - self.plan.tokens_kept
        made = [slice(start, min(start + size, num_made)) for start in range(0, num_made, size)]
        kept = [slice(start, min(start + size, self.num_tokens)) for start in range(num_made, self.num_tokens, size)]
        return [
            *(_Chunk(tokens, None) for tokens in made),
            *(_Chunk(tokens, slice(tokens.start - num_made, tokens.stop - num_made)) for tokens in kept),
        ]

    def product_buffer(self, kept_KH: torch.Tensor | None) -> torch.Tensor:
        """Return a ``[C, H]`` buffer for products that are not kept: a part of ``kept_KH`` if this is large enough."""
        if kept_KH is not None and kept_KH.shape[0] >= self.tokens_per_chunk:
            return kept_KH[: self.tokens_per_chunk]
        return self.empty(self.tokens_per_chunk, self.tensors.up_weight.shape[0])

    def empty(self, *shape: int) -> torch.Tensor:
        return self.hidden_ND.new_empty(shape, dtype=self.dtype)

    def normed(self, hidden_CD: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the operand of the first product, and the mean and the inverse deviation of every token's norm."""
        if not self.tensors.has_norm:
            return hidden_CD.to(self.dtype), None
        normed_CD, *statistics = torch.native_layer_norm(
            hidden_CD.to(self.plan.norm_dtype),
            (self.width,),
            self.tensors.norm_weight,
            self.tensors.norm_bias,
            self.plan.options.norm_eps,
        )
        return normed_CD.to(self.dtype), statistics

    def make_product(self, product_CH: torch.Tensor, normed_CD: torch.Tensor) -> None:
        _linear_into(product_CH, normed_CD, self.tensors.up_weight, self.tensors.up_bias)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the result, and the products that are kept."""
        plan, tensors = self.plan, self.tensors
        options = plan.options
        dtype = torch.promote_types(self.dtype, tensors.hidden.dtype) if options.residual else self.dtype
        result = tensors.hidden.new_empty(tensors.hidden.shape, dtype=dtype)
        result_ND = as_rows(result)
        kept_KH = self.empty(plan.tokens_kept, tensors.up_weight.shape[0]) if plan.tokens_kept else None
        buffer_CH = self.product_buffer(kept_KH) if plan.tokens_kept < self.num_tokens else None
        activated_buffer_CF = self.empty(min(self.tokens_per_chunk, plan.tokens_kept), self.hidden_width)
        for tokens, kept in self.chunks():
            hidden_CD, result_CD = self.hidden_ND[tokens], result_ND[tokens]
            product_CH = _product_rows(hidden_CD, buffer_CH, kept_KH, kept)
            self.make_product(product_CH, self.normed(hidden_CD)[0])
            activated_CF = product_CH[:, : self.hidden_width] if kept is None else activated_buffer_CF[: len(hidden_CD)]
            plan.activation.forward(product_CH, activated_CF, options.activation)
            if not options.residual:
                _linear_into(result_CD, activated_CF, tensors.down_weight, tensors.down_bias)
                continue
            if tensors.down_bias is None:
                result_CD.copy_(hidden_CD)
            else:
                torch.add(hidden_CD, tensors.down_bias, out=result_CD)
            product_into(result_CD, activated_CF, tensors.down_weight.T, add=True)
        return result, kept_KH


class _Backward:
    """One pass over the chunks for the wanted gradients."""

    def __init__(
        self, layer: _Layer, wanted: FeedForwardTensors, kept_KH: torch.Tensor | None, kept_is_valid: bool
    ) -> None:
        self.layer, self.wanted, self.kept_KH, self.kept_is_valid = layer, wanted, kept_KH, kept_is_valid
        self.wants_normed = bool(wanted.hidden or wanted.norm_weight or wanted.norm_bias)
        self.wants_product = bool(self.wants_normed or wanted.up_weight or wanted.up_bias)
        self.grad_hidden_ND: torch.Tensor | None = None
        self.chunks = layer.chunks()[::-1]
        self.sums = {
            name: _Sum(parameter, len(self.chunks))
            for name, parameter in layer.tensors._asdict().items()
            if getattr(wanted, name) and name not in ("hidden", "down_bias")
        }

    def gradients(self, upstream: torch.Tensor) -> list[torch.Tensor | None]:
        """Return the gradients in the order of the tensors."""
        upstream_ND = as_rows(upstream)
        found = {}
        if self.wanted.down_bias:
            # before the buffers are allocated: on a GPU this sum needs a workspace
            found["down_bias"] = upstream_ND.sum(0, dtype=sum_dtype(upstream.dtype)).to(self.layer.dtype)
        if self.wanted.hidden or self.sums:
            self._visit_chunks(upstream_ND)
        found |= {name: total.finished() for name, total in self.sums.items()}
        if self.grad_hidden_ND is not None:
            found["hidden"] = self.grad_hidden_ND.view(self.layer.tensors.hidden.shape)
        return [found.get(name) for name in FeedForwardTensors._fields]

    def _visit_chunks(self, upstream_ND: torch.Tensor) -> None:
        """Fill the sums and the gradient of hidden. A function of its own frees the buffers before sums are rounded."""
        layer = self.layer
        self.grad_hidden_ND = layer.hidden_ND.new_empty(layer.hidden_ND.shape) if self.wanted.hidden else None
        buffer_CH = layer.product_buffer(self.kept_KH)
        gradient_CF = layer.empty(layer.tokens_per_chunk, layer.hidden_width)
        for tokens, kept in self.chunks:
            hidden_CD, upstream_CD = layer.hidden_ND[tokens], upstream_ND[tokens].to(layer.dtype).contiguous()
            kept = kept if self.kept_is_valid else None
            product_CH = _product_rows(hidden_CD, buffer_CH, self.kept_KH, kept)
            normed_CD, statistics = layer.normed(hidden_CD)
            if kept is None:
                layer.make_product(product_CH, normed_CD)
            activated_CF = self._activate(product_CH, gradient_CF[: len(hidden_CD)], upstream_CD)
            # from here on product_CH holds the gradient of the product
            if "down_weight" in self.sums:
                self.sums["down_weight"].add_product(upstream_CD.T, activated_CF)
            if "up_weight" in self.sums:
                self.sums["up_weight"].add_product(product_CH.T, normed_CD)
            if self.wants_normed:
                self._add_hidden(tokens, product_CH, normed_CD, statistics)
            if self.grad_hidden_ND is not None and layer.plan.options.residual:
                self.grad_hidden_ND[tokens].add_(upstream_ND[tokens])

    def _activate(self, product_CH: torch.Tensor, gradient_CF: torch.Tensor, upstream_CD: torch.Tensor) -> torch.Tensor:
        """Return the activated values; replace the product by its gradient if that is wanted."""
        activation, options = self.layer.plan.activation, self.layer.plan.options
        if not self.wants_product:
            activation.forward(product_CH, gradient_CF, options.activation)
            return gradient_CF
        product_into(gradient_CF, upstream_CD, self.layer.tensors.down_weight)
        sums_H = activation.backward(product_CH, gradient_CF, options.activation, "up_bias" in self.sums)
        if sums_H is not None:
            self.sums["up_bias"].add(sums_H)
        return gradient_CF

    def _add_hidden(self, tokens: slice, product_CH: torch.Tensor, normed_CD: torch.Tensor, statistics: Any) -> None:
        """Write the gradient of a chunk's hidden rows; add that of the norm's parameters. Overwrites ``normed_CD``."""
        layer, tensors = self.layer, self.layer.tensors
        if statistics is None:
            assert self.grad_hidden_ND is not None
            product_into(self.grad_hidden_ND[tokens], product_CH, tensors.up_weight)
            return
        product_into(normed_CD, product_CH, tensors.up_weight)
        norm_dtype = layer.plan.norm_dtype
        wanted = [bool(self.wanted.hidden), bool(self.wanted.norm_weight), bool(self.wanted.norm_bias)]
        grad_hidden_CD, grad_weight_D, grad_bias_D = torch.ops.aten.native_layer_norm_backward(
            normed_CD.to(norm_dtype),
            layer.hidden_ND[tokens].to(norm_dtype),
            [layer.width],
            *statistics,
            tensors.norm_weight,
            tensors.norm_bias,
            wanted,
        )
        if self.grad_hidden_ND is not None:
            self.grad_hidden_ND[tokens].copy_(grad_hidden_CD)
        for name, gradient_D in (("norm_weight", grad_weight_D), ("norm_bias", grad_bias_D)):
            if name in self.sums:
                self.sums[name].add(gradient_D)


class _Sum:
    """The gradient of a parameter, summed over the chunks: in float32 or wider if there are several chunks."""

    def __init__(self, parameter: torch.Tensor, num_chunks: int) -> None:
        self.dtype = parameter.dtype
        dtype = self.dtype if num_chunks == 1 else sum_dtype(self.dtype)
        self.total = torch.empty_like(parameter, dtype=dtype)
        self.is_empty = True

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add ``left @ right``, with the strides of the weight: autograd would copy a gradient with other strides."""
        total = self.total
        if is_column_major(total):
            total, left, right = total.T, right.T, left.T
        product_into(total, left, right, add=not self.is_empty)
        self.is_empty = False

    def add(self, gradient: torch.Tensor) -> None:
        if self.is_empty:
            self.total.copy_(gradient)
        else:
            self.total.add_(gradient)
        self.is_empty = False

    def finished(self) -> torch.Tensor:
        return self.total.to(self.dtype)


def _product_rows(
    hidden_CD: torch.Tensor, buffer_CH: torch.Tensor | None, kept_KH: torch.Tensor | None, kept: slice | None
) -> torch.Tensor:
    if kept is not None and kept_KH is not None:
        return kept_KH[kept]
    assert buffer_CH is not None
    return buffer_CH[: hidden_CD.shape[0]]


def _linear_into(
    out_CH: torch.Tensor, rows_CD: torch.Tensor, weight_HD: torch.Tensor, bias_H: torch.Tensor | None
) -> None:
    if bias_H is None:
        product_into(out_CH, rows_CD, weight_HD.T)
    else:
        torch.addmm(bias_H, rows_CD, weight_HD.T, out=out_CH)
