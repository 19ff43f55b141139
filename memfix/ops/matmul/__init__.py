"""Matrix products by readable kernels: one thread per element, tiles in shared memory, and tiles in Triton."""

from __future__ import annotations

import torch

from ..dispatch import Dispatcher

DISPATCHER = Dispatcher(
    "matmul", __name__, forms=("one_thread", "tiled", "triton"), otherwise="tiled", kernels="triton"
)
FORMS = DISPATCHER.names


def matmul(left_MK: torch.Tensor, right_KN: torch.Tensor, *, form: str = "auto") -> torch.Tensor:
    """Equals ``left_MK @ right_KN`` in float32, on a GPU. cuBLAS, which torch calls, is faster than every form."""
    out_MN: torch.Tensor = DISPATCHER.function(form, left_MK)(left_MK, right_KN)
    return out_MN


def row_max(x_RC: torch.Tensor) -> torch.Tensor:
    """The largest number of each row, on a GPU. NaN is skipped, and a row of nothing but NaN gives -inf."""
    from .row_maxima import cuda_row_max

    return cuda_row_max(x_RC)
