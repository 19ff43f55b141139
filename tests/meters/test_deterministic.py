"""Deterministic algorithms, with which torch fills new memory: what it resizes takes one element more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memfix


def reading_of(step: Callable[[torch.Tensor], Any]) -> memfix.Reading:
    def build(device: str) -> Callable[[], Any]:
        x = torch.randn(50, 3001, device=device)

        def deterministic() -> Any:
            torch.use_deterministic_algorithms(True, warn_only=True)
            try:
                return step(x)
            finally:
                torch.use_deterministic_algorithms(False)

        return deterministic

    return memfix.peak(build)


def test_an_operator_that_resizes_its_results_takes_one_element_more() -> None:
    """Measured on an H200: 608 bytes."""
    reading = reading_of(lambda x: x.kthvalue(3, 1))
    assert (reading.peak_bytes, reading.exact) == (608, True)


@pytest.mark.parametrize("step", [lambda x: x.median(1), lambda x: x.sort(1), lambda x: x.logical_not()])
def test_an_operator_that_may_resize_something_is_bounded(step: Callable[[torch.Tensor], Any]) -> None:
    reading = reading_of(step)
    assert not reading.exact
    assert "aten." in reading.notes[0]
    assert reading.at_least == reading.peak_bytes == (reading.at_most or 0) - 16


@pytest.mark.parametrize("step", [lambda x: (x @ x.t() + 1).softmax(-1), lambda x: (x % 3, x.clamp(0, 1), x.clone())])
def test_an_operator_that_resizes_nothing_stays_exact(step: Callable[[torch.Tensor], Any]) -> None:
    assert reading_of(step).exact


def test_a_deterministic_train_step_stays_exact() -> None:
    def build(device: str) -> Callable[[], None]:
        net = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 10)).to(
            device
        )
        optimizer = torch.optim.AdamW(net.parameters())
        x, y = torch.randn(32, 64, device=device), torch.randint(0, 10, (32,), device=device)

        def step() -> None:
            torch.use_deterministic_algorithms(True)
            try:
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()
            finally:
                torch.use_deterministic_algorithms(False)

        return step

    assert memfix.peak(build).exact


def test_memory_that_is_not_filled_takes_nothing_more() -> None:
    def step(x: torch.Tensor) -> Any:
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        try:
            return x.kthvalue(3, 1)
        finally:
            torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]

    assert reading_of(step).peak_bytes == 600
