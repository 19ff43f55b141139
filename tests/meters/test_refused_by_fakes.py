"""Calls that CUDA takes and torch's own fake kernels refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import memfix

ROWS, COLUMNS = 300, 100
SIZE = ROWS * COLUMNS * 4


def reading_of(step: Callable[[torch.Tensor], Any]) -> memfix.Reading:
    def build(device: str) -> Callable[[], Any]:
        x = torch.randn(ROWS, COLUMNS, device=device)
        return lambda: step(x)

    return memfix.peak(build)


def in_bytes(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(ROWS, dtype=torch.uint8, device=x.device)


@pytest.mark.parametrize(
    ("step", "taken"),
    [
        (lambda x: torch.xlogy(x, 2.0), SIZE),
        (lambda x: torch.xlogy(2.0, x), SIZE),
        (lambda x: torch.special.zeta(x, 2.0), SIZE),
        (lambda x: torch.special.chebyshev_polynomial_t(x, 3), SIZE),
        (lambda x: torch._foreach_addcdiv([x, x], [x, x], [x, x], torch.ones(2)), 2 * SIZE),
        (lambda x: torch._foreach_addcmul_([x], [x], [x], torch.ones(1)), 0),
        (lambda x: torch.where(x.to(torch.uint8), x, x), SIZE + 2 * ROWS * COLUMNS),
        (lambda x: F.nll_loss(x, in_bytes(x)), ROWS + 4 + 4),
        (lambda x: torch.tensor([x[row, 0] for row in range(5)], device=x.device), 5 * 4),
        (lambda x: torch.tensor([[x[0, 0], 1], [2, x[0, 1]]], dtype=torch.float64).to(x.device), 4 * 8),
        (lambda x: torch.as_tensor((x[0, 0], x[0, 1])).to(x.device), 2 * 4),
    ],
)
def test_a_call_that_fakes_refuse_is_exact(step: Callable[[torch.Tensor], Any], taken: int) -> None:
    reading = reading_of(step)
    assert (reading.peak_bytes, reading.exact) == (taken, True)


def test_a_list_of_tensors_and_numbers_has_the_dtype_of_all() -> None:
    def step(x: torch.Tensor) -> Any:
        assert torch.tensor([x[0, 0].half(), 1]).dtype == torch.float16
        assert torch.tensor([x[0, 0].long(), 1.5]).dtype == torch.float32
        assert torch.tensor([x[0, 0].half(), x[0, 0].double()]).dtype == torch.float64

    reading_of(step)
