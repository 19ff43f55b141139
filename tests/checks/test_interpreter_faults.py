"""An error of Triton's interpreter is not measured, an error of a kernel is a failure; and numpy may be any."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memfix import Contract, Dim, Form, TensorSpec
from memfix.checks import interpreter
from memfix.checks.effort import PROFILES
from memfix.checks.equality import check_equality, check_equality_at
from memfix.checks.examine import examine
from memfix.checks.finding import Finding
from memfix.checks.inputs import Draw
from memfix.checks.interpreter_faults import interpreter_fault
from memfix.errors import EXIT_NOT_MEASURED
from memfix.gate.judge import judge
from memfix.meters import get_meter

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

ROOT = Path(__file__).resolve().parents[2]


@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def adds_other_shapes(x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) + tl.arange(0, 2 * BLOCK), mask=at < n)


@triton.jit
def asserts_what_is_not_so(x, y, n, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 1, "one at a time")


@triton.jit
def calls_with_wrong_arguments(x, y, n, BLOCK: tl.constexpr):
    tl.store(y, tl.load(x, no_such_argument=1))


@triton.jit
def loops_up_to_a_block(x, y, n, BLOCK: tl.constexpr):
    for _ in range(0, n + tl.arange(0, BLOCK)):
        tl.store(y, tl.load(x))


@triton.jit
def uses_a_name_that_is_none(x, y, n, BLOCK: tl.constexpr):
    tl.store(y, no_such_name)  # noqa: F821


@triton.jit
def writes_assembly(x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    there = tl.load(x + at, mask=at < n)
    twice = tl.inline_asm_elementwise("add.f32 $0, $1, $1;", "=r,r", [there], tl.float32, is_pure=True, pack=1)
    tl.store(y + at, twice, mask=at < n)


def naive(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def launched(kernel: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    kernel[(1,)](x, y, x.numel(), BLOCK=16)
    return y


def doubled(x: torch.Tensor) -> torch.Tensor:
    return launched(double, x)


def other_shapes(x: torch.Tensor) -> torch.Tensor:
    return launched(adds_other_shapes, x)


def false_assertion(x: torch.Tensor) -> torch.Tensor:
    return launched(asserts_what_is_not_so, x)


def wrong_arguments(x: torch.Tensor) -> torch.Tensor:
    return launched(calls_with_wrong_arguments, x)


def endless_loop(x: torch.Tensor) -> torch.Tensor:
    return launched(loops_up_to_a_block, x)


def unknown_name(x: torch.Tensor) -> torch.Tensor:
    return launched(uses_a_name_that_is_none, x)


def assembly(x: torch.Tensor) -> torch.Tensor:
    return launched(writes_assembly, x)


def incompatible(x: torch.Tensor) -> torch.Tensor:
    """As if a newer numpy refused what the interpreter asks of it."""
    with broken_interpreter("raise TypeError('only 0-dimensional arrays can be converted to Python scalars')"):
        return launched(double, x)


def incompatible_in_backward(x: torch.Tensor) -> torch.Tensor:
    return Doubled.apply(x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return launched(double, x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return incompatible(grad)


def out_of_bounds(x: torch.Tensor) -> torch.Tensor:
    """Stands for a store that the operating system ends the process for."""
    os.abort()


@contextlib.contextmanager
def broken_interpreter(statement: str) -> Iterator[None]:
    """With a ``create_make_range`` that is code of the interpreter's own file, in a process that interprets."""
    from triton.runtime import interpreter

    made: dict[str, Any] = {}
    exec(compile(f"def broken(self, *args): {statement}", interpreter.__file__, "exec"), made)
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    as_it_was = interpreter.InterpreterBuilder.create_make_range
    interpreter.InterpreterBuilder.create_make_range = made["broken"]
    try:
        yield
    finally:
        interpreter.InterpreterBuilder.create_make_range = as_it_was


def contract_of(form: Callable[..., Any], *, grad: bool = False) -> Contract:
    return Contract(
        "doubling",
        naive=naive,
        forms={"kernel": Form(form, has_kernels=True)},
        dims={"N": Dim(1, 16)},
        inputs=[TensorSpec("x", "N", grad=grad, layouts=("contiguous",))],
        cases={"small": {"N": 16, "dtype": "float32"}},
        dtypes=("float32",),
    )


def compared(form: Callable[..., Any], **more: Any) -> Finding:
    return check_equality(contract_of(form, **more), "kernel", dtype="float32", place="interpreter", examples=2)


