"""The chunked WY form on a GPU: two kernels forward, four in a backward that recomputes.

Forward prepares all chunks in parallel and then scans from chunk to chunk, a block of the state's values per program.
Backward prepares again, scans in both directions to store each chunk's first state and the gradient of its last, and
then computes the gradients inside all chunks in parallel. Only the inputs are held between the passes.
"""

# B batch, T tokens, H heads, K key width, V value width, S sequences, N chunks of all sequences, C tokens of a chunk,
# P parts of a sum, G segments of a sequence but the last

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..dispatch import require_kernels
from ..launches import launch, next_power_of_two, num_tiles
from .arguments import KdaOptions, KdaTensors, Outputs, kda_form
from .passes import Gradients, Kept, Passes, ScanStates, Terms, Walk, kda_by
from .windows import Chunks
from .wy import wy_kda

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
BOTH_WAYS = Tiles(k=16, v=32, stages=2, warps=4)
PAIRS = Tiles(k=64, v=64, stages=2, warps=2)
CHANNELS = Tiles(k=64, v=64, stages=2, warps=4)


@kda_form
def triton_kda(tensors: KdaTensors, options: KdaOptions) -> Outputs:
    """Equals naive, without transition matrices; reading and writing the inputs is a fair part of its time.

    Peak above inputs in a train step, ``e`` the item size and ``R = B*T*H`` rows: ``R*(3*K + 4*V)*e`` for gradients
    and chunk terms, and ``R*K*V*e/16`` for the states of chunks; in large calls about twice the outputs and gradients,
    since terms and states are kept for one window at a time. Only inputs are held between the passes, and a state for
    each window. Products have operands of the working dtype and float32 sums. Chunks have 32 tokens, whatever
    ``chunk_size`` says. float64 inputs, and keys wider than 256, use the form ``wy``.
    """
    q_BTHK = tensors.q_BTHK
    if q_BTHK.dtype == torch.float64 or q_BTHK.shape[-1] > WIDEST:
        return wy_kda(*tensors.inputs, tensors.initial_state_SHKV, tensors.cu_seqlens, **vars(options))
    require_kernels(q_BTHK, instead="wy")
    return kda_by(_PASSES, tensors, options)


