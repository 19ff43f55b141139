"""The form ``triton`` with two kernels in CUDA C++ where inputs are bfloat16: a warp keeps a chunk, or 16 values of the
state, in registers, so that no product waits for shared memory.

``kda.cu`` holds them. Backward prepares with them too, and takes the other kernels of the form ``triton``.
"""

# S sequences, N chunks, C tokens of a chunk

from __future__ import annotations

from pathlib import Path

import torch

from ...cuda_kernels import CudaKernel
from .arguments import KdaOptions, KdaTensors, Outputs, kda_form
from .triton import TOKENS_PER_CHUNK, Chunks, Passes, Terms, kda_by, triton_kda

WIDTHS = (64, 128)
"""Of keys; values may have any multiple of ``VALUES``."""
WARPS, STAGES = 2, 3  # as in the source
VALUES = 16 * WARPS
_SLOT = 512
_SOURCE = Path(__file__).with_name("kda.cu")
_PREPARE, _SCAN = (
    {width: CudaKernel(_SOURCE, f"kda_{name}_{width}") for width in WIDTHS} for name in ("prepare", "scan")
)


@kda_form
def cuda_kda(tensors: KdaTensors, options: KdaOptions) -> Outputs:
    """Equals naive. Takes what the form ``triton`` does, and a float32 copy of ``beta`` that is not.

    The kernels are for bfloat16 with float32 gates, keys 64 or 128 wide and values a multiple of 32, on Ampere or
    later; anything else takes the form ``triton``.
    """
    form = _PASSES if _suits(tensors) else None
    if form is None:
        return triton_kda(*tensors.inputs, tensors.initial_state_SHKV, tensors.cu_seqlens, **vars(options))
    return kda_by(form, tensors, options)


def _suits(tensors: KdaTensors) -> bool:
    q_BTHK, _, v_BTHV, g_BTHK, _ = tensors.inputs
    return (
        q_BTHK.dtype == torch.bfloat16
        and g_BTHK.dtype == torch.float32
        and q_BTHK.shape[3] in WIDTHS
        and v_BTHV.shape[3] % VALUES == 0
        and (not q_BTHK.is_cuda or torch.cuda.get_device_capability(q_BTHK.device) >= (8, 0))
    )


def _prepare(inputs: tuple[torch.Tensor, ...], terms: Terms, chunks: Chunks, scale: float) -> None:
    q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH = inputs
    sizes = chunks.sizes
    _PREPARE[chunks.width_k].launch(
        (chunks.num_chunks, chunks.num_heads), (32,), q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH.float(),
        _table(chunks.bounds_N2, q_BTHK), terms.weights_NHCK, terms.values_NHCV, terms.queries_NHCK, terms.keys_NHCK,
        terms.scores_NHCC, terms.scores_NHCC if terms.inverse_NHCC is None else terms.inverse_NHCC, terms.decay_NHK,
        scale, sizes["PACKED"], sizes["T"], sizes["NUM_CHUNKS"], chunks.num_heads, chunks.width_v,
        terms.inverse_NHCC is not None, shared_bytes=_SLOT * (2 * 16 + chunks.width_k // 8),
    )  # fmt: skip


def _scan(
    terms: Terms,
    chunks: Chunks,
    initial_SHKV: torch.Tensor | None,
    final_SHKV: torch.Tensor,
    out_BTHV: torch.Tensor,
) -> None:
    sizes, width = chunks.sizes, chunks.width_k
    rows = 3 * width + VALUES + TOKENS_PER_CHUNK
    _SCAN[width].launch(
        (chunks.num_sequences * chunks.num_heads, chunks.width_v // VALUES), (32 * WARPS,),
        terms.weights_NHCK, terms.values_NHCV, terms.queries_NHCK, terms.keys_NHCK, terms.scores_NHCC, terms.decay_NHK,
        final_SHKV if initial_SHKV is None else initial_SHKV, final_SHKV, out_BTHV,
        _table(chunks.bounds_N2, out_BTHV), _table(chunks.first_chunk_S1, out_BTHV),
        sizes["PACKED"], sizes["T"], sizes["NUM_CHUNKS"], chunks.num_heads, chunks.width_v, initial_SHKV is not None,
        shared_bytes=STAGES * (2 * TOKENS_PER_CHUNK * rows + 4 * width),
    )  # fmt: skip


def _table(table: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(0, dtype=torch.int64) if table is None else table


_PASSES = Passes(_prepare, _scan)
