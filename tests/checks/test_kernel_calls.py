"""Small calls pass a form's tiles and thresholds, and every two options meet in every kernel that it can launch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from kernel_coverage import WATCH, Coverage, CoverageInterpreter

from memfix import Contract, Dim, Form, TensorSpec
from memfix.checks.calls import equality_calls
from memfix.checks.equality import check_equality
from memfix.checks.form_call import FormCall
from memfix.checks.interpreter import in_interpreter
from memfix.checks.kernel_calls import launched
from memfix.checks.lowered import lowered_constants
from memfix.checks.running import run_form
from memfix.errors import ContractError
from memfix.registry import all_contracts

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

PART = 1024


def naive_sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum()


def summed_in_parts(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([part.sum() for part in x.split(PART)]).sum()


def first_part_only(x: torch.Tensor) -> torch.Tensor:
    return x.split(PART)[0].sum()


def contract_of(form: Form, **changed: Any) -> Contract:
    return Contract(
        "sums",
        naive=naive_sum,
        forms={"parts": form},
        dims={"N": Dim(1, 40)},
        cases={"small": {"N": 8}},
        inputs=[TensorSpec("x", "N", grad=True)],
        **changed,
    )


def test_a_gpu_is_spared_half_of_the_calls() -> None:
    contract = contract_of(Form(summed_in_parts))
    plain, spared = (
        [
            call
            for call in equality_calls(contract, "parts", "float32", 32, place=place)
            if not (call.draw.spoiled or call.draw.mode != "plain")
        ]
        for place in ("cpu", "cuda")
    )
    assert (len(plain), len(spared)) == (32, 16)


def test_a_lowered_constant_shows_what_is_wrong_in_the_second_part() -> None:
    small = {f"{__name__}.PART": 4}
    for function, compared_with, status in (
        (first_part_only, {}, "pass"),
        (first_part_only, small, "fail"),
        (summed_in_parts, small, "pass"),
    ):
        form = Form(function, compared_with=compared_with)
        assert check_equality(contract_of(form), "parts", dtype="float32", examples=8).status == status
        assert PART == 1024


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({f"{__name__}.PARTS": 4}, "which is not there"),
        ({"no_such_module.PART": 4}, "which is not there"),
        ({"PART": 4}, "which is not there"),
        ({f"{__name__}.PART": "4"}, "is of type int, and compared_with has a str"),
    ],
)
def test_a_constant_that_is_not_there_is_an_error_of_the_contract(named: dict[str, Any], message: str) -> None:
    with (
        pytest.raises(ContractError, match=message),
        lowered_constants(contract_of(Form(naive_sum, compared_with=named)), "parts"),
    ):
        pass


def test_what_a_form_is_compared_with_is_one_of_its_laws() -> None:
    laws = contract_of(Form(naive_sum, compared_with={"a.B": 4})).laws()
    assert "compared with a.B=4" in laws["form parts"]


@triton.jit
def double(x, y, n, NEGATES: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = 2 * tl.load(x + at, mask=at < n)
        if NEGATES:
            tl.store(y + at, -value, mask=at < n)
        else:
            tl.store(y + at, value, mask=at < n)


@triton.jit
def double_rows_of_eight(x, y):
    at = tl.program_id(0) * 8 + tl.arange(0, 8)
    tl.store(y + at, 2 * tl.load(x + at))


BLOCK = 64


def doubled(x: torch.Tensor, *, negates: bool, adds: bool) -> torch.Tensor:
    y = torch.empty_like(x)
    if x.numel() % 8 == 0 and not negates and x.dtype == torch.bfloat16:
        double_rows_of_eight[(x.numel() // 8,)](x, y)
    else:
        double[(1,)](x, y, x.numel(), NEGATES=negates, BLOCK=BLOCK)
    return y + 1 if adds else y


def naive_doubled(x: torch.Tensor, *, negates: bool, adds: bool) -> torch.Tensor:
    return (-2 if negates else 2) * x + (1 if adds else 0)


def kernels_of(negates: Sequence[bool] = (False, True), **compared_with: int) -> Contract:
    lowered = {f"{__name__}.{name}": value for name, value in compared_with.items()}
    return Contract(
        "doubles",
        naive=naive_doubled,
        forms={"kernel": Form(doubled, has_kernels=True, compared_with=lowered)},
        dims={"N": Dim(1, 40)},
        cases={"small": {"N": 8}},
        choices={"negates": negates, "adds": (False, True)},
        inputs=[TensorSpec("x", "N", layouts=("contiguous",))],
    )


def calls_by_kernel() -> dict[str, set[tuple[bool, bool]]]:
    """The options that met in each kernel."""
    contract = kernels_of()
    found: dict[str, set[tuple[bool, bool]]] = {}
    for dtype in contract.dtypes:
        for call in equality_calls(contract, "kernel", dtype, 32, place="interpreter"):
            for kernel in launched(contract, "kernel", call.draw):
                choices = call.draw.case.choices
                found.setdefault(kernel, set()).add((choices["negates"], choices["adds"]))
    return found


def test_every_two_options_meet_in_every_kernel() -> None:
    both = set(itertools.product((False, True), repeat=2))
    assert in_interpreter(calls_by_kernel) == {"double": both, "double_rows_of_eight": {(False, False), (False, True)}}


@pytest.fixture(scope="module")
def covering() -> CoverageInterpreter:
    return CoverageInterpreter()


def coverage_of(contract: Contract) -> list[str]:
    WATCH.now = Coverage()
    for dtype in contract.dtypes:
        finding = check_equality(contract, "kernel", dtype=dtype, place="interpreter", examples=32)
        assert finding.status == "pass", finding
    return WATCH.now.missing()


def test_a_loop_that_never_comes_round_is_named_and_smaller_tiles_mend_it(covering: CoverageInterpreter) -> None:
    (loop,) = covering.call(partial(coverage_of, kernels_of()))
    assert "no call comes round this loop twice" in loop
    assert covering.call(partial(coverage_of, kernels_of(BLOCK=4))) == []


def test_an_else_that_no_call_takes_is_named(covering: CoverageInterpreter) -> None:
    (branch,) = covering.call(partial(coverage_of, kernels_of(negates=(True,), BLOCK=4)))
    assert "every call takes this branch" in branch


def coverage_of_memfix() -> dict[str, list[str]]:
    """At the calls of the gate, which compares there, by op: its contracts share kernels. Where all that was reached is
    covered, calls that launch no further kernel are left out."""
    calls: dict[str, list[Iterator[FormCall]]] = {}
    for contract in all_contracts().values():
        for name, form in contract.forms.items():
            for dtype in contract.dtypes if form.is_interpreted else ():
                drawn = equality_calls(contract, name, dtype, 32, place="interpreter")
                of_op = calls.setdefault(form.function.__module__.rpartition(".")[0], [])
                of_op.append(FormCall(contract, name, call.draw) for call in drawn)
    missing = {}
    for op, by_dtype in calls.items():
        WATCH.now, seen = Coverage(), frozenset[str]()
        for call in filter(None, itertools.chain.from_iterable(itertools.zip_longest(*by_dtype))):
            kernels = launched(call.contract, call.form, call.draw)
            if WATCH.now.missing() or not kernels <= seen:
                seen |= kernels
                run_form(call, call.inputs("cpu"), "cpu")
        missing[op] = WATCH.now.missing()
    return missing


def test_every_branch_loop_and_mask_of_memfixs_own_kernels_is_run(covering: CoverageInterpreter) -> None:
    found = covering.call(coverage_of_memfix)
    assert "memfix.ops.kda" in found
    assert {name: missing for name, missing in found.items() if missing} == {}
