"""The form ``triton`` in CUDA C++ for bfloat16 inputs: a warp keeps a chunk, or 16 values of the state, in registers,
so that no product waits for shared memory. ``cuda_sources`` holds the kernels: two forward, three in backward.

Few long sequences are cut into segments, which fill a GPU. Where gates let earlier states decay, the block of a segment
starts a few chunks before it from a zero state; elsewhere it waits for the state of the segment before. An upper bound
on the growth of states decides this, not a guess: what is left out is less than 2^-40 of a state.
"""

# S sequences, N chunks, C tokens of a chunk, G segments of a sequence but one

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from ...cuda_kernels import CudaKernel
from ..launches import largest_power_of_two, num_tiles
from .arguments import KdaOptions, KdaTensors, Outputs, kda_form
from .passes import Gradients, Kept, Passes, ScanStates, Terms, Walk, kda_by
from .triton import triton_kda
from .windows import TOKENS_PER_CHUNK, Chunks

WIDTHS = (64, 128)
"""Widths of keys. The width of values is any multiple of 32 up to ``MOST_VALUES``, the limit of shared memory."""
MOST_VALUES = 512
STAGES_OF_SCAN = 3
_SLOT, _ALIGNED_BYTES = 512, 1024  # as in the sources
BLOCKS_AT_ONCE = 264
"""Thread blocks of a scan that fill an H200 (132 SMs, two blocks each)."""
FEWER_SEGMENTS = 4
"""Backward cuts sequences into so many times fewer segments than forward would: it scans both ways at once, and is
short of bandwidth. Forward cuts sequences only if there can be at least this many segments."""
LEAST_CHUNKS = 4
"""The length of the shortest segment, in chunks of the ``chunk_size`` that the caller asked for."""
# compute capabilities; from 12.0 on a block has only 99 KiB of shared memory
_HOPPER, _CONSUMER_BLACKWELL = (9, 0), (12, 0)
_GATES = {torch.float32: "float", torch.bfloat16: "bfloat16"}
_SOURCES = Path(__file__).with_name("cuda_sources")


def values_of_block(width_v: int) -> int:
    """The number of values that a block of a scan takes, 16 per warp."""
    return 64 if width_v % 64 == 0 else 32


def stages_both_ways(chunks: Chunks) -> int:
    """How many chunks a block of a backward scan buffers in shared memory. Two are faster where blocks share an SM."""
    return 3 if _may_be_cut(chunks) else 2


def kernel_of_gates(name: str, g_BTHK: torch.Tensor) -> CudaKernel:
    """A kernel that reads gates, compiled for their number of channels and dtype."""
    return _kernel(name, ("WIDTH", g_BTHK.shape[3]), ("GATE", _GATES[g_BTHK.dtype]))


def kernel_of_states(name: str, chunks: Chunks) -> CudaKernel:
    """A kernel that scans the chunks, compiled for the widths of states."""
    stages = STAGES_OF_SCAN if name == "scan" else stages_both_ways(chunks)
    warps = values_of_block(chunks.width_v) // 16
    return _kernel(name, ("WIDTH", chunks.width_k), ("WARPS", warps), ("STAGES", stages))


@functools.cache
def _kernel(name: str, *constants: tuple[str, int | str]) -> CudaKernel:
    return CudaKernel(_SOURCES / f"{name}.cu", f"kda_{name}", constants)


@kda_form
def cuda_kda(tensors: KdaTensors, options: KdaOptions) -> Outputs:
    """Equals naive. Supports the inputs that the form ``triton`` does.

    The kernels are for bfloat16 with gates and a beta in it or in float32, keys 64 or 128 wide and values a multiple of
    32 up to 512, on Hopper and data-center Blackwell; all other inputs use the form ``triton``.
    """
    if _is_supported(tensors):
        return kda_by(_PASSES, tensors, options)
    return triton_kda(*tensors.inputs, tensors.initial_state_SHKV, tensors.cu_seqlens, **vars(options))


