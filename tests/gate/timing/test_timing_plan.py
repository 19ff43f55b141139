"""Where forms are timed: at their budgets, and nowhere that says nothing."""

from __future__ import annotations

import math
from typing import Any

from memfix.contract import Contract, Dim, Form, ObjectSpec, TensorSpec
from memfix.gate.timing.timing_plan import TimedForm, forms_to_time
from memfix.laws import Budget, SpeedBudget
from memfix.registry import all_contracts


def double(x: Any) -> Any:
    return 2 * x


def contract(*, speed: list[SpeedBudget], forms: dict[str, Any] | None = None, grad: bool = True) -> Contract:
    return Contract(
        "toy",
        naive=double,
        forms=forms or {"fast": Form(double), "kernel": Form(double, has_kernels=True), "plain": Form(double)},
        dims={"N": Dim(1, 8)},
        inputs=[TensorSpec("x", "N", grad=grad)],
        cases={"large": {"N": 100}, "small": {"N": 4}},
        speed=speed,
        budgets=[Budget("reported", bytes=1, known_broken=True)] if forms and "reported" in forms else [],
    )


def test_a_form_is_timed_at_its_budgets_and_another_at_the_smallest_case() -> None:
    speed = [
        SpeedBudget("fast", case="large", times_naive=2.0),
        SpeedBudget("fast", case="small", times_naive=1.0, device="cuda"),
    ]
    assert forms_to_time(contract(speed=speed), "cpu") == [
        TimedForm("fast", "large", "train", 2.0),
        TimedForm("plain", "small", "train"),
    ]
    assert forms_to_time(contract(speed=speed), "cuda") == [
        TimedForm("fast", "small", "train", 1.0),
        TimedForm("kernel", "small", "train"),
    ], "whose launches a CPU times as well, and with less noise"


def test_without_any_budget_it_is_the_smallest_case() -> None:
    toy = contract(speed=[], grad=False)
    assert toy.smallest_case.name == "small"
    on_cpu = [TimedForm("fast", "small", "forward"), TimedForm("plain", "small", "forward")]
    assert forms_to_time(toy, "cpu") == on_cpu
    assert {*forms_to_time(toy, "cuda")} == {*on_cpu, TimedForm("kernel", "small", "forward")}


def test_what_a_report_shipped_is_timed_only_by_its_budget() -> None:
    forms = {"reported": Form(double, reported=True), "fast": Form(double)}
    assert {timed.form for timed in forms_to_time(contract(speed=[], forms=forms), "cpu")} == {"fast"}
    with_law = contract(speed=[SpeedBudget("reported", case="small", times_naive=2.0)], forms=forms)
    assert {timed.form for timed in forms_to_time(with_law, "cpu")} == {"reported", "fast"}


def test_every_form_of_every_op_is_timed_where_it_can_be() -> None:
    for op in all_contracts().values():
        timed = {device: {timed.form for timed in forms_to_time(op, device)} for device in ("cpu", "cuda")}
        for name, form in op.forms.items():
            if not (form.reported or form.known_unequal):
                assert name in timed["cuda" if form.has_kernels else "cpu"], f"{op.name}/{name}"


def test_a_cpu_is_given_only_what_it_can_time() -> None:
    for op in all_contracts().values():
        for timed in forms_to_time(op, "cpu"):
            case = op.cases[timed.case]
            tensors = [spec for spec in op.inputs if not isinstance(spec, ObjectSpec)]  # whose size is not its dims
            elements = sum(math.prod(spec.size(case.dims)) for spec in tensors)
            assert elements < 2**24, f"{op.name} {timed}"


def test_the_largest_dim_of_a_case_is_halved_down_to_what_equality_draws() -> None:
    toy = Contract(
        "toy",
        naive=lambda x, *, chunk: 2 * x,
        forms={"fast": lambda x, *, chunk: 2 * x},
        dims={"T": Dim(1, 300), "D": Dim(2, 64, multiple_of=2), "chunk": Dim(1, 100)},
        inputs=[TensorSpec("x", "T D")],
        cases={"large": {"T": 131_072, "D": 900, "chunk": 64}, "small": {"T": 300, "D": 64, "chunk": 64}},
    )
    large = TimedForm("fast", "large", "forward", 2.0)
    sizes = large.smaller(toy)
    assert [timed.halvings for timed in sizes] == list(range(13, 0, -1))
    dims = [tuple(timed.case_in(toy).dims.values()) for timed in sizes]
    assert dims[0] == (300, 64, 64)
    assert dims[4:8] == [(512, 450, 64), (512, 900, 64), (1024, 900, 64), (2048, 900, 64)]
    assert dims[-1] == (65_536, 900, 64)
    assert sizes[-1].times_naive == 2.0
    assert large.case_in(toy) == toy.cases["large"]
    assert TimedForm("fast", "small", "forward").smaller(toy) == []
