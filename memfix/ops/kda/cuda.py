"""The form ``triton`` in CUDA C++ where inputs are bfloat16: a warp keeps a chunk, or 16 values of the state, in
registers, so that no product waits for shared memory. ``kda.cu`` holds the kernels: two forward, three in backward.
"""

# S sequences, N chunks, C tokens of a chunk

from __future__ import annotations

from pathlib import Path

import torch

from ...cuda_kernels import CudaKernel
from .arguments import KdaOptions, KdaTensors, Outputs, kda_form
from .triton import TOKENS_PER_CHUNK, Chunks, Kept, Passes, Terms, Walk, kda_by, triton_kda

WIDTHS = (64, 128)
"""Of keys; values may have any multiple of ``VALUES`` up to ``MOST_VALUES``, for which a block has shared memory."""
WARPS, STAGES = 2, 3  # as in the source
VALUES, MOST_VALUES = 16 * WARPS, 512
GROUP = 32
_SLOT = 512
_SOURCE = Path(__file__).with_name("kda.cu")
_PREPARE, _SCAN, _THERE_AND_BACK, _GRADIENTS = (
    {width: CudaKernel(_SOURCE, f"kda_{name}_{width}") for width in WIDTHS}
    for name in ("prepare", "scan", "there_and_back", "gradients")
)


@kda_form
def cuda_kda(tensors: KdaTensors, options: KdaOptions) -> Outputs:
    """Equals naive. Takes what the form ``triton`` does, and a float32 copy of ``beta`` that is not.

    The kernels are for bfloat16 with float32 gates, keys 64 or 128 wide and values a multiple of 32 up to 512, on
    Hopper or later; anything else takes the form ``triton``.
    """
    if _suits(tensors):
        return kda_by(_PASSES, tensors, options)
    return triton_kda(*tensors.inputs, tensors.initial_state_SHKV, tensors.cu_seqlens, **vars(options))


def _suits(tensors: KdaTensors) -> bool:
    q_BTHK, _, v_BTHV, g_BTHK, _ = tensors.inputs
    return (
        q_BTHK.dtype == torch.bfloat16
        and g_BTHK.dtype == torch.float32
        and q_BTHK.shape[3] in WIDTHS
        and v_BTHV.shape[3] % VALUES == 0
        and v_BTHV.shape[3] <= MOST_VALUES
        and (not q_BTHK.is_cuda or torch.cuda.get_device_capability(q_BTHK.device) >= (9, 0))
    )


def _prepare(inputs: tuple[torch.Tensor, ...], terms: Terms, chunks: Chunks, scale: float) -> None:
    q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH = inputs
    length, per_sequence, *_ = chunks.counts
    _PREPARE[chunks.width_k].launch(
        (chunks.num_chunks * chunks.num_heads,), (32,), q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH.float(),
        chunks.bounds_N2, terms.weights_NHCK, terms.values_NHCV, terms.queries_NHCK, terms.keys_NHCK,
        terms.scores_NHCC, terms.inverse_NHCC, terms.decay_NHK,
        scale, length, per_sequence, chunks.num_heads, chunks.width_v, shared_bytes=16 * _SLOT * chunks.width_k // 32,
    )  # fmt: skip


def _scan(
    terms: Terms,
    chunks: Chunks,
    initial_SHKV: torch.Tensor | None,
    final_SHKV: torch.Tensor,
    out_BTHV: torch.Tensor,
) -> None:
    (length, per_sequence, *_), width = chunks.counts, chunks.width_k
    _SCAN[width].launch(
        (chunks.num_sequences * chunks.num_heads, chunks.width_v // VALUES), (32 * WARPS,),
        terms.weights_NHCK, terms.values_NHCV, terms.queries_NHCK, terms.keys_NHCK, terms.scores_NHCC, terms.decay_NHK,
        initial_SHKV, final_SHKV, out_BTHV, chunks.bounds_N2, chunks.first_chunk_S1,
        length, per_sequence, chunks.num_heads, chunks.width_v, shared_bytes=STAGES * _stage_bytes(width),
    )  # fmt: skip


def _there_and_back(terms: Terms, chunks: Chunks, walk: Walk) -> None:
    (length, per_sequence, *_), width = chunks.counts, chunks.width_k
    _THERE_AND_BACK[width].launch(
        (chunks.num_sequences * chunks.num_heads, chunks.width_v // VALUES, 2), (32 * WARPS,),
        terms.weights_NHCK, terms.values_NHCV, terms.queries_NHCK, terms.keys_NHCK, terms.scores_NHCC, terms.decay_NHK,
        walk.initial_SHKV, walk.states_NHVK, walk.grad_out_BTHV, walk.grad_final_SHKV, walk.grad_initial_SHKV,
        walk.grad_values_NHCV, walk.grad_states_NHVK, chunks.bounds_N2, chunks.first_chunk_S1,
        length, per_sequence, chunks.num_heads, chunks.width_v,
        shared_bytes=STAGES * _stage_bytes(width) + 2 * VALUES * width,
    )  # fmt: skip


def _gradients(
    inputs: tuple[torch.Tensor, ...], chunks: Chunks, walk: Walk, kept: Kept, scale: float
) -> tuple[torch.Tensor, ...]:
    (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH), (length, per_sequence, *_) = inputs, chunks.counts
    num_groups = chunks.width_k // GROUP
    grad_q_BTHK, grad_k_BTHK, grad_v_BTHV, grad_g_BTHK = (torch.empty_like(tensor) for tensor in inputs[:4])
    parts_PBTH = beta_BTH.new_empty((num_groups, *beta_BTH.shape), dtype=torch.float32)
    _GRADIENTS[chunks.width_k].launch(
        (chunks.num_chunks * chunks.num_heads,), (chunks.width_k,), q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH.float(),
        chunks.bounds_N2, *kept, walk.states_NHVK, walk.grad_out_BTHV, walk.grad_values_NHCV, walk.grad_states_NHVK,
        grad_q_BTHK, grad_k_BTHK, grad_v_BTHV, grad_g_BTHK, parts_PBTH, scale, beta_BTH.numel(),
        length, per_sequence, chunks.num_heads, chunks.width_v,
        shared_bytes=2 * TOKENS_PER_CHUNK * (4 * chunks.width_v + 3 * TOKENS_PER_CHUNK) + 32 * _SLOT * num_groups,
    )  # fmt: skip
    return grad_q_BTHK, grad_k_BTHK, grad_v_BTHV, grad_g_BTHK, parts_PBTH.sum(0).to(beta_BTH.dtype)


def _stage_bytes(width: int) -> int:
    """Of a chunk on its way: weights, queries, keys, values and scores of its tokens, and its decay."""
    return 2 * TOKENS_PER_CHUNK * (3 * width + VALUES + TOKENS_PER_CHUNK) + 4 * width


_PASSES = Passes(_prepare, _scan, _there_and_back, _gradients)
