"""What the forms ``triton`` and ``cuda`` share: the autograd function, and the tensors that its passes exchange."""

# B batch, T tokens, H heads, K key width, V value width, S sequences, N chunks of all sequences, C tokens of a chunk,
# G segments of a sequence but the last

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..derivatives import first_derivative_only
from ..launches import num_tiles
from .arguments import KdaOptions, KdaTensors, Outputs, Span, scale_of

TOKENS_PER_CHUNK = 32
"""Longer chunks would save states in backward and steps of the scan, but need products of 64 rows: see
``memfix.ops.kernels.product``."""


@dataclass(frozen=True)
class Passes:
    """The launches in which the forms ``triton`` and ``cuda`` differ; they share the rest."""

    prepare: Callable[[tuple[torch.Tensor, ...], Terms, Chunks, float], None]
    scan: Callable[[Terms, Chunks, torch.Tensor | None, torch.Tensor, torch.Tensor], torch.Tensor | None]
    """Returns the states between segments, from which a backward pass may start, or None."""
    scan_both_ways: Callable[[Terms, Chunks, Walk], None]
    gradients: Callable[[tuple[torch.Tensor, ...], Chunks, Walk, Kept, float], tuple[torch.Tensor, ...]]
    """Returns the gradients of q, k, v, g and beta."""
    bounds_growth: bool = False


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


class Kept(NamedTuple):
    """The terms that the gradients need after the scans."""

    inverse_NHCC: torch.Tensor
    nan_of_gates: torch.Tensor
    """NaN for chunks with a NaN gate: the bounds on growth, or the decays where no bounds are made."""
    values_NHCV: torch.Tensor
    """V', with which the scans overwrote the values."""


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
        ctx.passes.scan_both_ways(terms, chunks, walk)
        assert terms.inverse_NHCC is not None
        nan_of_gates = terms.decay_NHK if terms.growth_NH is None else terms.growth_NH
        kept = Kept(terms.inverse_NHCC, nan_of_gates, terms.values_NHCV)
        del terms  # frees the terms that ``kept`` leaves out, before the gradients are allocated
        return *ctx.passes.gradients(inputs, chunks, walk, kept, scale), grad_initial_SHKV, None, None, None


def _dense(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors contiguous and aligned to 16 bytes, the size of the kernels' loads."""
    dense = (tensor.contiguous() for tensor in tensors)
    return tuple(tensor.clone() if tensor.storage_offset() * tensor.itemsize % 16 else tensor for tensor in dense)
