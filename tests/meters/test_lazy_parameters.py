"""Lazy modules on the simulated GPU take what modules with a shape take, and are lazy again afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import memfix


def trained(make: Callable[[str], nn.Module]) -> Callable[[str], Callable[[], None]]:
    def build(device: str) -> Callable[[], None]:
        model, x = make(device), torch.randn(6, 4, device=device)
        model(x)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step() -> None:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return build


def layers(first: nn.Module, norm: nn.Module, last: nn.Module) -> nn.Module:
    return nn.Sequential(first, norm, nn.ReLU(), last)


def test_a_lazy_module_takes_what_one_with_a_shape_takes() -> None:
    plain = memfix.peak(trained(lambda d: layers(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).to(d)))
    lazy: list[Callable[[str], nn.Module]] = [
        lambda d: layers(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.LazyLinear(3)).to(d),
        lambda d: layers(nn.LazyLinear(5, device=d), nn.LazyBatchNorm1d(device=d), nn.LazyLinear(3, device=d)),
        lambda d: (
            layers(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.LazyLinear(3)).to(torch.float64).to(d, torch.float32)
        ),
    ]
    for make in lazy:
        reading = memfix.peak(trained(make))
        assert (reading.peak_bytes, reading.base_bytes) == (plain.peak_bytes, plain.base_bytes)


def test_a_lazy_module_of_outside_is_lazy_again() -> None:
    model: Any = layers(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.LazyLinear(3))
    before = {id(parameter) for parameter in model.parameters()}
    memfix.peak(trained(model.to))
    assert {id(parameter) for parameter in model.parameters()} == before
    assert [type(layer).__name__ for layer in model] == ["LazyLinear", "LazyBatchNorm1d", "ReLU", "LazyLinear"]
    assert model(torch.randn(6, 7)).shape == (6, 3)
    assert model[0].weight.shape == (5, 7)
