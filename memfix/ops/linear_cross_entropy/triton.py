"""The chunked loss by Triton kernels: one of them fuses the exponentials of the softmax into the matrix product.

On Hopper, the bfloat16 product itself turns its float32 sums into exponentials, relative to the logit of each token's
target: there is no pass over the logits, and no logit is rounded to 16 bits. The remaining factor per token is
multiplied into the ``[C, D]`` operand or result of the two other products. Everything else (float16 and float32, a
cap, smoothing, other GPUs) takes one kernel over float32 logits in memory.
"""

# C tokens of a chunk, R tokens of a tile of a chunk, D width, V vocabulary

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..alignment import ALIGNED_BYTES, has_aligned_rows, with_aligned_rows
from ..dispatch import is_interpreted, require_kernels
from ..launches import launch, next_power_of_two
from ..products import product_into
from .chunks import ChunkStrategy, Head, WeightSum, chunked_linear_cross_entropy, wide_weight_sum
from .logits_gradient import LogitsGradient
from .options import LossTensors, Options, loss_form
from .recompute import Tile, TiledPass
from .targets import Counted
from .terms import Coefficients, Sums


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of the kernels. The defaults were the fastest of those tried on an H200."""

    tokens: int = 128
    classes: int = 256
    depth: int = 64
    """The length of a step along the contracted axis of a matrix product."""
    scanned: int = 1024
    """Classes at a time in a pass over logits; eight times as many if the vocabulary exceeds ``many_classes``."""
    many_classes: int = 4096
    summed_tokens: int = 32
    summed_classes: int = 128
    target_tokens: int = 8
    target_width: int = 512
    scaled: int = 4096
    """Elements that a program multiplies by the upstream factor."""


TILES = Tiles()


@loss_form
def triton_linear_cross_entropy(tensors: LossTensors, options: Options) -> torch.Tensor:
    r"""Equals ``F.cross_entropy(hidden_ND @ weight_VD.T + bias_V, target_N)``.

    Peak above inputs in a bfloat16 train step, ``C = rows_per_chunk``: ``2*N*D + 2*V*D + 2*C*V + 6*C*D`` bytes and
    ``C*V/64 + V*D/64`` for sums and scales. Other dtypes take as much as in ``recompute``.
    """
    return chunked_linear_cross_entropy(tensors, options, KERNELS)


def _kernel_pass(head: Head, rows_per_chunk: int, wants_gradient: bool) -> ExponentialsPass | LogitsPass:
    """Make the pass that suits the classifier and the device."""
    require_kernels(head.weight_VD, instead="recompute")
    made = ExponentialsPass if ExponentialsPass.suits(head) else LogitsPass
    return made(head, rows_per_chunk, wants_gradient)


class LogitsPass(TiledPass):
    """A pass that makes a tile of float32 logits by a product, and its sums and gradient by one kernel."""

    keeps_slope = False

    def _visit_tile(self, tile: Tile) -> None:
        from .kernels import pass_over_logits

        hidden_RD, target_R, sums, coefficients, gradient_RV = tile
        head, options = self.head, self.head.options
        num_tokens = hidden_RD.shape[0]
        values_RV = self._logits_buffer(num_tokens, gradient_RV)
        product_into(values_RV, hidden_RD, self.weight_DV)
        is_large = head.vocabulary > TILES.many_classes
        at_once = _tokens_at_once(num_tokens)
        launch(
            pass_over_logits, (-(-num_tokens // at_once),),
            values_RV, values_RV.stride(0), head.bias_V, head.class_weight_V, target_R,
            sums.nll_K, sums.logsumexp_K, sums.smooth_K,
            *(vars(coefficients).values() if coefficients else (None,) * 4),
            gradient_RV, 0 if gradient_RV is None else gradient_RV.stride(0), num_tokens, head.vocabulary,
            HAS_BIAS=head.bias_V is not None, HAS_CLASS_WEIGHT=head.class_weight_V is not None,
            CAP=options.softcap or 0.0, INVERSE_TEMPERATURE=1 / options.temperature,
            HAS_LOGSUMEXP=sums.logsumexp_K is not None, SMOOTHS=sums.smooth_K is not None,
            HAS_COEFFICIENTS=coefficients is not None,
            HAS_SQUARE=coefficients is not None and coefficients.square_K is not None,
            STORES=gradient_RV is not None, TOKENS=at_once, CLASSES=TILES.scanned * (8 if is_large else 1),
            num_warps=16 if is_large else 4,
        )  # fmt: skip


class ExponentialsPass:
    """A pass whose one product per chunk stores exponentials. All chunks share buffers that are allocated once."""

    @staticmethod
    def suits(head: Head) -> bool:
        """Whether the head is bfloat16 with TMA-aligned rows and a plain softmax, on Hopper, later or interpreted."""
        weight_VD, options = head.weight_VD, head.options
        return (
            weight_VD.dtype == torch.bfloat16
            and (weight_VD.shape[1] * weight_VD.itemsize) % ALIGNED_BYTES == 0
            and options.is_plain_softmax
            and has_aligned_rows(weight_VD)
            and (is_interpreted() or torch.cuda.get_device_capability(weight_VD.device)[0] >= 9)
        )

    @staticmethod
    def bytes_of(rows_per_chunk: int, width: int, vocabulary: int) -> int:
        """Return the bytes of a train step's buffers, except for a few numbers per token."""
        num_parts = -(-vocabulary // TILES.classes)
        return rows_per_chunk * (2 * vocabulary + 2 * width + 4 * width + 4 * num_parts)

    def __init__(self, head: Head, rows_per_chunk: int, wants_gradient: bool) -> None:
        from . import kernels

        self.head, self.kernels = head, kernels
        weight_VD = head.weight_VD
        width = weight_VD.shape[1]
        self.num_parts = -(-head.vocabulary // TILES.classes)

        def floats(*shape: int) -> torch.Tensor:
            return weight_VD.new_empty(shape, dtype=torch.float32)

        self.parts_CP = floats(rows_per_chunk, self.num_parts)
        self.maximum_C = floats(rows_per_chunk).fill_(float("-inf"))  # filled for blocks with strays only
        self.weight_tiles = _tiles_of(weight_VD, TILES.classes, TILES.depth)
        self.wants_gradient, self.rows_per_chunk = wants_gradient, rows_per_chunk
        self.num_processors = _num_processors(weight_VD.device)
        self.buffers: list[torch.Tensor] = []
        if wants_gradient:
            # rows are padded so that TMA can write them, whatever the vocabulary
            aligned = -(-head.vocabulary * weight_VD.itemsize // ALIGNED_BYTES) * ALIGNED_BYTES // weight_VD.itemsize
            values_CV = weight_VD.new_empty((rows_per_chunk, aligned))[:, : head.vocabulary]
            self.scale_C = floats(rows_per_chunk)
            self.buffers = [values_CV, weight_VD.new_empty((rows_per_chunk, width)), floats(rows_per_chunk, width)]
            self._cut_buffers(rows_per_chunk)

    def _cut_buffers(self, num_tokens: int) -> None:
        """Slice the buffers to a chunk's rows and make their descriptors: once, and again for a shorter last chunk."""
        self.values_CV, self.scaled_hidden_CD, self.product_CD = (buffer[:num_tokens] for buffer in self.buffers)
        self.values_tiles = _tiles_of(self.values_CV, TILES.tokens, TILES.classes)
        self.weight_operands = (
            _tiles_of(self.values_CV, TILES.depth, TILES.tokens),
            _tiles_of(self.scaled_hidden_CD, TILES.depth, TILES.classes),
        )

    def begin(self, hidden_ND: torch.Tensor, counted: Counted, sums: Sums) -> None:
        """Compute the logits of all tokens' targets, stored where their losses will be."""
        head, rows_per_chunk = self.head, self.rows_per_chunk
        weight_VD, rows_K = head.weight_VD, counted.rows_K
        num_tokens, width = counted.number, weight_VD.shape[1]
        # flags of each chunk: whether it has strays, and which blocks of tokens have them; padded to 16 bytes
        num_flags = 4 * (-(-rows_per_chunk // TILES.tokens) // 4 + 1)
        strays = weight_VD.new_zeros((-(-num_tokens // rows_per_chunk), num_flags), dtype=torch.int32)
        self.strays = iter(strays.unbind())
        self.share_K = weight_VD.new_empty(num_tokens if self.wants_gradient else 0, dtype=torch.float32)
        self.shares = iter(self.share_K.split(rows_per_chunk) if self.wants_gradient else ())
        at_once = _tokens_at_once(num_tokens)
        launch(
            self.kernels.target_logits, (-(-num_tokens // at_once),), hidden_ND, *hidden_ND.stride(), rows_K,
            weight_VD, weight_VD.stride(0), head.bias_V, counted.target_K, sums.nll_K, strays,
            num_tokens, head.vocabulary, width, rows_per_chunk, num_flags, 1 / head.options.temperature,
            HAS_ROWS=rows_K is not None, HAS_BIAS=head.bias_V is not None,
            TOKENS=at_once, WIDTH=next_power_of_two(width), BLOCK=TILES.tokens,
        )  # fmt: skip

    def __call__(
        self, hidden_CD: torch.Tensor, target_C: torch.Tensor, sums: Sums, coefficients: Coefficients | None
    ) -> ExponentialsGradient | None:
        hidden_CD = with_aligned_rows(hidden_CD)
        if self.wants_gradient and hidden_CD.shape[0] != self.values_CV.shape[0]:
            self._cut_buffers(hidden_CD.shape[0])
        strays, share_C = next(self.strays), next(self.shares, None)
        tiles = _tiles_of(hidden_CD, TILES.tokens, TILES.depth)
        self._product(tiles, sums.nll_K, strays, STRAYS_ONLY=False, FINDS_MAXIMA=False)
        # without strays, known to the device only, these two kernels return at once: the host need not wait
        self._product(tiles, self.maximum_C, strays, STRAYS_ONLY=True, FINDS_MAXIMA=True)
        self._product(tiles, self.maximum_C, strays, STRAYS_ONLY=True, FINDS_MAXIMA=False)
        self._finish_tokens(hidden_CD, target_C, strays, share_C, sums, coefficients)
        return None if share_C is None else ExponentialsGradient(self, target_C, share_C)

    def _product(self, hidden_tiles: Any, reference_C: torch.Tensor, strays: torch.Tensor, **which: bool) -> None:
        head, programs = self.head, self.num_processors
        num_tokens, width = hidden_tiles.shape
        launch(
            self.kernels.exponentials, (programs,), hidden_tiles, self.weight_tiles,
            self.values_tiles if self.wants_gradient else hidden_tiles, head.bias_V, reference_C, self.parts_CP, strays,
            num_tokens, head.vocabulary, width, self.num_parts, 1 / head.options.temperature,
            PROGRAMS=programs, TOKENS=TILES.tokens, CLASSES=TILES.classes, DEPTH=TILES.depth,
            HAS_BIAS=head.bias_V is not None, STORES=self.wants_gradient, num_warps=8, num_stages=3, **which,
        )  # fmt: skip

    def _finish_tokens(
        self,
        hidden_CD: torch.Tensor,
        target_C: torch.Tensor,
        strays: torch.Tensor,
        share_C: torch.Tensor | None,
        sums: Sums,
        coefficients: Coefficients | None,
    ) -> None:
        stores = self.wants_gradient
        num_tokens, width = hidden_CD.shape
        at_once = _tokens_at_once(num_tokens)
        launch(
            self.kernels.finish_tokens, (-(-num_tokens // at_once),),
            *((self.values_CV, self.values_CV.stride(0)) if stores else (None, 0)), self.parts_CP, self.num_parts,
            self.maximum_C, strays, target_C, sums.nll_K, sums.logsumexp_K,
            *((coefficients.softmax_K, coefficients.target_K, coefficients.square_K) if coefficients else (None,) * 3),
            self.scale_C if stores else None, share_C, hidden_CD, hidden_CD.stride(0),
            self.scaled_hidden_CD if stores else None, num_tokens, width,
            HAS_LOGSUMEXP=sums.logsumexp_K is not None, HAS_COEFFICIENTS=coefficients is not None,
            HAS_SQUARE=coefficients is not None and coefficients.square_K is not None, STORES=stores,
            TOKENS=at_once, PARTS=next_power_of_two(self.num_parts), WIDTH=next_power_of_two(width), BLOCK=TILES.tokens,
        )  # fmt: skip


class ExponentialsGradient:
    """``scale * values - share [v = t]``, never made in full: ``scale`` and ``share`` are applied to the products."""

    def __init__(self, made_by: ExponentialsPass, target_C: torch.Tensor, share_C: torch.Tensor) -> None:
        self.made_by, self.target_C, self.share_C = made_by, target_C, share_C

    def into_hidden(self, out_CD: torch.Tensor, *, alpha: float) -> None:
        made_by = self.made_by
        num_tokens, width = out_CD.shape
        weight_VD = made_by.head.weight_VD
        product_into(made_by.product_CD, made_by.values_CV, weight_VD)
        at_once = _tokens_at_once(num_tokens)
        launch(
            made_by.kernels.finish_hidden, (-(-num_tokens // at_once),),
            made_by.product_CD, made_by.scale_C, self.share_C, self.target_C, weight_VD, weight_VD.stride(0),
            out_CD, out_CD.stride(0), num_tokens, width, alpha, TOKENS=at_once, WIDTH=next_power_of_two(width),
        )  # fmt: skip

    def summed(self) -> torch.Tensor:
        """Return the sum over the tokens: the gradient of the bias."""
        made_by, values_CV = self.made_by, self.made_by.values_CV
        num_tokens, vocabulary = values_CV.shape
        sums_V = made_by.scale_C.new_empty(vocabulary)
        launch(
            made_by.kernels.column_sums, (-(-vocabulary // TILES.summed_classes),),
            values_CV, values_CV.stride(0), made_by.scale_C, sums_V, num_tokens, vocabulary,
            TOKENS=TILES.summed_tokens, CLASSES=TILES.summed_classes,
        )  # fmt: skip
        return sums_V.index_add_(0, self.target_C, self.share_C, alpha=-1)


class ExponentialsWeightSum:
    """The sum of ``G^T X`` over the chunks, from exponentials; the rows of the targets are subtracted at the end.

    A bfloat16 gradient is summed in its own memory, but with more significant bits than bfloat16 has. A wider gradient,
    such as that of a float32 weight under autocast, is summed in its own dtype. With one chunk there is no sum: torch's
    product is faster.
    """

    def __init__(self, weight_VD: torch.Tensor, hidden_ND: torch.Tensor, counted: Counted, num_chunks: int) -> None:
        self.hidden_ND, self.counted, self.chunks_left = hidden_ND, counted, num_chunks
        self.out_VD = weight_VD.new_empty(weight_VD.shape)
        self.has_sum, self.alpha = False, 1.0
        vocabulary, width = weight_VD.shape
        self.is_summed_by_kernel = weight_VD.dtype == torch.bfloat16 and num_chunks > 1
        if self.is_summed_by_kernel:
            self.num_parts = -(-width // TILES.classes)
            self.scales_VP = weight_VD.new_empty((vocabulary, self.num_parts), dtype=torch.float32)
            tile = (TILES.tokens, TILES.classes // 2)
            self.tiles = (_tiles_of(self.out_VD.view(torch.float16), *tile), _tiles_of(self.out_VD, *tile))

    def add(self, gradient: LogitsGradient, hidden_CD: torch.Tensor, alpha: float) -> None:
        assert isinstance(gradient, ExponentialsGradient)
        made_by = gradient.made_by
        if self.is_summed_by_kernel:
            self._launch(made_by, alpha)
        else:
            product_into(self.out_VD, made_by.values_CV.T, made_by.scaled_hidden_CD, alpha=alpha, add=self.has_sum)
        self.has_sum, self.alpha, self.share_K = True, alpha, made_by.share_K
        self.chunks_left -= 1

    def _launch(self, made_by: ExponentialsPass, alpha: float) -> None:
        programs = made_by.num_processors
        launch(
            made_by.kernels.add_to_weight, (programs,), *made_by.weight_operands, *self.tiles,
            self.scales_VP, made_by.values_CV.shape[0], *self.out_VD.shape, self.num_parts, alpha,
            PROGRAMS=programs, CLASSES=TILES.tokens, WIDTH=TILES.classes, DEPTH=TILES.depth,
            IS_FIRST=not self.has_sum, IS_LAST=self.chunks_left == 1, num_warps=8, num_stages=3,
        )  # fmt: skip

    def finished(self, scale: torch.Tensor | None = None) -> torch.Tensor:
        from .kernels import subtract_targets

        if not self.has_sum:
            return self.out_VD.zero_()
        sorted_target_K, order_K = self.counted.target_K.int().sort(stable=True)  # half the radix passes of int64
        rows_K = self.counted.rows_K
        width = self.out_VD.shape[1]
        block = min(next_power_of_two(width), TILES.target_width)
        launch(
            subtract_targets, (order_K.shape[0], -(-width // block)),
            sorted_target_K, order_K if rows_K is None else rows_K.index_select(0, order_K),
            self.share_K.index_select(0, order_K), self.hidden_ND, *self.hidden_ND.stride(), self.out_VD,
            order_K.shape[0], width, self.alpha, TOKENS=TILES.target_tokens, WIDTH=block,
        )  # fmt: skip
        return self.out_VD if scale is None else self.out_VD.mul_(scale)


def _weight_sum(
    head: Head,
    weight_VD: torch.Tensor,
    hidden_ND: torch.Tensor,
    counted: Counted,
    num_chunks: int,
    is_deferred: bool,
) -> WeightSum:
    if ExponentialsPass.suits(head):
        return ExponentialsWeightSum(weight_VD, hidden_ND, counted, num_chunks)
    return wide_weight_sum(head, weight_VD, hidden_ND, counted, num_chunks, is_deferred)


def scale_in_place(tensor: torch.Tensor, factor: torch.Tensor) -> None:
    from . import kernels

    num_elements = tensor.numel()
    launch(
        kernels.scale_in_place, (-(-num_elements // TILES.scaled),), tensor, factor, num_elements, ELEMENTS=TILES.scaled
    )


KERNELS = ChunkStrategy(_kernel_pass, _weight_sum, scale_in_place)


def _tiles_of(tensor: torch.Tensor, rows: int, columns: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns])


def _num_processors(device: torch.device) -> int:
    return 4 if is_interpreted() else torch.cuda.get_device_properties(device).multi_processor_count


def _tokens_at_once(num_tokens: int) -> int:
    """Return the tokens per program: 1, or all in the interpreter, where a program's overhead exceeds its work."""
    return next_power_of_two(num_tokens) if is_interpreted() else 1
