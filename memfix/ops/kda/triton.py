"""The chunked WY form on a GPU: two kernels forward, four in a backward that recomputes.

Forward prepares all chunks in parallel and then scans from chunk to chunk, a block of the state's values per program.
Backward prepares again, scans in both directions to store each chunk's first state and the gradient of its last, and
then computes the gradients inside all chunks in parallel. Only the inputs are held between the passes.
"""

# B batch, T tokens, H heads, K key width, V value width, S sequences, N chunks of all sequences, C tokens of a chunk,
# P parts of a sum, G segments of a sequence but the last

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..derivatives import first_derivative_only
from ..dispatch import require_kernels
from ..launches import launch, next_power_of_two, num_tiles
from .arguments import KdaOptions, KdaTensors, Outputs, Span, kda_form, scale_of
from .wy import wy_kda

TOKENS_PER_CHUNK = 32
"""Longer chunks would save states in backward and steps of the scan, but need products of 64 rows: see
``memfix.ops.kernels.product``."""
WIDEST = 256


@dataclass(frozen=True)
class Tiles:
    """The tile of a kernel: its channels and values, masked where tensors are narrower; loads in flight; warps.

    The sizes below were the fastest of those tried on an H200.
    """

    k: int
    v: int
    stages: int
    warps: int


PREPARE = Tiles(k=32, v=32, stages=2, warps=2)
SCAN = Tiles(k=16, v=32, stages=3, warps=4)  # a scan's tile has all channels; k is the least width of the tile
THERE_AND_BACK = Tiles(k=16, v=32, stages=2, warps=4)
PAIRS = Tiles(k=64, v=64, stages=2, warps=2)
CHANNELS = Tiles(k=64, v=64, stages=2, warps=4)


@kda_form
def triton_kda(tensors: KdaTensors, options: KdaOptions) -> Outputs:
    """Equals naive, without transition matrices; reading and writing the inputs is a fair part of its time.

    Peak above inputs in a train step, ``e`` the item size and ``R = B*T*H`` rows: ``R*(3*K + 4*V)*e`` for gradients
    and chunk terms, and ``R*K*V*e/16`` for the states of chunks. Only inputs are held between the passes. Products
    have operands of the working dtype and float32 sums. Chunks have 32 tokens, whatever ``chunk_size`` says. float64
    inputs, and keys wider than 256, use the form ``wy``.
    """
    q_BTHK = tensors.q_BTHK
    if q_BTHK.dtype == torch.float64 or q_BTHK.shape[-1] > WIDEST:
        return wy_kda(*tensors.inputs, tensors.initial_state_SHKV, tensors.cu_seqlens, **vars(options))
    require_kernels(q_BTHK, instead="wy")
    return kda_by(_PASSES, tensors, options)


@dataclass(frozen=True)
class Passes:
    """The launches in which the forms ``triton`` and ``cuda`` differ; they share the rest."""

    prepare: Callable[[tuple[torch.Tensor, ...], Terms, Chunks, float], None]
    scan: Callable[[Terms, Chunks, torch.Tensor | None, torch.Tensor, torch.Tensor], torch.Tensor | None]
    """Returns the states between segments, from which a backward pass may start, or None."""
    there_and_back: Callable[[Terms, Chunks, Walk], None]
    gradients: Callable[[tuple[torch.Tensor, ...], Chunks, Walk, Kept, float], tuple[torch.Tensor, ...]]
    """Returns the gradients of q, k, v, g and beta."""
    bounds_growth: bool = False


def kda_by(passes: Passes, tensors: KdaTensors, options: KdaOptions) -> Outputs:
    q_BTHK = tensors.q_BTHK
    chunks = Chunks.of(q_BTHK, tensors.v_BTHV, tensors.spans, options.chunk_size)
    given = (*tensors.inputs, tensors.initial_state_SHKV, chunks, scale_of(q_BTHK, options.scale), passes)
    out_BTHV, final_SHKV = _Kda.apply(*given)
    return out_BTHV, final_SHKV


