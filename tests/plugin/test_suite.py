"""A contract's suite on a toy: every kind of check passes an honest form, and fails one that breaks its law."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from importlib.util import find_spec

import pytest
from forked_python import forked_python

import memfix
from memfix.contract import Contract, Dim, TensorSpec
from memfix.laws import SpeedBudget

# x * x.sum(): naive makes a matrix for it
TOY = """
import time
import memfix
from memfix import BadInput, Budget, Dim, Scaling, SpeedBudget, TensorSpec
from memfix.contract import setting

def naive(x):
    return (x[:, None] * x[None, :]).sum(1)

def factored(x):
    if x.ndim != 1:
        raise ValueError(f"x must have one axis, got {x.ndim}")
    return x * x.sum()

def broken(x):
    time.sleep(0.005)
    return naive(x.flatten()) * 1.01

contract = memfix.Contract(
    name="times_sum",
    naive=naive,
    forms={"factored": factored, "broken": broken},
    dims={"N": Dim(1, 40)},
    inputs=[TensorSpec("x", "N", grad=True)],
    cases={"small": {"N": 8}, "large": {"N": 1024}},
    dtypes=["float64"],
    budgets=[Budget(form, bytes="4*N*e + 16") for form in ("factored", "broken")],
    scaling=[Scaling(form, dim="N", case="large") for form in ("factored", "broken")],
    speed=[SpeedBudget("factored", case="small", times_naive=100), SpeedBudget("broken", case="small", times_naive=5)],
    bad_inputs=[BadInput("two axes", setting(x=lambda x: x[None]), "x must have one axis")],
)
test_times_sum = memfix.suite(contract)
"""
CHECKS = ("equal-float64", "refuses-two_axes", "small-small", "small-large", "small-drawn", "grows-N", "fast-small-cpu")

KERNELS = """
import memfix, torch, triton, triton.language as tl
from memfix import Dim, Form, TensorSpec

@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)

@triton.jit
def double_until_the_end(x, y, n, BLOCK: tl.constexpr):
    for start in range(0, n, BLOCK):
        if start > n:
            break
        tl.store(y + start, 2 * tl.load(x + start))

def form_of(kernel):
    def form(x):
        y = torch.empty_like(x)
        kernel[(1,)](x, y, x.numel(), BLOCK=128)
        return y
    return Form(form, has_kernels=True)

contract = memfix.Contract(
    name="doubling",
    naive=lambda x: 2 * x,
    forms={"honest": form_of(double), "broken": form_of(double_until_the_end)},
    dims={"N": Dim(1, 100)},
    inputs=[TensorSpec("x", "N")],
    cases={"small": {"N": 64}},
    dtypes=["float32"],
)
test_doubling = memfix.suite(contract)
"""


def require_triton() -> None:
    """Without importing it: a pytester's session forgets what was imported in it, and Triton can be imported once."""
    if find_spec("triton") is None:
        pytest.skip("triton not installed")


def test_every_kind_of_check_passes_an_honest_form_and_fails_a_broken_one(
    pytester: pytest.Pytester, run: Callable
) -> None:
    pytester.makepyfile(TOY)
    pytester.makeini("[pytest]\nmemfix_lock = memory.lock\n")
    run("-k", "factored-small and not drawn", "--memfix-update").assert_outcomes(passed=2)
    result = run("-m", "not gpu", "-v")
    lines = result.stdout.str().splitlines()
    for check in CHECKS:
        assert any(f"[factored-{check}] PASSED" in line for line in lines), check
        assert any(f"[broken-{check}] FAILED" in line for line in lines), check
    result.assert_outcomes(passed=len(CHECKS), failed=len(CHECKS))


def test_kernels_that_no_compiler_takes_fail(pytester: pytest.Pytester, run: Callable) -> None:
    require_triton()
    pytester.makepyfile(KERNELS)
    result = run("-k", "compiles", "-v")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*[[]honest-compiles[]] PASSED*", "*[[]broken-compiles[]] FAILED*"])


# ---------------------------------------------------------------- memory only where equality holds
# small and wrong, but within its budgets
WRONG = TOY.replace("naive(x.flatten()) * 1.01", "x * x.sum() * 1.01")


@pytest.mark.parametrize("chosen", ["not fast and not refuses", "small or grows"], ids=["all", "memory alone"])
def test_no_memory_passes_of_a_form_that_is_unequal(pytester: pytest.Pytester, run: Callable, chosen: str) -> None:
    pytester.makepyfile(WRONG)
    result = run("-m", "not gpu", "-k", chosen, "-v")
    lines = result.stdout.str().splitlines()
    of_memory = [check for check in CHECKS if check.startswith(("small", "grows"))]
    for check in of_memory:
        assert any(f"[factored-{check}] PASSED" in line for line in lines), check
        assert any(f"[broken-{check}] FAILED" in line for line in lines), check
    said = "times_sum/broken: no memory of it can pass: the form is not equal to naive"
    assert sum(line == said for line in lines) == len(of_memory)


