"""The loop that the chunked forms share: it makes a chunk of logits at a time and uses its gradient before the next.

A form supplies the pass over a chunk (:class:`ChunkPass`), which turns hidden rows into the tokens' sums and the
gradient of their logits. The rest is here: tokens whose target is ignored are dropped before any product, ``dX = G W``,
``dW = G^T X`` and ``dbias = sum G`` are computed right after each chunk, and no tensor of size ``[N, V]`` ever exists.
For ``mean`` and ``sum`` the forward computes the gradients, and backward only scales and returns them. For ``none`` the
upstream gradient differs by token and must be folded in before the sum over tokens: backward visits the chunks again.
"""

# N tokens, K tokens that count, D width, V vocabulary, C tokens of a chunk

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..derivatives import first_derivative_only
from ..products import sum_dtype
from .hidden_rows import HiddenRows
from .logits_gradient import LogitsGradient
from .narrowing import WeightGradient
from .options import LossTensors, Options
from .targets import Counted, start_counting
from .terms import Coefficients, Sums, reduced_loss

OP = "linear_cross_entropy"


@dataclass(frozen=True)
class Head:
    """The classifier as a pass sees it: the weight in the dtype of the products; bias and class weights contiguous, in
    the dtype of sums.
    """

    weight_VD: torch.Tensor
    bias_V: torch.Tensor | None
    class_weight_V: torch.Tensor | None
    options: Options

    @staticmethod
    def of(tensors: LossTensors, plan: Plan) -> Head:
        wide = sum_dtype(plan.product_dtype)
        return Head(
            tensors.weight_VD.to(plan.product_dtype),
            None if tensors.bias_V is None else tensors.bias_V.to(wide).contiguous(),
            None if tensors.class_weight_V is None else tensors.class_weight_V.to(wide).contiguous(),
            plan.options,
        )

    @property
    def vocabulary(self) -> int:
        return self.weight_VD.shape[0]


class ChunkPass(Protocol):
    """The pass from the hidden rows of a chunk to the sums of its tokens and the gradient of their logits."""

    def begin(self, hidden_ND: torch.Tensor, counted: Counted, sums: Sums) -> None:
        """Prepare for the chunks, which follow in order. ``sums`` has the places of all tokens that count.

        The targets are not yet checked to be in range.
        """

    def __call__(
        self, hidden_CD: torch.Tensor, target_C: torch.Tensor, sums: Sums, coefficients: Coefficients | None
    ) -> LogitsGradient | None:
        """Write ``sums``; return the gradient of the logits before cap and temperature, or None if the pass was made
        with ``wants_gradient=False``.

        The logits are ``hidden @ weight.T + bias``, then capped, then divided by the temperature. The gradient is
        given by ``Coefficients``, or is ``p_v - [v = t]`` if they are None, times the slope of the cap. The products
        that follow divide it by the temperature and by the number of tokens, in float32.
        """