class _Kda(torch.autograd.Function):
    """The autograd function of both forms. It saves the inputs as given; backward makes contiguous copies again."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Outputs:
        *inputs, initial_SHKV, chunks, scale, passes = given
        ctx.chunks, ctx.scale, ctx.passes = chunks, scale, passes
        ctx.set_materialize_grads(False)
        terms = Terms.of(passes, _dense(*inputs), chunks, scale, keeps_inverse=False)
        out_BTHV = inputs[2].new_empty(inputs[2].shape)
        size_SHKV = (chunks.num_sequences, chunks.num_heads, chunks.width_k, chunks.width_v)
        final_SHKV = out_BTHV.new_empty(size_SHKV, dtype=torch.float32)
        dense_initial_SHKV = None if initial_SHKV is None else initial_SHKV.contiguous()
        ends_GSHKV = passes.scan(terms, chunks, dense_initial_SHKV, final_SHKV, out_BTHV)
        ctx.save_for_backward(*inputs, initial_SHKV, ends_GSHKV)
        return out_BTHV, final_SHKV

    @staticmethod
    @first_derivative_only("kda")
    def backward(ctx: Any, grad_out_BTHV: torch.Tensor | None, grad_final_SHKV: torch.Tensor | None) -> Any:
        *inputs, initial_SHKV, ends_GSHKV = ctx.saved_tensors
        inputs = _dense(*inputs)
        chunks, scale = ctx.chunks, ctx.scale
        (grad_out_BTHV,) = _dense(torch.zeros_like(inputs[2]) if grad_out_BTHV is None else grad_out_BTHV)
        grad_final_SHKV = None if grad_final_SHKV is None else grad_final_SHKV.contiguous()
        grad_initial_SHKV = None
        if initial_SHKV is not None:
            initial_SHKV = initial_SHKV.contiguous()
            grad_initial_SHKV = torch.empty_like(initial_SHKV) if ctx.needs_input_grad[5] else None
        terms = Terms.of(ctx.passes, inputs, chunks, scale, keeps_inverse=True)
        states_NHVK = chunks.empty(terms.weights_NHCK, chunks.width_v, chunks.width_k)
        walk = Walk(
            initial_SHKV, ends_GSHKV, grad_out_BTHV, grad_final_SHKV, grad_initial_SHKV,
            states_NHVK, torch.empty_like(states_NHVK), torch.empty_like(terms.values_NHCV),
        )  # fmt: skip
        ctx.passes.there_and_back(terms, chunks, walk)
        assert terms.inverse_NHCC is not None
        nan_of_gates = terms.decay_NHK if terms.growth_NH is None else terms.growth_NH
        kept = Kept(terms.inverse_NHCC, nan_of_gates, terms.values_NHCV)
        del terms  # frees the terms that ``kept`` leaves out, before the gradients are allocated
        return *ctx.passes.gradients(inputs, chunks, walk, kept, scale), grad_initial_SHKV, None, None, None


def _dense(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors contiguous and aligned to 16 bytes, the size of the kernels' loads."""
    dense = (tensor.contiguous() for tensor in tensors)
    return tuple(tensor.clone() if tensor.storage_offset() * tensor.itemsize % 16 else tensor for tensor in dense)