def test_bytes_of_a_form_that_is_unequal_do_not_enter_the_lock(pytester: pytest.Pytester, run: Callable) -> None:
    pytester.makepyfile(WRONG)
    pytester.makeini("[pytest]\nmemfix_lock = memory.lock\n")
    assert run("-k", "broken-small-small", "--memfix-update").ret == 1
    assert not (pytester.path / "memory.lock").exists()


def test_a_form_is_compared_once_for_all_memory_tests(pytester: pytest.Pytester, run: Callable) -> None:
    counting = "def factored(x):\n    with open('calls', 'a') as file: file.write(f'{x.device} ')"
    pytester.makepyfile(TOY.replace("def factored(x):", counting))
    run("-k", "factored-small-small").assert_outcomes(passed=1)
    alone = (pytester.path / "calls").read_text().split().count("cpu")
    (pytester.path / "calls").unlink()
    run("-k", "factored-small or factored-grows").assert_outcomes(passed=4)
    assert (pytester.path / "calls").read_text().split().count("cpu") == alone > 0


def test_memory_of_kernels_that_cannot_be_compared_here_is_skipped(pytester: pytest.Pytester, run: Callable) -> None:
    require_triton()
    pytester.makepyfile(KERNELS)
    pytester.makeconftest(
        "from memfix.checks import interpreter\ninterpreter._missing_package = lambda: 'numpy is not installed'\n"
        "from memfix.meters import cuda\ncuda.gpu_unavailable_reason = lambda: 'torch sees no GPU'\n"
    )
    result = run("-k", "honest-small", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*no memory of it can pass: the form was not compared with naive*"])


# ---------------------------------------------------------------- some of the checks
def names_of(test: Callable[..., None]) -> set[str]:
    (marker,) = test.pytestmark  # type: ignore[attr-defined]
    return {parameter.id for parameter in marker.args[1]}


def doubling() -> Contract:
    return Contract(
        "doubling",
        naive=lambda x: 2 * x,
        forms={"sum": lambda x: x + x},
        dims={"N": Dim(1, 9)},
        inputs=[TensorSpec("x", "N")],
        cases={"small": {"N": 4}},
        dtypes=("float32",),
        speed=[SpeedBudget("sum", case="small", times_naive=9, device=device) for device in ("cpu", "cuda")],
    )


def test_only_gpu_and_only_cpu_are_the_two_parts_of_a_suite() -> None:
    on_gpu, on_cpu = (names_of(memfix.suite(doubling(), only=only)) for only in ("gpu", "cpu"))
    assert on_gpu == {"sum-equal-float32-cuda", "sum-fast-small-cuda", "naive-predicted-small", "sum-predicted-small"}
    assert on_cpu == {"sum-equal-float32", "sum-small-small", "sum-fast-small-cpu"}
    assert names_of(memfix.suite(doubling())) == on_gpu | on_cpu


def test_a_suite_without_speed_has_everything_else() -> None:
    every, untimed = (names_of(memfix.suite(doubling(), speed=speed)) for speed in (True, False))
    assert every - untimed == {"sum-fast-small-cpu", "sum-fast-small-cuda"}
    assert untimed < every


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^only must be 'gpu', 'cpu' or None, got 'cuda'$"):
        memfix.suite(doubling(), only="cuda")  # type: ignore[arg-type]


@pytest.mark.parametrize("check", ["equal-float64", "small-drawn"])
def test_the_line_that_reproduces_a_failure_does_so_when_it_is_pasted(
    run: Callable[..., pytest.RunResult], pytester: pytest.Pytester, check: str
) -> None:
    (pytester.path / "my tests").mkdir()
    (pytester.path / "my tests/test_toy.py").write_text(TOY)
    told = run("-q", "-k", f"broken-{check}", "my tests")
    (line,) = {line.partition("reproduce: ")[2] for line in told.outlines if "reproduce: " in line}
    assert line.startswith("memfix check times_sum --form broken --at N=")
    assert line.endswith(" --from 'my tests/test_toy.py'")
    _, *arguments = shlex.split(line)
    again = forked_python("-m", "memfix", *arguments, cwd=pytester.path)
    assert again.returncode == 1
    assert "fail  " in again.stdout
