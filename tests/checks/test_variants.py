"""Small calls with one other option each, whose bytes the lock holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from memfix import Budget, Contract, Dim, TensorSpec
from memfix.checks.effort import get_effort
from memfix.checks.examine import Examination, examine
from memfix.checks.form_call import FormCall
from memfix.checks.inputs import Draw
from memfix.checks.plan import gate_plan, suite_plan
from memfix.checks.variants import variants
from memfix.contract.case import is_variant
from memfix.gate.judge import judge
from memfix.gate.lock import read_lock, write_lock
from memfix.gate.report.table import table_rows
from memfix.meters import get_meter


def naive(x, weight, bias=None, *, reduction="sum", activation=F.relu):
    out = activation(x @ weight if bias is None else torch.addmm(bias, x, weight))
    return out.sum() if reduction == "sum" else out


def form(x, weight, bias=None, *, rows, reduction="sum", activation=F.relu):
    parts = [naive(part, weight, bias, reduction=reduction, activation=activation) for part in x.split(rows)]
    return torch.stack(parts).sum() if reduction == "sum" else torch.cat(parts)


def wasteful(x, weight, bias=None, *, rows, reduction="sum"):
    spare = None if weight.requires_grad else weight.new_empty(64, *weight.shape)
    out = form(x, weight, bias, rows=rows, reduction=reduction)
    del spare
    return out


CONTRACT = Contract(
    "a_layer",
    naive=naive,
    forms={"chunked": form},
    dims={"N": Dim(1, 40), "D": Dim(2, 40, multiple_of=2), "rows": Dim(1, 40)},
    inputs=[
        TensorSpec("x", "N D", grad=True),
        TensorSpec("weight", "D D", grad=True),
        TensorSpec("bias", "D", grad=True, optional=True),
    ],
    choices={"reduction": ["sum", "none"]},
    dtypes=("float64", "float32"),
    cases={
        "large": {"N": 4096, "D": 64, "rows": 512},
        "small": {"N": 256, "D": 60, "rows": 64},
    },
    budgets=[Budget("chunked", phase=phase, bytes="64*N*D*e + 64*D*D*e + 1048576") for phase in ("forward", "train")],
)


def _examined(contract: Contract) -> Examination:
    return examine(contract, get_meter("simulated"), get_effort("dev"))


def test_variants_are_a_quarter_of_the_smallest_case_and_differ_in_one_option_each() -> None:
    found = variants(CONTRACT)
    assert [*found] == ["reduction=none", "present=bias", "frozen=x", "frozen=weight"]
    assert all(is_variant(name) and draw.case.name == name for name, draw in found.items())
    assert {draw.case.dims["N"] for draw in found.values()} == {64}
    assert {draw.case.dims["D"] for draw in found.values()} == {14}
    assert {draw.case.dims["rows"] for draw in found.values()} == {32}
    none, bias, _, weight = found.values()
    assert none.case.choices == {"reduction": "none"}
    assert (bias.case.present, bias.case.choices["reduction"]) == (("bias",), "sum")
    assert (weight.frozen, weight.case.choices["reduction"]) == (frozenset({"weight"}), "sum")


def test_a_dtype_that_no_case_has_is_a_variant() -> None:
    in_bfloat16 = {**CONTRACT.cases["small"].settings, "dtype": "bfloat16"}
    dtypes = ("float64", "float32", "bfloat16", "float16")
    made = replace(CONTRACT, dtypes=dtypes, cases={"small": CONTRACT.cases["small"], "half": in_bfloat16})
    assert [name for name in variants(made) if "dtype" in name] == ["dtype=float16"]
    assert variants(made)["dtype=float16"].case.dtype == "float16"


def test_a_choice_without_a_stable_text_has_no_variant() -> None:
    functions = {"activation": [F.relu, F.gelu]}
    cases = {name: replace(case, choices={"activation": F.relu}) for name, case in CONTRACT.cases.items()}
    assert next(iter(variants(replace(CONTRACT, choices=functions, cases=cases)))) == "present=bias"


def test_an_optional_input_of_the_case_is_left_out_and_frozen() -> None:
    with_bias = replace(CONTRACT.cases["small"], present=("bias",))
    assert [*variants(replace(CONTRACT, cases={"small": with_bias}))] == [
        "reduction=none", "absent=bias", "frozen=x", "frozen=weight", "frozen=bias",
    ]  # fmt: skip


def test_a_variant_is_measured_in_its_last_phase_by_the_gate_and_by_the_suite() -> None:
    meter = get_meter("simulated")
    for plan in (gate_plan(CONTRACT, meter), suite_plan(CONTRACT)):
        assert [(check.form, check.case) for check in plan if check.kind == "variant"] == [
            ("chunked", name) for name in variants(CONTRACT)
        ]
    readings = _examined(CONTRACT).readings
    assert [key for key in readings if is_variant(key[1])] == [
        ("chunked", name, "train") for name in variants(CONTRACT)
    ]
    assert (
        readings["chunked", "frozen=weight", "train"].peak_bytes
        < readings["chunked", "present=bias", "train"].peak_bytes
    )


def test_what_is_wasted_for_a_frozen_input_is_above_the_lock_alone(tmp_path: Any) -> None:
    honest = _examined(CONTRACT)
    path = tmp_path / "memory.lock"
    write_lock(path, {("a_layer", *key): reading.peak_bytes for key, reading in honest.readings.items()})
    lock = read_lock(path)
    assert judge([honest], lock=lock, meter="simulated").exit_code == 0

    verdict = judge([_examined(replace(CONTRACT, forms={"chunked": wasteful}))], lock=lock, meter="simulated")
    (failed,) = verdict.with_status("fail")
    assert failed.subject == "a_layer/chunked [frozen=weight, train]"
    assert "new_empty" in "\n".join(failed.details)
    rows = {row.cells[2]: row.failed for row in table_rows(verdict) if row.cells[1] == "chunked"}
    assert rows == {"large": False, "small": False, "frozen=weight": True}


def test_a_lock_without_variants_fails_once_with_the_command() -> None:
    honest = _examined(CONTRACT)
    lock = {("a_layer", *key): r.peak_bytes for key, r in honest.readings.items() if not is_variant(key[1])}
    (failed,) = judge([honest], lock=lock, meter="simulated").with_status("fail")
    assert "no entry of a variant of this op" in failed.message
    assert "memfix gate a_layer --update" in failed.message


def test_a_form_that_refuses_a_variant_fails_equality_alone() -> None:
    def refuses(x, weight, bias=None, *, rows, reduction="sum"):
        if not weight.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError("no backward for a frozen weight")
        return form(x, weight, bias, rows=rows, reduction=reduction)

    honest = _examined(CONTRACT)
    lock = {("a_layer", *key): reading.peak_bytes for key, reading in honest.readings.items()}
    found = _examined(replace(CONTRACT, forms={"chunked": refuses}))
    verdict = judge([found], lock=lock, meter="simulated")
    assert {finding.check for finding in verdict.with_status("fail")} == {"equality"}


@pytest.mark.parametrize("name", ["reduction=none", "present=bias", "frozen=weight"])
def test_a_variants_command_is_read_back(name: str) -> None:
    call = FormCall.at_case(CONTRACT, "chunked", name)
    again = Draw.parsed(CONTRACT, call.draw.spelled())
    assert (again.frozen, again.case.present, again.case.dims) == (
        call.draw.frozen,
        call.draw.case.present,
        call.draw.case.dims,
    )