def _wide_or_narrow(beta: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return beta or its gradient as the kernels' two arguments: in float32 and None, or None and in bfloat16."""
    return (None, beta) if beta.dtype == torch.bfloat16 else (beta, None)


def _is_supported(tensors: KdaTensors) -> bool:
    q_BTHK, _, v_BTHV, g_BTHK, beta_BTH = tensors.inputs
    return (
        q_BTHK.dtype == torch.bfloat16
        and g_BTHK.dtype in _GATES
        and beta_BTH.dtype in (torch.float32, torch.bfloat16)
        and q_BTHK.shape[3] in WIDTHS
        and v_BTHV.shape[3] % 32 == 0
        and v_BTHV.shape[3] <= MOST_VALUES
        and (not q_BTHK.is_cuda or _HOPPER <= torch.cuda.get_device_capability(q_BTHK.device) < _CONSUMER_BLACKWELL)
    )


def _prepare(inputs: tuple[torch.Tensor, ...], terms: Terms, chunks: Chunks, scale: float) -> None:
    q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH = inputs
    kernel_of_gates("prepare", g_BTHK).launch(
        (chunks.num_chunks * chunks.num_heads,), (32,), q_BTHK, k_BTHK, v_BTHV, g_BTHK,
        *_wide_or_narrow(beta_BTH), chunks.bounds_N2,
        terms.weights_NHCK, terms.values_NHCV, terms.queries_NHCK, terms.keys_NHCK, terms.scores_NHCC,
        terms.inverse_NHCC, terms.decay_NHK, terms.growth_NH,
        scale, *chunks.places, chunks.width_v,
        shared_bytes=(18 + chunks.width_k // 8) * _SLOT,
    )  # fmt: skip


def _scan(terms: Terms, chunks: Chunks, states: ScanStates, out_BTHV: torch.Tensor) -> None:
    segments = _Segments.of(chunks, _num_segments(chunks), states.last_SHKV)
    kernel_of_states("scan", chunks).launch(
        (*segments.blocks, segments.number), segments.threads,
        terms.weights_NHCK, terms.values_NHCV, terms.queries_NHCK, terms.keys_NHCK, terms.scores_NHCC, terms.decay_NHK,
        terms.growth_NH, states.first_SHKV, states.last_SHKV, segments.ends_GSHKV, segments.ready, states.inner_GSHKV,
        out_BTHV, chunks.bounds_N2, chunks.first_chunk_S1,
        states.num_inner, *chunks.places, chunks.width_v,
        shared_bytes=STAGES_OF_SCAN * segments.stage_bytes,
    )  # fmt: skip


def _scan_both_ways(terms: Terms, chunks: Chunks, walk: Walk) -> None:
    segments = _Segments.of(chunks, chunks.num_segments, terms.decay_NHK)
    kernel_of_states("scan_both_ways", chunks).launch(
        (*segments.blocks, 2 * segments.number), segments.threads,
        terms.weights_NHCK, terms.values_NHCV, terms.queries_NHCK, terms.keys_NHCK, terms.scores_NHCC, terms.decay_NHK,
        terms.growth_NH, walk.initial_SHKV, walk.inner_GSHKV, walk.states_NHVK,
        walk.grad_out_BTHV, walk.grad_final_SHKV, walk.grad_initial_SHKV, segments.ends_GSHKV, segments.ready,
        walk.grad_values_NHCV, walk.grad_states_NHVK, chunks.bounds_N2, chunks.first_chunk_S1,
        chunks.segment_chunks, *chunks.places, chunks.width_v,
        shared_bytes=stages_both_ways(chunks) * segments.stage_bytes
        + 2 * values_of_block(chunks.width_v) * chunks.width_k,
    )  # fmt: skip


@dataclass(frozen=True)
class _Segments:
    """The segments of each sequence, which blocks scan in parallel, and the buffers in which they pass states on."""

    number: int
    blocks: tuple[int, int]
    threads: tuple[int]
    stage_bytes: int
    """Shared memory of a buffered chunk: weights, queries, keys, values and scores of its tokens, and its decay."""
    ends_GSHKV: torch.Tensor | None = None
    ready: torch.Tensor | None = None
    """A flag for each block whose state in ``ends_GSHKV`` is complete."""

    @staticmethod
    def of(chunks: Chunks, number: int, like: torch.Tensor) -> _Segments:
        width_k, width_v, values = chunks.width_k, chunks.width_v, values_of_block(chunks.width_v)
        blocks = chunks.num_sequences * chunks.num_heads, width_v // values
        num_bytes = 2 * TOKENS_PER_CHUNK * (3 * width_k + values + TOKENS_PER_CHUNK) + 4 * width_k
        stage_bytes = _ALIGNED_BYTES * num_tiles(num_bytes, _ALIGNED_BYTES)
        sizes = number, blocks, (2 * values,), stage_bytes
        if number == 1:
            return _Segments(*sizes)
        size_GSHKV = (number - 1, chunks.num_sequences, chunks.num_heads, width_k, width_v)
        ready = like.new_zeros((number - 1, *blocks), dtype=torch.int32)
        return _Segments(*sizes, like.new_empty(size_GSHKV), ready)


def _num_segments(chunks: Chunks) -> int:
    """The number of segments of each sequence in forward."""
    if not _may_be_cut(chunks):
        return 1
    num_tokens = TOKENS_PER_CHUNK * (chunks.num_chunks // chunks.num_sequences)
    most = min(BLOCKS_AT_ONCE // _num_blocks(chunks), num_tokens // (LEAST_CHUNKS * chunks.chunk_size))
    return largest_power_of_two(most)


def _num_segments_both_ways(chunks: Chunks) -> int:
    return max(1, _num_segments(chunks) // FEWER_SEGMENTS)


def _may_be_cut(chunks: Chunks) -> bool:
    return 0 < _num_blocks(chunks) * FEWER_SEGMENTS <= BLOCKS_AT_ONCE


def _num_blocks(chunks: Chunks) -> int:
    """The number of thread blocks of a scan over whole sequences."""
    return chunks.num_sequences * chunks.num_heads * chunks.width_v // values_of_block(chunks.width_v)


def _gradients(
    inputs: tuple[torch.Tensor, ...], chunks: Chunks, walk: Walk, kept: Kept, scale: float, gradients: Gradients
) -> None:
    q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH = inputs
    *wide, parts_PBTH = gradients
    kernel_of_gates("gradients", g_BTHK).launch(
        (chunks.num_chunks * chunks.num_heads,), (chunks.width_k,), q_BTHK, k_BTHK, v_BTHV, g_BTHK,
        *_wide_or_narrow(beta_BTH), chunks.bounds_N2, *kept,
        walk.states_NHVK, walk.grad_out_BTHV, walk.grad_values_NHCV, walk.grad_states_NHVK,
        *wide, *_wide_or_narrow(parts_PBTH), scale, *chunks.places, chunks.width_v,
        shared_bytes=2 * TOKENS_PER_CHUNK * (4 * chunks.width_v + 3 * TOKENS_PER_CHUNK + 2)
        + _SLOT * chunks.width_k // 2,
    )  # fmt: skip


def _new_beta_parts(beta_BTH: torch.Tensor, width_k: int) -> torch.Tensor:
    return beta_BTH.new_empty((1, *beta_BTH.shape))


_PASSES = Passes(
    _prepare, _scan, _scan_both_ways, _gradients, _new_beta_parts, _num_segments_both_ways, bounds_growth=True
)