@dataclass(frozen=True)
class Chunks:
    """The chunks of all sequences in order; the sequences are equally long, or packed."""

    num_heads: int
    width_k: int
    width_v: int
    num_sequences: int
    num_chunks: int
    length: int
    """Tokens of each sequence, or 0 if they are packed."""
    chunk_size: int
    """The chunk size that the caller asked for."""
    bounds_N2: torch.Tensor | None = None
    """For packed sequences: the first row of each chunk, and the row behind the last of its sequence."""
    first_chunk_S1: torch.Tensor | None = None
    """For packed sequences: the first chunk of each sequence, then the number of chunks."""

    @staticmethod
    def of(q_BTHK: torch.Tensor, v_BTHV: torch.Tensor, spans: Sequence[Span], chunk_size: int) -> Chunks:
        batch, length, num_heads, width_k = q_BTHK.shape
        sizes = num_heads, width_k, v_BTHV.shape[3]
        if len(spans) == 1:
            return Chunks(*sizes, batch, batch * num_tiles(length, TOKENS_PER_CHUNK), length, chunk_size)
        bounds, first_chunk = [], [0]
        for span in spans:
            bounds += [(chunk.start, span.tokens.stop) for chunk in span.cut(TOKENS_PER_CHUNK)]
            first_chunk.append(len(bounds))
        tables = (torch.tensor(table, device=q_BTHK.device, dtype=torch.int64) for table in (bounds, first_chunk))
        return Chunks(*sizes, len(spans), len(bounds), 0, chunk_size, *tables)

    def empty(self, like: torch.Tensor, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocate a tensor of ``size`` for every chunk and head."""
        return like.new_empty((self.num_chunks, self.num_heads, *size), dtype=dtype)

    @property
    def counts(self) -> tuple[int, ...]:
        """Arguments of every kernel: length and chunks of a sequence (0 if packed), heads, widths."""
        chunks = num_tiles(self.length, TOKENS_PER_CHUNK)
        return self.length, chunks, self.num_heads, self.width_k, self.width_v

    @property
    def constants(self) -> dict[str, Any]:
        """Constexprs of every kernel. A width is compiled in if it is a power of two."""
        fixed_k, fixed_v = (width if width & (width - 1) == 0 else 0 for width in (self.width_k, self.width_v))
        return {"FIXED_K": fixed_k, "FIXED_V": fixed_v, "C": TOKENS_PER_CHUNK, "PACKED": self.length == 0}

    def all_channels(self, tiles: Tiles, item_bytes: int) -> dict[str, int]:
        """Return a tile of all channels, with fewer loads in flight where an SM's shared memory is too small."""
        width = max(tiles.k, next_power_of_two(self.width_k))
        stages = min(tiles.stages, max(1, 1024 // (width * item_bytes)))
        return {"BLOCK_K": width, "BLOCK_V": tiles.v, "STAGES": stages, "num_warps": tiles.warps}


@dataclass(frozen=True)
class Terms:
    """The effect of every chunk on a state; ``kernels.prepare`` defines each term."""

    weights_NHCK: torch.Tensor
    values_NHCV: torch.Tensor
    queries_NHCK: torch.Tensor
    keys_NHCK: torch.Tensor
    scores_NHCC: torch.Tensor
    inverse_NHCC: torch.Tensor | None
    decay_NHK: torch.Tensor
    growth_NH: torch.Tensor | None
    """An upper bound on the factor by which a chunk scales the length of a state, as an exponent of 2."""

    @staticmethod
    def of(
        passes: Passes, inputs: tuple[torch.Tensor, ...], chunks: Chunks, scale: float, *, keeps_inverse: bool
    ) -> Terms:
        q_BTHK = inputs[0]
        size_CK, size_CV = (TOKENS_PER_CHUNK, chunks.width_k), (TOKENS_PER_CHUNK, chunks.width_v)
        size_CC = (TOKENS_PER_CHUNK, TOKENS_PER_CHUNK)
        terms = Terms(
            chunks.empty(q_BTHK, *size_CK),
            chunks.empty(q_BTHK, *size_CV),
            chunks.empty(q_BTHK, *size_CK),
            chunks.empty(q_BTHK, *size_CK),
            chunks.empty(q_BTHK, *size_CC),
            chunks.empty(q_BTHK, *size_CC) if keeps_inverse else None,
            chunks.empty(q_BTHK, chunks.width_k, dtype=torch.float32),
            chunks.empty(q_BTHK, dtype=torch.float32) if passes.bounds_growth else None,
        )
        passes.prepare(inputs, terms, chunks, scale)
        return terms


def _prepare(inputs: tuple[torch.Tensor, ...], terms: Terms, chunks: Chunks, scale: float) -> None:
    from . import kernels

    launch(
        kernels.prepare, (chunks.num_chunks * chunks.num_heads,), *inputs, chunks.bounds_N2,
        terms.weights_NHCK, terms.values_NHCV, terms.queries_NHCK, terms.keys_NHCK, terms.scores_NHCC,
        terms.inverse_NHCC, terms.decay_NHK, scale, *chunks.counts, **chunks.constants,
        BLOCK_K=PREPARE.k, BLOCK_V=PREPARE.v, KEEPS_INVERSE=terms.inverse_NHCC is not None,
        num_warps=PREPARE.warps, num_stages=PREPARE.stages,
    )  # fmt: skip


def _scan(
    terms: Terms,
    chunks: Chunks,
    initial_SHKV: torch.Tensor | None,
    final_SHKV: torch.Tensor,
    out_BTHV: torch.Tensor,
) -> None:
    from . import kernels

    launch(
        kernels.scan, (chunks.num_sequences * chunks.num_heads, num_tiles(chunks.width_v, SCAN.v)),
        terms.weights_NHCK, terms.values_NHCV, terms.queries_NHCK, terms.keys_NHCK, terms.scores_NHCC, terms.decay_NHK,
        initial_SHKV, final_SHKV, out_BTHV, chunks.bounds_N2, chunks.first_chunk_S1,
        *chunks.counts, **chunks.constants, **chunks.all_channels(SCAN, out_BTHV.element_size()),
        HAS_INITIAL=initial_SHKV is not None,
    )  # fmt: skip


@dataclass(frozen=True)
class Walk:
    """Arguments and results of a backward pass's scans through the chunks."""

    initial_SHKV: torch.Tensor | None
    ends_GSHKV: torch.Tensor | None
    """The states at the ends of the segments that forward cut sequences into."""
    grad_out_BTHV: torch.Tensor
    grad_final_SHKV: torch.Tensor | None
    grad_initial_SHKV: torch.Tensor | None
    states_NHVK: torch.Tensor
    """The first state of each chunk, transposed to values by channels."""
    grad_states_NHVK: torch.Tensor
    """The gradient of each chunk's last state, transposed too."""
    grad_values_NHCV: torch.Tensor
    """The gradient of what the chunks write, V'."""


def _there_and_back(terms: Terms, chunks: Chunks, walk: Walk) -> None:
    """Launch both scans of a backward pass, which overwrite ``terms.values_NHCV`` with V'."""
    from . import kernels

    launch(
        kernels.scan_there_and_back,
        (chunks.num_sequences * chunks.num_heads, num_tiles(chunks.width_v, THERE_AND_BACK.v), 2),
        terms.weights_NHCK, terms.values_NHCV, terms.queries_NHCK, terms.keys_NHCK, terms.scores_NHCC, terms.decay_NHK,
        walk.initial_SHKV, walk.states_NHVK, walk.grad_out_BTHV, walk.grad_final_SHKV, walk.grad_initial_SHKV,
        walk.grad_values_NHCV, walk.grad_states_NHVK, chunks.bounds_N2, chunks.first_chunk_S1,
        *chunks.counts, **chunks.constants, **chunks.all_channels(THERE_AND_BACK, walk.states_NHVK.element_size()),
        HAS_INITIAL=walk.initial_SHKV is not None, HAS_FINAL=walk.grad_final_SHKV is not None,
        WANTS_INITIAL=walk.grad_initial_SHKV is not None,
    )  # fmt: skip


class Kept(NamedTuple):
    """The terms that the gradients need after the scans."""

    inverse_NHCC: torch.Tensor
    nan_of_gates: torch.Tensor
    """NaN for chunks with a NaN gate: the bounds on growth, or the decays where no bounds are made."""
    values_NHCV: torch.Tensor
    """V', with which the scans overwrote the values."""


def _gradients(
    inputs: tuple[torch.Tensor, ...], chunks: Chunks, walk: Walk, kept: Kept, scale: float
) -> tuple[torch.Tensor, ...]:
    from . import kernels

    q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH = inputs
    num_rows = q_BTHK.shape[0] * q_BTHK.shape[1]
    num_blocks = num_tiles(chunks.width_k, CHANNELS.k)
    grad_scores_NHCC, grad_overlaps_NHCC = torch.empty_like(kept.inverse_NHCC), torch.empty_like(kept.inverse_NHCC)
    grad_q_BTHK, grad_k_BTHK, grad_v_BTHV, grad_g_BTHK = (torch.empty_like(tensor) for tensor in inputs[:4])
    parts_PBTH = beta_BTH.new_empty((1 + num_blocks, *beta_BTH.shape), dtype=torch.float32)
    launch(
        kernels.gradients_of_pairs, (chunks.num_chunks * chunks.num_heads,),
        v_BTHV, beta_BTH, chunks.bounds_N2, *kept, walk.grad_out_BTHV,
        walk.grad_values_NHCV, grad_scores_NHCC, grad_overlaps_NHCC, grad_v_BTHV, parts_PBTH, scale,
        *chunks.counts, **chunks.constants,
        BLOCK_V=PAIRS.v, num_warps=PAIRS.warps, num_stages=PAIRS.stages,
    )  # fmt: skip
    launch(
        kernels.gradients_of_channels, (chunks.num_chunks * chunks.num_heads, num_blocks),
        q_BTHK, k_BTHK, g_BTHK, beta_BTH, chunks.bounds_N2, kept.nan_of_gates, kept.values_NHCV, walk.states_NHVK,
        walk.grad_out_BTHV, walk.grad_values_NHCV, walk.grad_states_NHVK, grad_scores_NHCC, grad_overlaps_NHCC,
        grad_q_BTHK, grad_k_BTHK, grad_g_BTHK, parts_PBTH, scale, num_rows, *chunks.counts, **chunks.constants,
        BLOCK_K=CHANNELS.k, BLOCK_V=CHANNELS.v, num_warps=CHANNELS.warps, num_stages=CHANNELS.stages,
    )  # fmt: skip
    return grad_q_BTHK, grad_k_BTHK, grad_v_BTHV, grad_g_BTHK, parts_PBTH.sum(0).to(beta_BTH.dtype)


_PASSES = Passes(_prepare, _scan, _there_and_back, _gradients)