def _all_channels(chunks: Chunks, tiles: Tiles, item_bytes: int) -> dict[str, int]:
    """Return a tile of all channels, with fewer loads in flight where an SM's shared memory is too small."""
    width = max(tiles.k, next_power_of_two(chunks.width_k))
    stages = min(tiles.stages, max(1, 1024 // (width * item_bytes)))
    return {"BLOCK_K": width, "BLOCK_V": tiles.v, "STAGES": stages, "num_warps": tiles.warps}


def _prepare(inputs: tuple[torch.Tensor, ...], terms: Terms, chunks: Chunks, scale: float) -> None:
    from . import kernels

    launch(
        kernels.prepare, (chunks.num_chunks * chunks.num_heads,), *inputs, chunks.bounds_N2,
        terms.weights_NHCK, terms.values_NHCV, terms.queries_NHCK, terms.keys_NHCK, terms.scores_NHCC,
        terms.inverse_NHCC, terms.decay_NHK, scale, *chunks.places, chunks.width_k, chunks.width_v, **chunks.constants,
        BLOCK_K=PREPARE.k, BLOCK_V=PREPARE.v, KEEPS_INVERSE=terms.inverse_NHCC is not None,
        num_warps=PREPARE.warps, num_stages=PREPARE.stages,
    )  # fmt: skip


def _scan(terms: Terms, chunks: Chunks, states: ScanStates, out_BTHV: torch.Tensor) -> None:
    from . import kernels

    launch(
        kernels.scan, (chunks.num_sequences * chunks.num_heads, num_tiles(chunks.width_v, SCAN.v)),
        terms.weights_NHCK, terms.values_NHCV, terms.queries_NHCK, terms.keys_NHCK, terms.scores_NHCC, terms.decay_NHK,
        states.first_SHKV, states.last_SHKV, states.inner_GSHKV, out_BTHV, chunks.bounds_N2, chunks.first_chunk_S1,
        states.num_inner, *chunks.places, chunks.width_k, chunks.width_v, **chunks.constants,
        **_all_channels(chunks, SCAN, out_BTHV.element_size()),
        HAS_INITIAL=states.first_SHKV is not None, HAS_INNER=states.inner_GSHKV is not None,
    )  # fmt: skip


def _scan_both_ways(terms: Terms, chunks: Chunks, walk: Walk) -> None:
    """Launch both scans of a backward pass, which overwrite ``terms.values_NHCV`` with V'."""
    from . import kernels

    launch(
        kernels.scan_both_ways,
        (chunks.num_sequences * chunks.num_heads, num_tiles(chunks.width_v, BOTH_WAYS.v), 2),
        terms.weights_NHCK, terms.values_NHCV, terms.queries_NHCK, terms.keys_NHCK, terms.scores_NHCC, terms.decay_NHK,
        walk.initial_SHKV, walk.states_NHVK, walk.grad_out_BTHV, walk.grad_final_SHKV, walk.grad_initial_SHKV,
        walk.grad_values_NHCV, walk.grad_states_NHVK, chunks.bounds_N2, chunks.first_chunk_S1,
        *chunks.places, chunks.width_k, chunks.width_v, **chunks.constants,
        **_all_channels(chunks, BOTH_WAYS, walk.states_NHVK.element_size()),
        HAS_INITIAL=walk.initial_SHKV is not None, HAS_FINAL=walk.grad_final_SHKV is not None,
        WANTS_INITIAL=walk.grad_initial_SHKV is not None,
    )  # fmt: skip


def _gradients(
    inputs: tuple[torch.Tensor, ...], chunks: Chunks, walk: Walk, kept: Kept, scale: float, gradients: Gradients
) -> None:
    from . import kernels

    q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH = inputs
    parts_PBTH = gradients.beta_parts_PBTH
    grad_scores_NHCC, grad_overlaps_NHCC = torch.empty_like(kept.inverse_NHCC), torch.empty_like(kept.inverse_NHCC)
    launch(
        kernels.gradients_of_pairs, (chunks.num_chunks * chunks.num_heads,),
        v_BTHV, beta_BTH, chunks.bounds_N2, *kept, walk.grad_out_BTHV,
        walk.grad_values_NHCV, grad_scores_NHCC, grad_overlaps_NHCC, gradients.v_BTHV, parts_PBTH, scale,
        *chunks.places, chunks.width_k, chunks.width_v, **chunks.constants,
        BLOCK_V=PAIRS.v, num_warps=PAIRS.warps, num_stages=PAIRS.stages,
    )  # fmt: skip
    launch(
        kernels.gradients_of_channels,
        (chunks.num_chunks * chunks.num_heads, num_tiles(chunks.width_k, CHANNELS.k)),
        q_BTHK, k_BTHK, g_BTHK, beta_BTH, chunks.bounds_N2, kept.nan_of_gates, kept.values_NHCV, walk.states_NHVK,
        walk.grad_out_BTHV, walk.grad_values_NHCV, walk.grad_states_NHVK, grad_scores_NHCC, grad_overlaps_NHCC,
        gradients.q_BTHK, gradients.k_BTHK, gradients.g_BTHK, parts_PBTH, scale, parts_PBTH.stride(0),
        *chunks.places, chunks.width_k, chunks.width_v, **chunks.constants,
        BLOCK_K=CHANNELS.k, BLOCK_V=CHANNELS.v, num_warps=CHANNELS.warps, num_stages=CHANNELS.stages,
    )  # fmt: skip


def _new_beta_parts(beta_BTH: torch.Tensor, width_k: int) -> torch.Tensor:
    """A part from the pairs of tokens, and one from each block of channels."""
    num_parts = 1 + num_tiles(width_k, CHANNELS.k)
    return beta_BTH.new_empty((num_parts, *beta_BTH.shape), dtype=torch.float32)


_PASSES = Passes(_prepare, _scan, _scan_both_ways, _gradients, _new_beta_parts, num_segments=lambda chunks: 1)
