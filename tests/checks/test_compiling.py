"""Kernels that an interpreter runs and a compiler refuses, or that no GPU has the shared memory for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from memfix import Contract, Dim, Form, TensorSpec
from memfix.checks import compiling
from memfix.checks.compiling import check_compiles, compile_ahead
from memfix.checks.effort import PROFILES
from memfix.checks.examine import Tools, run_check
from memfix.checks.finding import Finding
from memfix.checks.form_call import StepOf
from memfix.checks.inputs import Draw
from memfix.checks.plan import gate_plan
from memfix.contract import Case
from memfix.meters import get_meter
from memfix.meters.simulated.gpus import get_gpu
from memfix.registry import all_contracts

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def double_until_the_end(x, y, n, BLOCK: tl.constexpr):
    for start in range(0, n, BLOCK):
        if start > n:
            break
        tl.store(y + start, 2 * tl.load(x + start))


@triton.jit
def twice(values):
    """Python knows what a list is, and Triton does not know what can be done with it."""
    parts = [values]
    parts.append(values)
    return parts[0] + parts[1]


@triton.jit
def double_with_help(x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, twice(tl.load(x + at)))


@triton.jit
def double_in_stages(x, y, n, BLOCK: tl.constexpr):
    """``BLOCK`` stages of a product's operands are under way at a time, each in shared memory."""
    rows, columns = tl.arange(0, 128), tl.arange(0, 64)
    sum = tl.zeros([128, 128], tl.float32)
    for start in tl.range(0, n, 64, num_stages=BLOCK):
        left = tl.load(x + rows[:, None] * n + start + columns[None, :])
        right = tl.load(x + (start + columns)[:, None] * 128 + rows[None, :])
        sum = tl.dot(left, right, sum)
    tl.store(y + rows[:, None] * 128 + rows[None, :], sum)


tuned_double = triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])(double)


