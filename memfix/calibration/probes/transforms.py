"""Fourier transforms and factorizations, whose workspaces are measured for the table because they have no rules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .registry import Step, c64, probe

probe("fft", length=(1024, 1000, 1009, 65_536), batch=(1, 256))(
    lambda device, length, batch: partial(
        lambda x: torch.fft.irfft(torch.fft.rfft(x), length), torch.rand(batch, length, device=device)
    )
)
probe("fft_of_images", shape=((64, 256, 256), (8, 100, 100)))(
    lambda device, shape: partial(
        lambda z: torch.fft.ifft2(torch.fft.fft2(z)), torch.rand(shape, dtype=c64, device=device)
    )
)


@probe(length=(16_000, 160_000))
def _stft(device: str, length: int) -> Step:
    x, window = torch.rand(4, length, device=device), torch.hann_window(400, device=device)
    return partial(torch.stft, x, 400, 160, window=window, return_complex=True)


_FACTORIZATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "qr": torch.linalg.qr,
    "cholesky": lambda a: torch.linalg.cholesky_ex(
        a @ a.mT + 8 * torch.eye(a.shape[-1], device=a.device, dtype=a.dtype)
    ),
    "lu": torch.linalg.lu_factor_ex,
    "inv": torch.linalg.inv_ex,
    "solve": lambda a: torch.linalg.solve_ex(a, a),
    "eigh": torch.linalg.eigh,
    "svd": torch.linalg.svd,
    "det": torch.linalg.det,
}


@probe(of=tuple(_FACTORIZATIONS), shape=((512, 512), (16, 64, 64)))
def _factorized(device: str, of: str, shape: tuple[int, ...]) -> Step:
    return partial(_FACTORIZATIONS[of], torch.rand(shape, device=device) + torch.eye(shape[-1], device=device))
