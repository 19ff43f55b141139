"""Libtorch's formulas run in place under the meter as on a GPU, and libtorch is left as it was."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

import memfix
from memfix.meters.simulated import fake_device, hide_dispatch_modes
from memfix.meters.simulated.environment import simulated_gpu
from memfix.meters.simulated.gpus import H200

N = 1 << 20
PYTHON_KEY = torch._C.DispatchKey.Python
OTHER_MODE = "another dispatch mode is active in the step, and what it keeps is not known"

pytestmark = pytest.mark.skipif(
    fake_device.self_test().cannot_hide_modes is not None, reason="this torch's formulas cannot be followed"
)


class PassesOn(TorchDispatchMode):
    """A mode of the user's own, which does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def binary_cross_entropy(device: str) -> Any:
    x = torch.empty(N, device=device, requires_grad=True)
    target, upstream = torch.empty(N, device=device), torch.empty(N, device=device)

    def step() -> None:
        F.binary_cross_entropy_with_logits(x, target, reduction="none").backward(upstream)
        x.grad = None

    return step


def median(device: str) -> Any:
    x, upstream = torch.empty(1000, 1024, device=device, requires_grad=True), torch.empty(1000, device=device)

    def step() -> None:
        x.median(1).values.backward(upstream)
        x.grad = None

    return step


def index(device: str) -> Any:
    x, upstream = torch.empty(N, device=device, requires_grad=True), torch.empty(4, device=device)
    rows = torch.empty(4, dtype=torch.int64, device=device)

    def step() -> None:
        x[rows].backward(upstream)
        x.grad = None

    return step


def linear_of_transposed(device: str) -> Any:
    x = torch.empty(128, 32, 64, device=device).transpose(0, 1)
    weight, bias = torch.empty(256, 64, device=device), torch.empty(256, device=device)
    return lambda: F.linear(x, weight, bias)


@pytest.mark.parametrize(
    ("build", "peak_bytes", "new_tensor_bytes"),
    [
        (binary_cross_entropy, 2 * 4 * N, 4 * N),  # the loss, and the sigmoid that becomes the gradient
        (median, 1000 * 1024 * 4 + 1000 * (4 + 8), 1000 * 1024 * 4),  # zeros that are written into, values, indices
        (index, 4 * N + 16 + 129, 4 * N),  # zeros that are added into, the rows, sorting them
        (linear_of_transposed, 32 * 128 * 256 * 4, 32 * 128 * 256 * 4),  # the bias is added into the product
    ],
)
def test_a_formula_writes_in_place_as_without_a_mode(
    build: Any, peak_bytes: int, new_tensor_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert memfix.peak(build).peak_bytes == peak_bytes
    monkeypatch.setattr(fake_device, "self_test", lambda: fake_device.SelfTest(None, "planted"))
    watched = memfix.peak(build)
    assert watched.peak_bytes == peak_bytes + new_tensor_bytes
    assert watched.notes[0] == "planted"


def test_a_mode_of_the_users_own_makes_the_reading_an_estimate() -> None:
    def build(device: str) -> Any:
        step = median(device)

        def under_a_mode() -> None:
            with PassesOn():
                step()

        return under_a_mode

    reading = memfix.peak(build)
    assert not reading.exact
    assert OTHER_MODE in reading.notes


def test_a_mode_around_the_measurement_is_counted_as_ours() -> None:
    with PassesOn():
        assert OTHER_MODE not in memfix.peak(median).notes


# ---------------------------------------------------------------- what is left behind
def has_python_key(tensor: torch.Tensor) -> bool:
    return torch._C._dispatch_keys(tensor).has(PYTHON_KEY)


def test_fake_tensors_that_outlive_the_world_carry_their_key_and_work() -> None:
    with simulated_gpu(H200, hides_modes=True):
        made = torch.empty(3, 4, device="cuda")
        weight = torch.empty(4, 2, device="cuda", requires_grad=True)
        product = made @ weight
        assert not any(map(has_python_key, (made, weight, product)))
    assert all(map(has_python_key, (made, weight, product)))
    later = (made + 1).sum()
    assert isinstance(later, FakeTensor)
    assert (later.device.type, later.shape) == ("cuda", ())
    # in a torch without a GPU no other thread waits for work on one, once a backward pass has run on the CPU
    with torch.autograd.set_multithreading_enabled(False):
        product.sum().backward()
    assert weight.grad is not None
    assert weight.grad.shape == (4, 2)


def test_what_memory_held_before_does_not_matter_to_where_a_tensor_has_its_device() -> None:
    expected, found = hide_dispatch_modes._layout(), []
    for _ in range(20):
        fill_freed_memory_with_ones()
        found.append(hide_dispatch_modes._layout.__wrapped__())
    assert expected.asks_python
    assert found == [expected] * len(found)


def fill_freed_memory_with_ones() -> None:
    """Fill part of the memory that torch will get for tensors."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    addresses = [(libc.malloc(size), size) for size in range(160, 320, 16) for _ in range(3)]
    for address, size in addresses:
        ctypes.memset(address, 0xFF, size)
        libc.free(address)


@pytest.mark.parametrize("error", [None, KeyError("planted")])
def test_the_import_slot_of_libtorch_holds_its_old_value(error: Exception | None) -> None:
    slot = ctypes.c_void_p.from_address(hide_dispatch_modes._import_slot())
    before, inside = slot.value, []

    def build(device: str) -> Any:
        inside.append(slot.value)
        if error is not None:
            raise error
        return lambda: torch.empty(1, device=device)

    if error is None:
        memfix.peak(build)
    else:
        with pytest.raises(KeyError, match="planted"):
            memfix.peak(build)
    assert inside != [before]
    assert slot.value == before


def test_a_real_tensor_keeps_its_keys() -> None:
    real = torch.ones(3)
    before = torch._C._dispatch_keys(real).raw_repr()
    hide_dispatch_modes.show_python_key([real])
    hide_dispatch_modes.hide_python_key([real])
    assert torch._C._dispatch_keys(real).raw_repr() == before


def test_the_gradient_of_a_real_tensor_is_right_after_measuring() -> None:
    memfix.peak(index)
    x = torch.arange(4.0, requires_grad=True)
    x[torch.tensor([1, 1, 3])].sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 2, 0, 1]
