"""Whether an op's Triton kernels can run here, said in words where they cannot."""

from __future__ import annotations

import importlib.util

import torch


def triton_is_there() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    from .kernels import INTERPRETED

    return bool(INTERPRETED.value)


def require_kernels(tensor: torch.Tensor, *, instead: str) -> None:
    """Refuse the form ``triton`` where its kernels cannot run on ``tensor``; ``instead`` is the form that can."""
    if not triton_is_there():
        raise RuntimeError(f"form 'triton' needs the package triton, which is not installed; take form='{instead}'")
    if tensor.device.type == "cpu" and not is_interpreted():
        raise RuntimeError(
            f"form 'triton' runs on a GPU, and the tensors are on the CPU; take form='{instead}', or set "
            "TRITON_INTERPRET=1 before Python starts"
        )
