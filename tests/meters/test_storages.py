"""Memory that changes its size or its owner: resized storages, converted modules, copies of storages, DLPack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memfix

SIZE = 600 * 700 * 4
LARGER = 700 * 900 * 4


def reading_of(step: Callable[[torch.Tensor], Any]) -> memfix.Reading:
    def build(device: str) -> Callable[[], Any]:
        x = torch.randn(600, 700, device=device)
        return torch.no_grad()(lambda: step(x))

    return memfix.peak(build)


def resized(x: torch.Tensor) -> Any:
    return x.clone().resize_(900, 700)


def storage_resized(x: torch.Tensor) -> Any:
    made = x.clone()
    made.untyped_storage().resize_(LARGER)
    return made


def written_into(x: torch.Tensor) -> Any:
    return torch.cat([x, x[:300]], out=x.clone())


def moved_and_back(x: torch.Tensor) -> Any:
    parameter = nn.Parameter(x.clone())
    parameter.data = parameter.data.cpu()
    made = x.exp()
    assert not parameter.is_cuda
    parameter.data = parameter.data.to(x.device)
    assert parameter.is_cuda
    return parameter, made


def through_dlpack(x: torch.Tensor) -> Any:
    made = torch.from_dlpack(x.exp())
    del x
    return made + 1


def raised_and_caught(x: torch.Tensor) -> Any:
    try:
        return x.exp() @ x.sin()
    except RuntimeError:
        return x.cos()


@pytest.mark.parametrize(
    ("step", "measured"),
    [
        (resized, SIZE + LARGER),
        (storage_resized, SIZE + LARGER),
        (written_into, SIZE + LARGER),
        (moved_and_back, 2 * SIZE),
        (lambda x: (x.untyped_storage().clone(), x.untyped_storage().cpu()), SIZE),
        (through_dlpack, 2 * SIZE),
        (lambda x: torch.from_dlpack(torch.utils.dlpack.to_dlpack(x.exp())) + 1, 2 * SIZE),
        (lambda x: x.exp().share_memory_() + 1, 2 * SIZE),
        (raised_and_caught, 2 * SIZE),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_memory_that_changes_its_size_or_owner_is_exact(step: Callable[[torch.Tensor], Any], measured: int) -> None:
    reading = reading_of(step)
    assert (reading.peak_bytes, reading.exact) == (measured, True)


def test_a_storage_resized_to_its_own_size_is_copied_too() -> None:
    def step(x: torch.Tensor) -> Any:
        made = x.clone()
        made.untyped_storage().resize_(SIZE)
        return made

    assert reading_of(step).peak_bytes == 2 * SIZE


def test_a_view_that_was_handed_on_by_dlpack_keeps_the_memory() -> None:
    def step(x: torch.Tensor) -> Any:
        view = torch.from_dlpack(x.exp())
        return view, x.sin()

    assert reading_of(step).held_bytes == 2 * SIZE


def test_a_tensor_knows_whether_it_is_set_to_another() -> None:
    def step(x: torch.Tensor) -> Any:
        assert x.is_set_to(x.view(600, 700))
        assert not x.is_set_to(x.t())
        assert not x.is_set_to(x.clone())

    reading_of(step)


def test_a_module_converted_during_a_graph_frees_what_the_graph_does_not_save() -> None:
    """Measured on an H200: 1,741,604 bytes. A swapped parameter would leave the graph the old one, whose gradient it
    would then get."""

    def build(device: str) -> Callable[[], None]:
        net = nn.Sequential(nn.Linear(400, 800), nn.SiLU(), nn.Linear(800, 400)).to(device)
        x = torch.randn(64, 400, device=device)

        def step() -> None:
            net.half()
            made = net(x.half())
            net.float()
            made.square().mean().backward()
            assert all(weight.grad is not None for weight in net.parameters())
            net.zero_grad()

        return step

    reading = memfix.peak(build)
    assert (reading.peak_bytes, reading.exact) == (1_741_604, True)


def test_a_converted_module_converts_its_gradients() -> None:
    def build(device: str) -> Callable[[], None]:
        net = nn.Linear(40, 40).to(device)
        x = torch.randn(64, 40, device=device)

        def step() -> None:
            net(x).sum().backward()
            weight = net.weight
            net.to(torch.float64)
            assert net.weight is weight
            assert weight.grad is not None
            assert weight.grad.dtype == weight.dtype == torch.float64
            net.float()
            net.zero_grad()

        return step

    assert memfix.peak(build).exact


def test_gradients_of_a_batch_are_not_added_in_place() -> None:
    """Measured on an H200: 24,000,288 bytes. The engine adds wrapped tensors into new ones."""

    def build(device: str) -> Callable[[], Any]:
        x = torch.randn(500, 500, device=device, requires_grad=True)

        def step() -> Any:
            made = (x[:8].exp() @ x).sum(1)
            return torch.autograd.grad(made, x, torch.eye(8, device=device), is_grads_batched=True)

        return step

    reading = memfix.peak(build)
    assert (reading.peak_bytes, reading.exact) == (24_000_288, True)


def test_a_module_on_meta_gets_its_memory() -> None:
    def build(device: str) -> Callable[[], Any]:
        def step() -> Any:
            with torch.device("meta"):
                net = nn.Linear(100, 100, bias=False)
            net.to_empty(device=device)
            net.half()
            net.to("meta")
            return net.to_empty(device=device)

        return step

    assert memfix.peak(build).held_bytes == 20_000