def naive(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def form_of(kernel: Any, *, backward: Any = None, block: int = 128) -> Form:
    """It launches ``kernel``, and in its backward the other."""

    def launch(kernel: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        block_if_fixed = {} if kernel is tuned_double else {"BLOCK": block}
        kernel[(1,)](x, y, x.numel(), **block_if_fixed)
        return y

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return launch(kernel, x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return launch(backward or kernel, grad)

    return Form(Doubled.apply, has_kernels=True)


def contract_of(form: Form) -> Contract:
    return Contract(
        "doubling",
        naive=naive,
        forms={"kernel": form},
        dims={"N": Dim(1, 100)},
        inputs=[TensorSpec("x", "N", grad=True)],
        cases={"small": {"N": 64, "dtype": "float32"}, "large": {"N": 4096, "dtype": "bfloat16"}},
    )


def compiled(form: Form, gpu: str = "H200") -> Finding:
    return check_compiles(contract_of(form), "kernel", get_meter("simulated", gpu))


def law_of(form: Form, asked_for: str = "simulated") -> Finding:
    """As an examination finds it."""
    contract, meter = contract_of(form), get_meter(asked_for)
    (check,) = (check for check in gate_plan(contract, meter) if check.kind == "compile")
    (law,) = run_check(check, contract, Tools(meter, PROFILES["dev"])).findings
    return law


def test_kernels_are_compiled_where_the_host_meter_is_asked_for() -> None:
    assert law_of(form_of(double), "host") == law_of(form_of(double)) == compiled(form_of(double))


def test_each_way_of_launching_a_kernel_is_compiled_once() -> None:
    found = compiled(form_of(double))
    assert found.status == "pass", found.text()
    # in two dtypes; their sizes are multiples of 16 both
    assert found.message == "2 kernels compile for H200, with at most 0 bytes of shared memory, allowed 232,448"


def test_what_calls_will_launch_is_compiled_before_them() -> None:
    gpu = get_gpu("H200")
    draws = [Draw(Case("drawn", {"N": size}, dtype="float32")) for size in (64, 65, 80)]

    def steps_of(form: Form) -> list[StepOf]:
        return [StepOf(contract_of(form), "kernel", draw, "train") for draw in draws]

    with compiling.compiling_for(gpu):
        double.device_caches.clear()
        compile_ahead(steps_of(form_of(double)))
        ((kernels, *_),) = double.device_caches.values()
        assert len(kernels) == 2  # of a multiple of 16, and of any number
        compile_ahead(steps_of(form_of(double_until_the_end)))  # refused, and left to the call
        compile_ahead(steps_of(form_of(tuned_double)))
        assert len(kernels) == 2


def test_what_a_compiler_refuses_is_named_with_its_line() -> None:
    found = compiled(form_of(double_until_the_end))
    assert found.status == "fail"
    assert found.message.startswith("double_until_the_end does not compile for H200: unsupported AST node type: Break")
    assert found.subject == "doubling/kernel [small, forward]"
    assert found.source.endswith(f"test_compiling.py:{_line_of('            break')}")
    assert found.details[0].endswith("in double_until_the_end   break")


def test_the_line_may_be_that_of_a_function_it_calls() -> None:
    found = compiled(form_of(double_with_help))
    assert found.status == "fail"
    assert found.message.startswith("double_with_help does not compile for H200: ")
    assert found.source.endswith(f"test_compiling.py:{_line_of('    parts.append(values)')}")


def test_a_kernel_of_the_backward_is_compiled_too() -> None:
    found = compiled(form_of(double, backward=double_until_the_end))
    assert found.subject == "doubling/kernel [small, train]"
    assert found.status == "fail"


@pytest.mark.parametrize(("gpu", "allowed"), [("H200", "232,448"), ("A100", "166,912")])
def test_more_shared_memory_than_a_block_has_fails(gpu: str, allowed: str) -> None:
    found = compiled(form_of(double_in_stages, block=4), gpu)
    assert found.status == "fail"
    assert found.message.startswith("double_in_stages needs ")
    assert found.message.endswith(f" bytes of shared memory, and a block on {gpu} has at most {allowed}")
    assert found.figures["shared_bytes"] > int(allowed.replace(",", ""))
    assert "def double_in_stages" in found.details[0]
    assert compiled(form_of(double_in_stages, block=2), gpu).status == "pass"


def test_what_a_gpu_tunes_is_said_to_be_left_out() -> None:
    found = compiled(form_of(double, backward=tuned_double))
    assert found.status == "pass"
    assert found.message.endswith("; not compiled, since a GPU chooses how: double")


def test_nothing_is_left_behind_for_a_real_gpu() -> None:
    from triton.runtime import driver

    before = driver._active
    compiled(form_of(double))
    compiled(form_of(double), "A100")
    assert driver._active is before
    assert sorted(double.device_caches) == [-90, -80]


def test_it_is_one_of_the_laws_of_a_form_with_kernels() -> None:
    law = law_of(form_of(double_until_the_end))
    assert (law.check, law.status) == ("compile", "fail")


def test_a_step_that_cannot_be_simulated_is_an_error_of_this_law() -> None:
    law = law_of(Form(lambda x: x.to_sparse().to_dense(), has_kernels=True))
    assert (law.check, law.status) == ("compile", "error")
    assert law.message.startswith("could not be measured, meter simulated: the step uses what cannot be simulated")


def test_a_cache_that_cannot_be_written_is_no_fault_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(double), "warmup", no_room)
    law = law_of(form_of(double))
    assert (law.check, law.status) == ("compile", "error")
    assert law.message.endswith("No space left on device")


def test_without_triton_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    found = compiled(form_of(double))
    assert (found.status, found.message) == ("note", "kernels not compiled for H200: triton is not installed")


INTERPRETING = """
from memfix.checks.compiling import check_compiles, compile_ahead
from memfix.checks.form_call import StepOf
from memfix.checks.inputs import Draw
from memfix.contract import Case
from memfix.meters import get_meter
from memfix.meters.simulated.gpus import get_gpu
from memfix.registry import all_contracts
kda, meter = all_contracts()["kda"], get_meter("simulated")
print(meter.measure(StepOf(kda, "triton", Draw(kda.cases["small"]), "train")).peak_bytes)
print(check_compiles(kda, "triton", meter).message)
"""


def test_where_kernels_are_interpreted_they_are_measured_all_the_same_and_not_compiled() -> None:
    """As by somebody who debugs them, and has the variable in his shell."""
    kda = all_contracts()["kda"]
    here = get_meter("simulated").measure(StepOf(kda, "triton", Draw(kda.cases["small"]), "train"))
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETING],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        str(here.peak_bytes),
        "kernels not compiled for H200: TRITON_INTERPRET is set, and Triton interprets them",
    ], done.stderr


def _line_of(text: str) -> int:
    with open(__file__, encoding="utf-8") as file:
        return file.read().splitlines().index(text) + 1
