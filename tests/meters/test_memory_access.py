"""The memory of simulated tensors: it is never written to, its addresses tell tensors apart, and it is copied as torch
copies real memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from workloads import WORKLOADS

import memfix
from memfix.meters.simulated.environment import simulated_gpu
from memfix.meters.simulated.gpus import H200
from memfix.meters.simulated.memory_guard import is_refused_access
from memfix.meters.simulated.storages import Storages


# ---------------------------------------------------------------- the guard
def refuses_writes(tensor: torch.Tensor) -> bool:
    try:
        torch._C.TensorBase.data_ptr(tensor)  # not the patched one
    except RuntimeError as error:
        return is_refused_access(error)
    return False


@pytest.mark.parametrize("name", sorted(WORKLOADS)[::9])
def test_no_kernel_can_write_into_a_simulated_tensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a real GPU such a kernel would run, write to address zero and leave the CUDA context unusable."""
    real, open_to_writes = Storages.add_result, []

    def add_result(storages: Storages, tensor: torch.Tensor, operator: Any, *others: Any) -> None:
        if isinstance(tensor, FakeTensor) and tensor.numel() and not refuses_writes(tensor):
            open_to_writes.append(str(operator))
        real(storages, tensor, operator, *others)

    monkeypatch.setattr(Storages, "add_result", add_result)
    memfix.peak(WORKLOADS[name])
    assert open_to_writes == []


def test_a_composite_that_launches_a_kernel_of_its_own_is_run_whole() -> None:
    """In some versions of torch the composite ``ldexp`` launches one if the exponents are integers."""

    def build(device: str) -> Callable[[], Any]:
        x, n = torch.rand(1003, device=device), torch.randint(1, 60, (1003,), device=device)
        return lambda: torch.ldexp(x, n % 5)

    reading = memfix.peak(build)
    assert reading.exact
    assert reading.held_bytes == 1003 * 4


# ---------------------------------------------------------------- addresses
def test_addresses_tell_tensors_apart() -> None:
    with simulated_gpu(H200, hides_modes=False):
        one, other = torch.zeros(100, device="cuda"), torch.zeros(100, device="cuda")
        assert one.data_ptr() != other.data_ptr()
        assert one[3:].data_ptr() == one.data_ptr() + 12
        assert one[3:].untyped_storage().data_ptr() == one.data_ptr() != 0
        assert torch.empty(0, device="cuda").data_ptr() == 0
        real = torch.nn.Parameter(torch.ones(2))
        assert torch._C._has_storage(real)
    assert torch.ones(2).data_ptr() != 0


# ---------------------------------------------------------------- deep copies
def net_with_gradients(device: str) -> nn.Module:
    net = nn.Sequential(nn.Linear(30, 30), nn.BatchNorm1d(30)).to(device)
    net(torch.ones(4, 30, device=device)).sum().backward()
    return net


def views(device: str) -> list[torch.Tensor]:
    whole = torch.zeros(1000, device=device)
    return [whole[:10], whole[20:30], whole.view(torch.int32)[::7], torch.zeros(8, device=device)]


def of_state(device: str) -> dict[str, torch.Tensor]:
    return net_with_gradients(device).state_dict()


def with_gradient_and_attribute(device: str) -> torch.Tensor:
    tensor = torch.ones(5, device=device, requires_grad=True)
    tensor.square().sum().backward()
    tensor.note = [tensor.grad]  # type: ignore[attr-defined]
    return tensor


def described(value: Any, storages: dict[int, int]) -> Any:
    """The tensors of a copy: shapes, the sizes of their storages, and which of them share one."""
    if isinstance(value, nn.Module):
        return [described(tensor, storages) for tensor in (*value.parameters(), *value.buffers())]
    if isinstance(value, dict):
        return [described(each, storages) for each in value.values()]
    if isinstance(value, list):
        return [described(each, storages) for each in value]
    storage = value.untyped_storage()
    shared = storages.setdefault(storage._cdata, len(storages))
    gradient = None if value.grad is None else described(value.grad, storages)
    own = [described(each, storages) for each in (getattr(value, "note", []) if value.is_leaf else [])]
    is_parameter = isinstance(value, nn.Parameter)
    return (
        tuple(value.shape),
        value.stride(),
        storage.nbytes(),
        shared,
        value.requires_grad,
        is_parameter,
        gradient,
        own,
    )


@pytest.mark.parametrize("make", [net_with_gradients, views, of_state, with_gradient_and_attribute])
def test_a_deep_copy_has_the_memory_that_a_real_one_has(make: Callable[[str], Any]) -> None:
    found = []

    def build(device: str) -> Callable[[], Any]:
        given = make(device)

        def step() -> Any:
            found.append(described(copied := copy.deepcopy(given), {}))
            return copied

        return step

    assert memfix.peak(build).exact
    assert found[-1] == described(copy.deepcopy(make("cpu")), {})


def test_a_deep_copy_takes_the_whole_storage_and_one_element() -> None:
    def build(device: str) -> Callable[[], Any]:
        part = torch.zeros(1000, device=device)[:10]
        return lambda: copy.deepcopy(part)

    reading = memfix.peak(build)
    assert (reading.peak_bytes, reading.held_bytes) == (4004, 4000)


def test_a_deep_copy_has_the_values() -> None:
    def build(device: str) -> Callable[[], Any]:
        lengths = torch.tensor([3, 4, 5], device=device)[1:]
        return lambda: torch.zeros(int(copy.deepcopy(lengths).sum()), device=device)

    reading = memfix.peak(build)
    assert reading.exact
    assert reading.held_bytes == 9 * 4