class WeightSum(Protocol):
    """The gradient of the weight, summed over the chunks."""

    def add(self, gradient: LogitsGradient, hidden_CD: torch.Tensor, alpha: float) -> None:
        """Add ``alpha * G^T X`` of the next chunk, where ``G`` is the gradient that the pass returned."""

    def finished(self, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Return the gradient in the weight's dtype, times ``scale`` (one element). To be called once."""


MakePass = Callable[[Head, int, bool], ChunkPass]
"""``make(head, rows_per_chunk, wants_gradient)`` allocates the buffers that all chunks share."""
MakeWeightSum = Callable[[Head, torch.Tensor, torch.Tensor, Counted, int, bool], WeightSum]
"""``make(head, weight, hidden, counted, num_chunks, is_deferred)``; deferred: backward will pass a scale."""
Scale = Callable[[torch.Tensor, torch.Tensor], None]
"""``scale_(tensor, factor)`` multiplies in place; ``factor`` is one float32 (float64) element on the device."""


def multiply_in_place(tensor: torch.Tensor, factor: torch.Tensor) -> None:
    # a factor of shape [1]: torch would round a 0-d factor to the tensor's dtype first
    tensor.mul_(factor.reshape(1))


def wide_weight_sum(
    head: Head,
    weight_VD: torch.Tensor,
    hidden_ND: torch.Tensor,
    counted: Counted,
    num_chunks: int,
    is_deferred: bool,
) -> WeightSum:
    """Make a sum in float32 or wider, for the gradient of any pass."""
    return WeightGradient(weight_VD, in_one_product=num_chunks <= 1 and not is_deferred)


@dataclass(frozen=True)
class ChunkStrategy:
    """What a form supplies to the loop. Its weight sum may rely on what its pass returns."""

    make_pass: MakePass
    make_weight_sum: MakeWeightSum = wide_weight_sum
    scale_: Scale = multiply_in_place


@dataclass(frozen=True)
class Plan:
    """The choices of one call. ``wanted``: whether hidden, weight and bias need a gradient. ``num_classes``: the size
    of the whole vocabulary, of which the weight may be one shard.
    """

    options: Options
    rows_per_chunk: int
    strategy: ChunkStrategy
    product_dtype: torch.dtype
    loss_dtype: torch.dtype
    wanted: tuple[bool, bool, bool]
    num_classes: int


def chunked_linear_cross_entropy(
    tensors: LossTensors,
    options: Options,
    strategy: ChunkStrategy,
    *,
    num_classes: int | None = None,
    loss_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute the loss chunk by chunk, with the strategy of a form.

    Peak above inputs in a train step, ``e`` the item size: ``N*D*e`` for the gradient of hidden, ``V*D*4`` for that
    of the weight where it is summed over chunks in float32 (``V*D*e`` for one chunk), and the buffers of the pass. If
    some targets are ignored, ``C*D*e`` for the rows of a chunk. Afterwards the two gradients are held, each in its
    own dtype; a float16 gradient of the weight stays float32 until backward, whose upstream gradient may be the loss
    scale that lifts it into float16's range.
    """
    hidden_ND = tensors.hidden_ND
    # as torch does under autocast: the product in the narrow dtype, the loss in float32
    narrow_dtype = tensors.autocast_dtype
    naives_dtype = hidden_ND.dtype if narrow_dtype is None else torch.float32
    # read requires_grad here: inside a Function grad mode is off, and requires_grad says nothing
    differentiated = (hidden_ND, tensors.weight_VD, tensors.bias_V)
    wanted = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in differentiated)
    plan = Plan(
        options,
        options.rows_of(hidden_ND.shape[0]),
        strategy,
        narrow_dtype or hidden_ND.dtype,
        loss_dtype or naives_dtype,
        (wanted[0], wanted[1], wanted[2]),
        tensors.vocabulary if num_classes is None else num_classes,
    )
    function = _PerToken if options.reduction == "none" else _Reduced
    return function.apply(*tensors, plan)


class _Reduced(torch.autograd.Function):
    """The loss for ``mean`` and ``sum``: the forward computes the gradients, up to the upstream factor."""

    @staticmethod
    def forward(ctx: Any, *tensors_and_plan: Any) -> torch.Tensor:
        *tensors, plan = tensors_and_plan
        with torch.autocast(tensors[0].device.type, enabled=False):
            loop = _chunk_loop(LossTensors(*tensors), plan, None, plan.wanted, defers=True)
            ctx.gradients = loop.all_chunks()
            ctx.scale_ = plan.strategy.scale_
            return loop.loss()

    @staticmethod
    @first_derivative_only(OP)
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                f"{OP} gave its gradient away in the first backward; call it again for another one, or take "
                "form='checkpoint', whose backward may be run as often as wanted"
            )
        # drop our references: autograd then owns the gradients, and a leaf accumulates them without a copy
        gradients, ctx.gradients = ctx.gradients, None
        return _by_tensor(gradients.scaled(upstream, ctx.scale_))


class _PerToken(torch.autograd.Function):
    """The loss without reduction: backward visits the chunks again, weighted by the upstream gradient."""

    @staticmethod
    def forward(ctx: Any, *tensors_and_plan: Any) -> torch.Tensor:
        *tensors, plan = tensors_and_plan
        with torch.autocast(tensors[0].device.type, enabled=False):
            loop = _chunk_loop(LossTensors(*tensors), plan, None, (False, False, False), defers=False)
            loop.all_chunks()
            loss_K = loop.loss()
            ctx.save_for_backward(*tensors)
            ctx.plan = plan
            num_tokens, rows_K = loop.tensors.target_N.shape[0], loop.counted.rows_K
            return loss_K if rows_K is None else loss_K.new_zeros(num_tokens).index_copy_(0, rows_K, loss_K)

    @staticmethod
    @first_derivative_only(OP)
    def backward(ctx: Any, upstream_N: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, _, bias, _, _ = ctx.needs_input_grad
        with torch.autocast(upstream_N.device.type, enabled=False):
            loop = _chunk_loop(
                LossTensors(*ctx.saved_tensors), ctx.plan, upstream_N, (hidden, weight, bias), defers=False
            )
            return _by_tensor(loop.all_chunks().scaled(None, ctx.plan.strategy.scale_))


def _by_tensor(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients in the order of forward's arguments: the five tensors and the plan."""
    grad_hidden_ND, grad_weight_VD, grad_bias_V = gradients
    return grad_hidden_ND, grad_weight_VD, None, grad_bias_V, None, None


@dataclass
class _Gradients:
    """The wanted gradients of hidden, weight and bias; float16 gradients have yet to be multiplied by ``pending``.

    That of the weight is ``weight_sum`` until it has been rounded to ``weight_VD``.
    """

    hidden_ND: torch.Tensor | None
    weight_VD: torch.Tensor | None
    weight_sum: WeightSum | None
    bias_V: torch.Tensor | None
    bias_dtype: torch.dtype | None
    pending: float

    @property
    def are_wanted(self) -> bool:
        return not (self.hidden_ND is None and self.weight_sum is None and self.bias_V is None)

    def scaled(self, upstream: torch.Tensor | None, scale_: Scale) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients, times ``upstream``, in the dtypes of their tensors, and drop the references to them."""
        hidden_ND, weight_VD, weight_sum, bias_V = self.hidden_ND, self.weight_VD, self.weight_sum, self.bias_V
        self.hidden_ND = self.weight_VD = self.weight_sum = self.bias_V = None
        factor = None
        if upstream is not None:
            factor = upstream.to(sum_dtype(upstream.dtype)).reshape(1)
            if hidden_ND is not None:
                is_pending = hidden_ND.dtype == torch.float16 and self.pending != 1
                scale_(hidden_ND, factor * self.pending if is_pending else factor)
            if weight_VD is not None:
                scale_(weight_VD, factor)
            if bias_V is not None:
                bias_V.mul_(factor)
        bias_V = None if bias_V is None or self.bias_dtype is None else bias_V.to(self.bias_dtype)
        if weight_sum is not None:
            weight_VD = weight_sum.finished(None if factor is None else factor * self.pending)
        return hidden_ND, weight_VD, bias_V


def _chunk_loop(
    tensors: LossTensors,
    plan: Plan,
    upstream_N: torch.Tensor | None,
    wanted: tuple[bool, bool, bool],
    *,
    defers: bool,
) -> _ChunkLoop:
    """Return the loop over the tokens that count. While a GPU counts them, one over all tokens is prepared, because
    usually all count: the GPU is then idle only until the first product is launched.
    """
    target_N = tensors.target_N
    wait_for_count = start_counting(target_N, plan.num_classes, plan.options.ignore_index)
    head = Head.of(tensors, plan)
    loop = None
    # class weights are indexed by targets, which may still be out of range
    if _is_worth_a_guess(target_N, plan.product_dtype) and tensors.class_weight_V is None:
        loop = _ChunkLoop(tensors, plan, head, Counted(target_N.contiguous(), None), upstream_N, wanted, defers)
    counted = wait_for_count()
    del wait_for_count  # frees the counts that it holds
    if loop is None or counted.rows_K is not None:
        loop = None  # free its buffers before the next loop allocates its own
        loop = _ChunkLoop(tensors, plan, head, counted, upstream_N, wanted, defers)
    return loop


def _is_worth_a_guess(target_N: torch.Tensor, product_dtype: torch.dtype) -> bool:
    """Whether to prepare before the count: where the host waits for a GPU and products are short (16-bit)."""
    return target_N.is_cuda and product_dtype.itemsize == 2


class _ChunkLoop:
    """One loop over the chunks, and the state that the chunks share.

    ``defers``: backward will pass an upstream factor. float16 gradients are divided by N only then, since 1/N in
    float16 would lose its digits before the loss scale could lift it.
    """

    def __init__(
        self,
        tensors: LossTensors,
        plan: Plan,
        head: Head,
        counted: Counted,
        upstream_N: torch.Tensor | None,
        wanted: tuple[bool, bool, bool],
        defers: bool,
    ) -> None:
        self.tensors, self.plan, self.head, self.counted, self.defers = tensors, plan, head, counted, defers
        self.sums = Sums.empty(plan.options, counted.number, tensors.hidden_ND.device, sum_dtype(plan.product_dtype))
        weights_V = head.class_weight_V
        self.target_weight_K = None if weights_V is None else weights_V.index_select(0, counted.target_K)
        self.common = plan.options.common_factor(counted.number)
        coefficients = self._coefficients(upstream_N) if any(wanted) else None
        rows_per_chunk = min(plan.rows_per_chunk, counted.number)
        num_chunks = -(-counted.number // max(rows_per_chunk, 1))
        self.gradients = self._gradients(wanted, num_chunks)
        self.chunks = self._chunks(rows_per_chunk, coefficients) if num_chunks else None

    def loss(self) -> torch.Tensor:
        """Return the loss, once the chunks have filled the sums."""
        plan = self.plan
        return reduced_loss(plan.options, self.sums, self.target_weight_K, plan.num_classes).to(plan.loss_dtype)

    def all_chunks(self) -> _Gradients:
        """Fill the sums and return the wanted gradients. To be called once."""
        self._walk()
        gradients = self.gradients
        waits = self.defers and self.tensors.weight_VD.dtype == torch.float16
        if self.counted.number and not waits and gradients.weight_sum is not None:
            gradients.weight_VD, gradients.weight_sum = gradients.weight_sum.finished(), None
        return gradients

    def _walk(self) -> None:
        """Visit all chunks. A function of its own, so that their buffers are freed before the float32 sum becomes a
        16-bit gradient.
        """
        chunks, self.chunks = self.chunks, None
        if chunks is None:
            return
        for chunk, target_C, sums, coefficients in chunks.parts:
            hidden_CD = chunks.hidden_rows.gather(chunk)
            gradient = chunks.chunk_pass(hidden_CD, target_C, sums, coefficients)
            if gradient is not None:
                self._accumulate(gradient, hidden_CD, chunks.hidden_rows, chunk)

    def _chunks(self, rows_per_chunk: int, coefficients: Coefficients | None) -> _Chunks:
        counted, number, hidden_ND = self.counted, self.counted.number, self.tensors.hidden_ND
        chunk_pass = self.plan.strategy.make_pass(self.head, rows_per_chunk, self.gradients.are_wanted)
        hidden_rows = HiddenRows(hidden_ND, counted.rows_K, rows_per_chunk, self.plan.product_dtype)
        chunk_pass.begin(hidden_ND, counted, self.sums)
        chunks = [slice(i, min(i + rows_per_chunk, number)) for i in range(0, number, rows_per_chunk)]
        weights = len(chunks) * [None] if coefficients is None else coefficients.split(rows_per_chunk)
        targets, sums = counted.target_K.split(rows_per_chunk), self.sums.split(rows_per_chunk)
        return _Chunks(chunk_pass, hidden_rows, list(zip(chunks, targets, sums, weights, strict=True)))

    def _coefficients(self, upstream_N: torch.Tensor | None) -> Coefficients | None:
        rows_K = self.counted.rows_K
        upstream_K = upstream_N if upstream_N is None or rows_K is None else upstream_N.index_select(0, rows_K)
        head = self.head
        options, num_classes = self.plan.options, self.plan.num_classes
        return Coefficients.of(
            options, head.class_weight_V, self.target_weight_K, num_classes, upstream_K, self.sums.nll_K
        )

    def _gradients(self, wanted: tuple[bool, bool, bool], num_chunks: int) -> _Gradients:
        wants_hidden, wants_weight, wants_bias = wanted
        bias_dtype = None if self.tensors.bias_V is None else self.tensors.bias_V.dtype
        all_rows_come = num_chunks and self.counted.rows_K is None
        make = self.tensors.hidden_ND.new_empty if all_rows_come else self.tensors.hidden_ND.new_zeros
        hidden_ND = make(self.tensors.hidden_ND.shape) if wants_hidden else None
        is_deferred = self.defers and self.tensors.weight_VD.dtype == torch.float16
        weight_sum = None
        if wants_weight:
            weight_sum = self.plan.strategy.make_weight_sum(
                self.head, self.tensors.weight_VD, self.tensors.hidden_ND, self.counted, num_chunks, is_deferred
            )
        bias_V = self.sums.nll_K.new_zeros(self.head.vocabulary) if wants_bias else None
        return _Gradients(hidden_ND, None, weight_sum, bias_V, bias_dtype, self.common if self.defers else 1.0)

    def _accumulate(
        self,
        gradient: LogitsGradient,
        hidden_CD: torch.Tensor,
        hidden_rows: HiddenRows,
        chunk: slice,
    ) -> None:
        """Add the gradient of this chunk's logits to the gradients of weight and bias; write that of hidden."""
        gradients, temperature = self.gradients, self.plan.options.temperature

        def alpha(dtype: torch.dtype) -> float:
            return (1.0 if self.defers and dtype == torch.float16 else self.common) / temperature

        if gradients.weight_sum is not None:
            gradients.weight_sum.add(gradient, hidden_CD, alpha(self.tensors.weight_VD.dtype))
        if gradients.bias_V is not None:
            gradients.bias_V.add_(gradient.summed(), alpha=self.common / temperature)
        if gradients.hidden_ND is not None:
            rows_CD = hidden_rows.gradient_buffer(gradients.hidden_ND, chunk)
            gradient.into_hidden(rows_CD, alpha=alpha(self.tensors.hidden_ND.dtype))
            hidden_rows.put_back(rows_CD, gradients.hidden_ND, chunk)


@dataclass(frozen=True)
class _Chunks:
    """The pass and hidden rows that the chunks share, and each chunk's slice, targets, sums and coefficients."""

    chunk_pass: ChunkPass
    hidden_rows: HiddenRows
    parts: list[tuple[slice, torch.Tensor, Sums, Coefficients | None]]
