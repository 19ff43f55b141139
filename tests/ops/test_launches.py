"""Launches go to a compiled kernel directly where an earlier launch was alike."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

pytest.importorskip("triton")
from triton.tools.tensor_descriptor import TensorDescriptor

from memfix.ops import launches
from memfix.ops.launches import launch


class Kernel:
    """As Triton's: found by a grid, it compiles, runs and returns what was compiled, which is found by a grid too."""

    arg_names = ("tensor", "size", "SCALE", "BLOCK")

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(tensor: torch.Tensor, size: int, **constants: Any) -> Any:
            self.calls.append(("looked at", grid, size, constants["BLOCK"]))
            return Compiled(self.calls)

        return run


class Compiled:
    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda tensor, size, SCALE, BLOCK: self.calls.append(("run", grid, size, BLOCK))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(launches, "is_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launches, "_compiled", {})
    return Kernel()


def call(kernel: Kernel, tensor: Any, *, grid: tuple[int, ...] = (3,), size: float = 8, block: int = 4) -> str:
    launch(kernel, grid, tensor, size, BLOCK=block, SCALE=1, num_warps=4, num_stages=2)
    return str(kernel.calls[-1][0])


def test_a_launch_like_an_earlier_one_goes_to_the_compiled_kernel(kernel: Kernel) -> None:
    assert call(kernel, torch.zeros(8)) == "looked at"
    assert call(kernel, torch.ones(8), grid=(5, 2)) == "run"
    assert kernel.calls[-1] == ("run", (5, 2, 1), 8, 4)  # constants in the order of the kernel's parameters


@pytest.mark.parametrize(
    "other",
    [
        {"tensor": torch.zeros(8, dtype=torch.float16)},
        {"tensor": torch.zeros(9)[1:]},  # not aligned
        {"size": 16},
        {"block": 8},
    ],
)
def test_another_launch_is_looked_at(kernel: Kernel, other: dict[str, Any]) -> None:
    call(kernel, torch.zeros(8))
    assert call(kernel, **({"tensor": torch.zeros(8)} | other)) == "looked at"


def test_descriptors_are_alike_by_their_dtype_and_block(kernel: Kernel) -> None:
    def described(block: int, **options: Any) -> Any:
        return TensorDescriptor(torch.zeros(8, 16, **options), [8, 16], [16, 1], [block, 16])

    assert call(kernel, described(4)) == "looked at"
    assert call(kernel, described(4)) == "run"
    assert call(kernel, described(8)) == "looked at"
    assert call(kernel, described(4, dtype=torch.bfloat16)) == "looked at"
    with FakeTensorMode():
        assert [call(kernel, described(4)), call(kernel, described(4))] == ["looked at"] * 2


def test_a_number_of_another_type_is_another_number(kernel: Kernel) -> None:
    call(kernel, torch.zeros(8), size=1)
    assert call(kernel, torch.zeros(8), size=1.0) == "looked at"
    assert call(kernel, torch.zeros(8), size=True) == "looked at"


def test_tensors_that_stand_for_others_and_interpreted_kernels_are_always_looked_at(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeTensorMode():
        fake = torch.empty(8)
        assert [call(kernel, fake), call(kernel, fake)] == ["looked at"] * 2
    monkeypatch.setattr(launches, "is_interpreted", lambda: True)
    assert [call(kernel, torch.zeros(8)), call(kernel, torch.zeros(8))] == ["looked at"] * 2


def test_a_kernel_is_launched_on_the_device_of_its_tensors(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        current.append(index)
        kernel.calls.append(("enters", index))
        yield
        current.pop()
        kernel.calls.append(("leaves", index))

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    with FakeTensorMode():
        call(kernel, torch.empty(8, device="cuda:1"))
    assert kernel.calls == [("enters", 1), ("looked at", (3,), 8, 4), ("leaves", 1)]


def test_every_op_launches_its_triton_kernels_by_launch() -> None:
    """``kernel[grid](...)`` would launch on the current device, which may not be that of the tensors."""
    folder = Path(launches.__file__).parent
    for path in folder.rglob("*.py"):
        tree = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        imported = {
            alias.asname or alias.name for node in tree if isinstance(node, ast.ImportFrom) for alias in node.names
        }
        for node in tree:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                called = node.func.value
                assert not isinstance(called, ast.Attribute), f"{path}:{node.lineno}"
                assert not isinstance(called, ast.Name) or called.id not in imported, f"{path}:{node.lineno}"


def test_launches_with_ever_new_sizes_are_forgotten(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "_MOST_KEPT", 2)
    for size in (1, 2, 3):
        call(kernel, torch.zeros(8), size=size)
    assert call(kernel, torch.zeros(8), size=3) == "run"
    assert call(kernel, torch.zeros(8), size=1) == "looked at"
