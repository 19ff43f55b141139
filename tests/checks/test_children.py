"""How child processes start: by a fork only where nothing can hang in it."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from forked_python import forked_python

from memfix import Contract, Dim, TensorSpec
from memfix.checks import children
from memfix.checks.effort import get_effort
from memfix.checks.examine import Tools, run_check
from memfix.checks.plan import Check
from memfix.laws import SpeedBudget
from memfix.meters import cuda, get_meter


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A Linux process with one thread and no GPU."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(cuda, "gpu_unavailable_reason", lambda: "torch sees no GPU")
    monkeypatch.setattr(children, "_has_autograd_threads", lambda: False)
    return monkeypatch


def test_a_process_without_threads_and_gpu_forks(quiet: pytest.MonkeyPatch) -> None:
    assert children.start_method() == "fork"


def test_another_thread_a_gpu_or_another_system_spawn(quiet: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (threading, "active_count", lambda: 2),
        (cuda, "gpu_unavailable_reason", lambda: None),
        (children, "_has_autograd_threads", lambda: True),
        (sys, "platform", "darwin"),
    ):
        with pytest.MonkeyPatch.context() as changed:
            changed.setattr(module, name, value)
            assert children.start_method() == "spawn"


@pytest.mark.skipif(sys.platform != "linux", reason="threads are looked up in /proc")
def test_autograd_has_threads_after_a_simulated_backward() -> None:
    program = """
import memfix, torch
from memfix.checks.children import _has_autograd_threads
def build(device):
    x = torch.ones(4, device=device, requires_grad=True)
    return lambda: (x * x).sum().backward()
print(_has_autograd_threads())
memfix.peak(build)
print(_has_autograd_threads())
"""
    assert forked_python("-c", program).stdout.split() == ["False", "True"]


def test_all_checks_but_speed_run_on_one_core() -> None:
    """Two threads on busy cores: ``memfix gate kda_wide`` took 67 s of CPU time where one took 15."""
    threads: list[int] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        threads.append(torch.get_num_threads())
        return 2 * x

    law = SpeedBudget("double", case="only", phase="forward", times_naive=1e9)
    contract = Contract(
        "double",
        naive=lambda x: x + x,
        forms={"double": double},
        dims={"N": Dim(1, 4)},
        inputs=[TensorSpec("x", "N")],
        cases={"only": {"N": 4}},
        speed=[law],
    )
    tools = Tools(get_meter("simulated"), get_effort("dev"))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        run_check(Check("double", "equality", "double", dtype="float32"), contract, tools)
        assert {*threads} == {1}
        threads.clear()
        run_check(Check("double", "speed", "double", case="only", law=law), contract, tools)
        assert {*threads} == {3}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
