"""What an optimizer decides by its parameters' classes, and a GradScaler by its scale."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import memfix


class OwnParameter(nn.Parameter):
    pass


def own(device: str) -> nn.Parameter:
    return OwnParameter(torch.randn(500, 600, device=device))


def moved(device: str) -> nn.Parameter:
    net = nn.Module()
    net.own = OwnParameter(torch.randn(500, 600))
    return net.to(device).own  # type: ignore[return-value]


@pytest.mark.parametrize("make", [own, moved])
def test_an_optimizer_loops_over_parameters_of_a_subclass(make: Callable[[str], nn.Parameter]) -> None:
    """Measured on an H200: 3,600,008 bytes; one kernel for both parameters takes 4,800,000."""

    def build(device: str) -> Callable[[], None]:
        parameters = [nn.Parameter(torch.randn(500, 600, device=device)), make(device)]
        optimizer = torch.optim.Adagrad(parameters, 0.1)

        def step() -> None:
            optimizer.zero_grad()
            sum((one.abs() ** 2).sum() for one in parameters).backward()  # type: ignore[union-attr]
            optimizer.step()

        return step

    reading = memfix.peak(build)
    assert (reading.peak_bytes, reading.exact) == (3_600_008, True)


@pytest.mark.parametrize(("scale", "exact"), [(2.0**16, True), (2.0**30, False)])
def test_a_scale_under_which_gradients_overflow_is_an_estimate(scale: float, exact: bool) -> None:
    def build(device: str) -> Callable[[], None]:
        net, x = nn.Linear(64, 64).to(device), torch.randn(32, 64, device=device)
        optimizer, scaler = torch.optim.AdamW(net.parameters()), torch.amp.GradScaler(device, init_scale=scale)

        def step() -> None:
            optimizer.zero_grad()
            scaler.scale(net(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()

        return step

    reading = memfix.peak(build)
    assert reading.exact is exact
    assert exact or "1,073,741,824" in reading.notes[0]