def test_a_loop_up_to_a_value_is_interpreted() -> None:
    found = compared(doubled)
    assert found.status == "pass", found.text()


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (other_shapes, "incompatible dimensions"),
        (false_assertion, "one at a time"),
        (wrong_arguments, "no_such_argument"),
        (endless_loop, "an array of size 1"),
        (unknown_name, "no_such_name"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_error_of_the_kernel_is_a_failure(form: Callable[..., Any], message: str) -> None:
    found = compared(form)
    assert found.status == "fail", found.text()
    assert "InterpreterError" in found.message
    assert message in found.message


@pytest.mark.parametrize("form", [incompatible, incompatible_in_backward])
def test_error_of_the_interpreter_could_not_be_compared(form: Callable[..., Any]) -> None:
    found = compared(form, grad=form is incompatible_in_backward)
    assert found.status == "error", found.text()
    assert found.message.startswith("float32: could not be compared: Triton's interpreter itself fails with triton 3.")
    assert "and numpy " in found.message
    assert "(TypeError: only 0-dimensional arrays can be converted to Python scalars, in interpreter.py:1)" in (
        found.message
    )
    assert found.message.endswith(
        "known to work: triton 3.5 to 3.9 with numpy 1.26 to 2.5: pip install 'triton==3.9.0' 'numpy==2.4.6'"
    )


def test_what_the_interpreter_has_not_could_not_be_compared() -> None:
    found = compared(assembly)
    assert found.status == "error", found.text()
    assert found.message == (
        "float32: could not be compared: Triton's interpreter cannot run this kernel (NotImplementedError: inline_asm "
        "not supported in interpreter mode); compare it on a GPU: memfix check --device cuda"
    )


def test_one_call_could_not_be_compared_either() -> None:
    made = contract_of(incompatible)
    assert check_equality_at(made, "kernel", Draw(made.cases["small"]), place="interpreter").status == "error"


def test_gate_ends_with_could_not_measure_and_not_with_a_regression() -> None:
    found = examine(contract_of(incompatible), get_meter("simulated"), PROFILES["dev"], device="cpu")
    verdict = judge([found], lock=None, meter="simulated")
    assert verdict.exit_code == EXIT_NOT_MEASURED, [finding.text() for finding in verdict.findings]
    assert "no memory of it can pass: the form was not compared with naive" in {f.message for f in verdict.findings}


def test_kernel_that_ends_its_process_fails_and_the_next_has_a_new_one() -> None:
    found = compared(out_of_bounds)
    assert found.status == "fail"
    assert found.message == "ends the process that interprets it with -6: it reads or writes out of bounds"
    assert compared(doubled).status == "pass"


def leaves(x: torch.Tensor) -> torch.Tensor:
    os._exit(3)


def test_child_that_ends_without_a_crash_could_not_be_compared() -> None:
    found = compared(leaves)
    assert found.status == "error"
    assert found.message == "could not be compared: the process that interprets kernels ended with 3"


def make_what_cannot_be_sent() -> object:
    return lambda: None


def test_an_answer_that_cannot_be_sent_is_an_error_and_no_crash() -> None:
    with pytest.raises(RuntimeError, match="cannot be sent"):
        interpreter.in_interpreter(make_what_cannot_be_sent)
    assert interpreter.in_interpreter(interpreter.is_interpreting)


def test_error_without_an_interpreter_is_none_of_its_faults() -> None:
    assert interpreter_fault(TypeError("only 0-dimensional arrays can be converted to Python scalars")) is None


# ---------------------------------------------------------------- numpy
STRICT = """
import numpy, torch
from triton.runtime import interpreter
from memfix.checks.mended_interpreter import mend

class AsInNumpy24(type):
    def __call__(cls, value=0):
        if isinstance(value, numpy.ndarray) and value.ndim:
            raise TypeError("only 0-dimensional arrays can be converted to Python scalars")
        return int(value)

    def __instancecheck__(cls, value):
        return isinstance(value, int)

class strict_int(metaclass=AsInNumpy24): pass

def answer():
    try:
        got = test_interpreter_faults.doubled(torch.ones(40))
    except Exception as error:
        return repr(error)
    return "equal" if torch.equal(got, torch.full((40,), 2.0)) else "wrong"

import test_interpreter_faults
interpreter.int = strict_int
print(answer())
mend()
mend()
print(answer())
"""


def test_mended_interpreter_needs_no_number_from_an_array_of_one() -> None:
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", STRICT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    as_it_is, mended = done.stdout.splitlines()
    assert mended == "equal"
    if tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 6):  # later ones read it as numpy 2.4 allows
        assert "only 0-dimensional arrays" in as_it_is


def test_triton_without_the_place_that_is_mended_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter as of_triton

    from memfix.checks import mended_interpreter

    monkeypatch.delattr(of_triton, "_patch_lang_tensor")
    mended_interpreter.mend.__wrapped__()
    assert not hasattr(of_triton, "_patch_lang_tensor")


def test_tensor_that_is_no_index_does_not_become_one() -> None:
    from types import SimpleNamespace

    from memfix.checks.mended_interpreter import _read_indices_by_item

    class Tensor: ...

    other = SimpleNamespace(_patch_lang_tensor=lambda tensor, scope: None)
    _read_indices_by_item(other)
    other._patch_lang_tensor(Tensor, "scope")
    assert not hasattr(Tensor, "__index__")


def test_without_numpy_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    found = compared(doubled)
    assert found.status == "note"
    assert found.message == (
        "not compared on the CPU, where its kernels must be interpreted: numpy is not installed; pip install numpy"
    )


def test_numpy_that_cannot_be_imported_is_said_to_be_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('libfoo.so: cannot open shared object file\\nmore')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "numpy")
    with pytest.raises(interpreter.CannotInterpret) as raised:
        interpreter.in_interpreter(os.getpid)
    assert str(raised.value) == (
        "numpy cannot be imported (ImportError: libfoo.so: cannot open shared object file); "
        "pip install --force-reinstall numpy"
    )


def test_without_triton_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = interpreter.importlib.util.find_spec
    monkeypatch.setattr(interpreter.importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))
    with pytest.raises(interpreter.CannotInterpret, match=r"^triton is not installed; pip install triton$"):
        interpreter.in_interpreter(os.getpid)
