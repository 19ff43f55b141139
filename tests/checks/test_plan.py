"""One plan of checks: the gate and pytest ask the same, and decide alike on what was found."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import get_args

import pytest
import torch

from memfix.checks.examine import Found, Outcome, examine_call, is_due, standing_of
from memfix.checks.finding import Finding, Status
from memfix.checks.inputs import Draw
from memfix.checks.plan import Check, Kind, equality_checks, gate_plan, suite_plan
from memfix.contract import BadInput, Contract, Dim, Form, TensorSpec, setting
from memfix.laws import NAIVE, Budget, Scaling, SpeedBudget
from memfix.meters import get_meter
from memfix.registry import all_contracts

SIMULATED, REAL = get_meter("simulated"), get_meter("cuda")


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


CONTRACT = Contract(
    "doubling",
    naive=doubled,
    forms={
        "sum": lambda x: x + x,
        "kernel": Form(doubled, has_kernels=True),
        "reported": Form(doubled, reported=True, known_unequal={"float32": "a reason"}),
    },
    dims={"N": Dim(1, 9)},
    inputs=[TensorSpec("x", "N")],
    cases={"small": {"N": 4}, "large": {"N": 64}},
    dtypes=("float32", "bfloat16"),
    budgets=[Budget(form, phase="forward", bytes="N*e") for form in ("sum", "kernel")],
    scaling=[Scaling("sum", dim="N", case="small", phase="forward")],
    speed=[SpeedBudget("sum", case="small", times_naive=9)],
    bad_inputs=[BadInput("no tensor", setting(x=None), "NoneType", TypeError)],
)


def outcome(status: Status, form: str = "sum") -> Outcome:
    return Outcome((Finding("equality", "doubling", form, status, ""),))


def found(*statuses: Status) -> Found:
    return {check: outcome(s) for check, s in zip(equality_checks(CONTRACT, "sum"), statuses, strict=False)}


@pytest.mark.parametrize("contract", [CONTRACT, *all_contracts().values()], ids=lambda contract: contract.name)
def test_pytest_asks_what_the_gate_asks_of_every_form(contract: Contract) -> None:
    asked = {check for check in gate_plan(contract, SIMULATED, device="cpu") if check.form != NAIVE}
    tested = {*suite_plan(contract)}
    assert {check.kind for check in asked - tested} <= {"budget"}  # of a form that has no budget for them
    more = {(check.kind, check.place) for check in tested - asked}
    assert more <= {("equality", "cuda"), ("speed", "cpu"), ("agreement", "cpu")}


def test_every_kind_of_check_is_planned_for_some_form_and_travels() -> None:
    plan = suite_plan(CONTRACT)
    assert {check.kind for check in plan} == {*get_args(Kind)}
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert len({*plan}) == len(plan)


def test_a_form_that_is_known_to_be_unequal_is_compared_and_refuses_and_no_more() -> None:
    for plan in (gate_plan(CONTRACT, SIMULATED), suite_plan(CONTRACT)):
        assert {check.kind for check in plan if check.form == "reported"} == {"equality", "bad input"}


def test_a_real_gpu_is_asked_for_the_cases_alone() -> None:
    assert {check.kind for check in gate_plan(CONTRACT, REAL, device="cpu")} == {"equality", "bad input", "memory"}


def test_the_plan_says_where_each_form_runs() -> None:
    for device, places in (
        ("cpu", {"sum": "cpu", "kernel": "interpreter"}),
        ("cuda", {"sum": "cuda", "kernel": "cuda"}),
    ):
        plan = gate_plan(CONTRACT, SIMULATED, forms=["sum", "kernel"], device=device)
        assert {check.form: check.place for check in plan if check.kind == "equality"} == places


def test_one_unequal_dtype_ends_the_comparison_of_a_form() -> None:
    first, second = equality_checks(CONTRACT, "sum")
    assert is_due(second, CONTRACT, SIMULATED, {first: outcome("pass")})
    for status in ("fail", "error", "note"):
        assert not is_due(second, CONTRACT, SIMULATED, {first: outcome(status)})
    other_form = equality_checks(CONTRACT, "reported")[1]
    assert is_due(other_form, CONTRACT, SIMULATED, {first: outcome("fail")})


def test_a_real_gpu_is_spared_a_form_that_was_not_found_equal() -> None:
    check = Check("doubling", "memory", "sum", case="small")
    assert is_due(check, CONTRACT, REAL, found("pass", "pass"))
    for statuses in (("pass", "fail"), ("pass",), ()):
        assert not is_due(check, CONTRACT, REAL, found(*statuses))
        assert is_due(check, CONTRACT, SIMULATED, found(*statuses))
    assert is_due(replace(check, form=NAIVE), CONTRACT, REAL, {})


@pytest.mark.parametrize(
    ("statuses", "why"),
    [
        (("pass", "pass"), None),
        (("pass", "fail"), "no memory of it can pass: the form is not equal to naive"),
        (("fail",), "no memory of it can pass: the form is not equal to naive"),
        (("pass", "error"), "no memory of it can pass: the form was not compared with naive"),
        (("note",), "no memory of it can pass: the form was not compared with naive"),
        (("pass",), "no memory of it can pass: the form was not compared with naive"),
        ((), "no memory of it can pass: the form was not compared with naive"),
    ],
)
def test_memory_passes_where_a_form_is_equal_in_every_dtype(statuses: tuple[Status, ...], why: str | None) -> None:
    standing = standing_of(CONTRACT, "sum", found(*statuses))
    assert (standing.no_memory.message if standing.no_memory else None) == why


def test_a_form_that_is_unequal_on_the_gpu_is_not_equal() -> None:
    on_gpu = equality_checks(CONTRACT, "sum", "cuda")[0]
    assert standing_of(CONTRACT, "sum", {**found("pass", "pass"), on_gpu: outcome("fail")}).no_memory is not None


def test_no_budget_passes_at_a_call_where_the_form_is_unequal() -> None:
    made = replace(CONTRACT, forms={**CONTRACT.forms, "sum": Form(lambda x: (x + x).add_(1))})
    draw = Draw(made.case_of("drawn", {"N": 5}))
    equality, note = examine_call(made, draw, SIMULATED, forms=["sum"], device="cpu")
    assert (equality.status, note.status) == ("fail", "note")
    assert note.message == "no memory of it can pass: the form is not equal to naive"
    equality, budget = examine_call(CONTRACT, draw, SIMULATED, forms=["sum"], device="cpu")
    assert (equality.status, budget.check, budget.status) == ("pass", "budget", "pass")
