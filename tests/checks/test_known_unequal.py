"""A reported form that gives a wrong answer: equality shows it in the dtypes it names, and nothing else judges it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from memfix import Budget, Contract, Dim, TensorSpec
from memfix.checks.effort import Effort
from memfix.checks.equality import check_equality, check_equality_at
from memfix.checks.examine import Examination, examine, examine_call
from memfix.checks.inputs import Draw
from memfix.checks.plan import suite_plan
from memfix.contract import Form
from memfix.errors import EXIT_PASS, EXIT_REGRESSION, ContractError
from memfix.gate.judge import Verdict, judge
from memfix.gate.lock import Key
from memfix.gate.report.table import table_rows
from memfix.gate.run import _updated_lock
from memfix.laws import Scaling, SpeedBudget
from memfix.meters import get_meter

WHY = "sizes above 4 are off by one half"
EFFORT = Effort("test", equality_examples=20, memory_examples=1)


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def wrong_above_four(x: torch.Tensor) -> torch.Tensor:
    return x * x if x.shape[0] < 5 else x * x + 0.5


def contract(
    function: Callable[..., Any] = wrong_above_four, naive: Callable[..., Any] = square, **more: Any
) -> Contract:
    known = more.pop("known_unequal", {"float32": WHY})
    reported = more.pop("reported", True)
    return Contract(
        "square",
        naive=naive,
        forms={"form": square, "reported": Form(function, reported=reported, known_unequal=known)},
        dims={"N": Dim(1, 9)},
        inputs=[TensorSpec("x", "N", grad=True)],
        cases={"small": {"N": 4}},
        **{"dtypes": ("float32",), **more},
    )


def found(made: Contract, dtype: str = "float32") -> Any:
    return check_equality(made, "reported", dtype=dtype, examples=20)


# ---------------------------------------------------------------- equality
def test_a_wrong_answer_passes_as_known_with_a_call() -> None:
    finding = found(contract())
    assert finding.status == "pass"
    assert finding.message.startswith("float32: output is off by ")
    assert finding.message.endswith(f"(known unequal: {WHY})")
    call = finding.details[0].removeprefix("  call found: ")
    assert call.startswith("N=")
    assert finding.reproduce.endswith(f"--form reported --at {call}")


def test_a_right_answer_fails_as_a_known_broken_budget_that_holds_does() -> None:
    finding = found(contract(square))
    assert finding.status == "fail"
    assert finding.message == (
        f"float32: equal in 200 drawn calls on cpu (a reported form suddenly is equal; known unequal: {WHY})"
    )


def test_a_wrong_answer_in_a_dtype_that_is_not_named_fails() -> None:
    made = contract(dtypes=("float32", "float64"))
    assert [found(made, dtype).status for dtype in made.dtypes] == ["pass", "fail"]


def test_an_error_is_not_the_wrong_answer_that_is_known() -> None:
    def raises(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("planted")

    finding = found(contract(raises))
    assert (finding.status, finding.message) == ("fail", "float32: raises KeyError: 'planted'")


def test_a_naive_that_raises_is_an_error_also_here() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("planted")

    assert found(contract(naive=broken)).status == "error"


def test_one_call_says_whether_the_form_is_wrong_there() -> None:
    made = contract()
    draws = {n: Draw(made.case_of("drawn", {"N": n})) for n in (4, 5)}
    right, wrong = (check_equality_at(made, "reported", draw) for draw in draws.values())
    assert (right.status, wrong.status) == ("pass", "pass")
    assert right.message.endswith("; known unequal at other calls in float32")
    assert wrong.message.endswith(f"(known unequal: {WHY})")
    (alone,) = examine_call(made, draws[5], get_meter("simulated"), forms=["reported"], device="cpu")
    assert alone == wrong


# ---------------------------------------------------------------- everything after equality
def examined(made: Contract) -> Examination:
    return examine(made, get_meter("simulated"), EFFORT)


def judged(examination: Examination, lock: dict[Key, int] | None = None) -> Verdict:
    return judge([examination], lock=lock, meter="simulated")


def locked(examination: Examination) -> dict[Key, int]:
    return _updated_lock({}, [examination], whole=True)


def test_memory_is_not_judged_and_the_verdict_passes() -> None:
    examination = examined(contract())
    assert examination.equal_forms == {"form"}
    assert examination.known_unequal_forms == {"reported"}
    assert {form for form, _, _ in examination.readings} == {"naive", "form"}
    notes = [finding.text() for finding in examination.findings if finding.status == "note"]
    assert notes == ["square/reported: memory not judged: the form is known to be not equal to naive"]
    verdict = judged(examination, locked(examination))
    assert verdict.exit_code == EXIT_PASS
    assert {row.cells[1:]: None for row in table_rows(verdict)}.keys() >= {
        ("reported", "-", "-", "-", "-", "", "not equal, as known")
    }


def test_every_dtype_that_is_named_is_shown() -> None:
    made = contract(dtypes=("float32", "float64"), known_unequal={"float32": WHY, "float64": WHY})
    shown = [f.message[:7] for f in examined(made).findings if (f.check, f.form) == ("equality", "reported")]
    assert shown == ["float32", "float64"]


def test_a_form_that_suddenly_is_equal_fails_the_gate_and_has_a_row() -> None:
    verdict = judged(examined(contract(square)))
    assert verdict.exit_code == EXIT_REGRESSION
    assert ("square", "reported", "-", "-", "-", "-", "", "FAIL equality") in [row.cells for row in table_rows(verdict)]


def test_the_lock_holds_no_entry_of_it_and_an_old_one_is_stale() -> None:
    examination = examined(contract())
    lock = locked(examination)
    assert {key[1] for key in lock} == {"naive", "form"}
    (stale,) = judged(examination, {**lock, ("square", "reported", "small", "train"): 16}).with_status("fail")
    assert stale.text().startswith(
        "square/reported [small, train]: the lock has an entry that nothing measures any more"
    )


def test_the_suite_checks_it_for_equality_and_bad_inputs_alone() -> None:
    checks = [check for check in suite_plan(contract()) if check.form == "reported"]
    assert [(check.kind, check.dtype, check.place) for check in checks] == [
        ("equality", "float32", "cpu"),
        ("equality", "float32", "cuda"),
    ]


def test_the_law_says_where_and_why() -> None:
    assert contract().laws()["form reported"] == f"reported, known unequal in float32: {WHY}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reported": False}, "square: only a reported form may be known_unequal; 'reported' is not reported"),
        (
            {"known_unequal": {"flaot32": WHY}},
            "square: 'reported' is known to be unequal in 'flaot32', which is no dtype of the contract; "
            "did you mean 'float32'?",
        ),
        ({"known_unequal": {"float32": " "}}, "square: say why 'reported' is known to be unequal in float32"),
        (
            {"known_unequal": {}},
            "square: the reported form 'reported' needs the budget that it breaks, with known_broken=True, "
            "or known_unequal=",
        ),
        *(
            (
                {kind: [law]},
                "square: a budget speaks of 'reported', which is known to be unequal: its memory and time are not "
                "judged; drop the budget",
            )
            for kind, law in (
                ("budgets", Budget("reported", bytes=1, known_broken=True)),
                ("budgets", Budget("form", times_below={"reported": 2})),
                ("scaling", Scaling("reported", dim="N", case="small")),
                ("speed", SpeedBudget("reported", case="small", times_naive=2)),
            )
        ),
    ],
)
def test_a_contract_that_could_not_be_held_to_it_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError) as refused:
        contract(**changes)
    assert str(refused.value) == message
