"""Phases measured one after the other: the same readings as each for itself with its warm-up, in half the time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from memfix import Budget, Contract, Dim, Integers, TensorSpec
from memfix.checks import drawn_budgets, measuring
from memfix.checks.drawn_budgets import check_drawn_budgets, measure_and_judge
from memfix.checks.effort import PROFILES
from memfix.checks.examine import examine
from memfix.checks.form_call import FormCall, phases_of
from memfix.checks.inputs import Draw
from memfix.checks.measuring import measure, measure_phases
from memfix.checks.memory import bytes_of, judge_leak, limit_of
from memfix.checks.scaling import check_scaling
from memfix.gate.judge import judge_lock
from memfix.laws import Scaling
from memfix.meters import get_meter
from memfix.registry import all_contracts

METER = get_meter("simulated")


def square(x: torch.Tensor) -> torch.Tensor:
    return (x * x).exp()


def contract(form: Callable[..., Any], **more: Any) -> Contract:
    return Contract(
        "square",
        naive=square,
        forms={"form": form},
        dims={"N": Dim(1, 9000)},
        inputs=[TensorSpec("x", "N", grad=True)],
        cases={"small": {"N": 100}, "large": {"N": 5000}},
        **more,
    )


def both(made: Contract, case: str, form: str = "form") -> list[tuple[Any, Any]]:
    call = FormCall.at_case(made, form, case)
    together = measure_phases(call, call.phases, METER)
    assert list(together) == list(phases_of(made))
    return [(reading, measure(call, phase, METER)) for phase, reading in together.items()]


@pytest.fixture
def num_measured_alone(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    phases: list[str] = []
    alone = measuring.measure

    def noted(call: FormCall, phase: Any, meter: Any) -> Any:
        phases.append(phase)
        return alone(call, phase, meter)

    monkeypatch.setattr(measuring, "measure", noted)
    return phases


@pytest.mark.parametrize("op", ["embedding", "linear_cross_entropy", "rope", "nsa"])
def test_readings_of_every_form_are_those_of_each_phase_for_itself(op: str) -> None:
    made = all_contracts()[op]
    for form in ("naive", *made.forms):
        for together, alone in both(made, "small", form):
            assert together == alone
            assert together.timeline == alone.timeline


def test_a_form_that_repeats_itself_is_never_measured_alone(num_measured_alone: list[str]) -> None:
    made = contract(lambda x: (x * x).exp())
    for case in made.cases:
        measure_phases(FormCall.at_case(made, "form", case), phases_of(made), METER)
    assert num_measured_alone == []


class KeepsATable:
    """From its first call on it keeps a table, of another simulation another one."""

    def __init__(self, from_size: int = 0) -> None:
        self.tables: dict[object, torch.Tensor] = {}
        self.from_size = from_size

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] < self.from_size:
            return (x * x).exp()
        world = getattr(x, "fake_mode", None)
        if world not in self.tables:
            self.tables[world] = torch.empty(1000, device=x.device)
        return (x * x).exp()


@pytest.mark.parametrize("from_size", [0, 1000])
def test_what_a_first_call_leaves_for_the_next_is_in_no_reading(from_size: int) -> None:
    """Also where the smallest case does not show it."""
    for together, alone in both(contract(KeepsATable(from_size)), "large"):
        assert together == alone
        assert alone.leaked_bytes == 0
        assert alone.peak_bytes % (4 * 5000) == 0  # nothing of the table


@pytest.mark.parametrize("from_size", [0, 1000])
def test_what_a_first_call_keeps_is_a_reading_of_its_own_with_its_line(from_size: int) -> None:
    made = contract(KeepsATable(from_size))
    kept = measure_phases(FormCall.at_case(made, "form", "large"), [*phases_of(made), "kept"], METER)["kept"]
    assert bytes_of(kept, "kept") == 4000
    assert "test_phases.py" in kept.alive_at_peak[0].place
    assert kept.alive_at_peak[0].code == "self.tables[world] = torch.empty(1000, device=x.device)"
    nothing = measure_phases(FormCall.at_case(made, "naive", "large"), ["kept"], METER)["kept"]
    assert bytes_of(nothing, "kept") == 0


def test_a_cache_that_simulations_share_is_kept_in_each() -> None:
    tables: dict[int, torch.Tensor] = {}

    def caches(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] not in tables:
            tables[x.shape[0]] = torch.empty(1000, device=x.device)
        tables[x.shape[0]].zero_()
        return (x * x).exp()

    made = contract(caches)
    for _ in range(2):
        readings = [measure(FormCall.at_case(made, "form", "large"), phase, METER) for phase in phases_of(made)]
        assert [sum(row.bytes for row in reading.kept) for reading in readings] == [4000] * 3


@pytest.mark.parametrize(
    ("budget", "status", "message"),
    [
        (None, "fail", "keeps 3.91 KiB for good after a first call, which no budget of the phase kept allows"),
        ("4*1000", "pass", "kept 3.91 KiB, budget 3.91 KiB, meter simulated"),
        ("4*999", "fail", "kept 3.91 KiB, budget 3.90 KiB (+0.1 %), meter simulated"),
    ],
)
def test_what_is_kept_needs_a_budget_and_a_lock_entry(budget: str | None, status: str, message: str) -> None:
    laws = [] if budget is None else [Budget("form", phase="kept", bytes=budget)]
    found = examine(contract(KeepsATable(), budgets=laws), METER, PROFILES["dev"])
    at_large = [finding for finding in found.findings if (finding.case, finding.phase) == ("large", "kept")]
    assert [(finding.status, finding.message) for finding in at_large] == [(status, message)]
    locked = judge_lock([found], {("square", "form", "large", "forward"): 1}, {})
    assert "square/form [large, kept]" in {f"{f.op}/{f.form} [{f.case}, {f.phase}]" for f in locked}
    assert "square/naive [large, kept]" not in {f"{f.op}/{f.form} [{f.case}, {f.phase}]" for f in locked}


def test_a_failure_of_what_is_held_lists_what_is_held() -> None:
    found = examine(contract(square, budgets=[Budget("form", phase="held", bytes=1)]), METER, PROFILES["dev"])
    held = next(f for f in found.findings if f.phase == "held" and f.status == "fail")
    assert held.details[0] == "  held when the forward has ended, largest first"
    assert "exp" in held.details[1]


def test_a_first_call_that_takes_more_and_leaves_nothing_is_seen() -> None:
    seen: set[object] = set()

    def plans_first(x: torch.Tensor) -> torch.Tensor:
        world = getattr(x, "fake_mode", None)
        if world not in seen:
            seen.add(world)
            torch.empty(1_000_000, device=x.device)
        return (x * x).exp()

    for together, alone in both(contract(plans_first), "large"):
        assert together.peak_bytes == alone.peak_bytes < 1_000_000


def test_a_leak_is_reported_as_ever() -> None:
    kept: list[torch.Tensor] = []

    def leaks(x: torch.Tensor) -> torch.Tensor:
        kept.append(torch.empty(10, device=x.device))
        return (x * x).exp()

    assert [together.leaked_bytes for together, _ in both(contract(leaks), "large")] == [40, 40, 40]


def test_what_only_pythons_collector_frees_is_a_leak() -> None:
    def in_a_cycle(x: torch.Tensor) -> torch.Tensor:
        result = (x * x).exp()
        result.itself = [result]  # type: ignore[attr-defined]
        return result

    made = contract(in_a_cycle)
    for together, alone in both(made, "large"):
        assert (together.leaked_bytes, together.cyclic_bytes) == (alone.leaked_bytes, alone.cyclic_bytes)
        leak = judge_leak(FormCall.at_case(made, "form", "large"), "train", together)
        assert leak is not None
        assert "in a reference cycle, until Python's collector runs" in leak.message


def test_a_phase_that_cannot_be_measured_raises_its_own_error() -> None:
    made = contract(lambda x: x.to_sparse().to_dense())
    with pytest.raises(Exception, match="the step uses what cannot be simulated"):
        measure_phases(FormCall.at_case(made, "form", "small"), phases_of(made), METER)


def test_of_several_budgets_at_drawn_shapes_the_broken_one_is_named() -> None:
    made = contract(
        lambda x: (x * x).exp(),
        budgets=[Budget("form", phase="forward", bytes="8*N*e"), Budget("form", phase="train", bytes="e")],
    )
    (found,) = check_drawn_budgets(made, "form", METER, examples=3)
    assert (found.status, found.phase) == ("fail", "train")
    assert "at N=" in found.message
    kept = contract(lambda x: (x * x).exp(), budgets=[Budget("form", phase="train", bytes="8*N*e")])
    (found,) = check_drawn_budgets(kept, "form", METER, examples=3)
    assert found.message == "1 budget held at 4 drawn shapes each"


def rows_and_weights(x: torch.Tensor, y: torch.Tensor | None, *, keeps: bool) -> Any:
    weights = (x @ x.T).detach()
    return (x * 2, weights) if keeps else x * 2


def with_a_map(bytes_held: str) -> Contract:
    return Contract(
        "rows",
        naive=rows_and_weights,
        forms={"form": rows_and_weights},
        dims={"N": Dim(1, 9), "D": Dim(1, 9)},
        choices={"keeps": (False, True)},
        inputs=[TensorSpec("x", "N D", grad=True), TensorSpec("y", "N D", optional=True)],
        cases={"small": {"N": 64, "D": 8}, "kept": {"N": 64, "D": 8, "keeps": True, "present": ("y",)}},
        budgets=[Budget("form", phase="held", bytes=bytes_held)],
    )


def test_a_result_without_a_gradient_is_held_by_the_caller() -> None:
    rows, weights = 64 * 8 * 4, 64 * 64 * 4
    readings = measure_phases(FormCall.at_case(with_a_map("1 MiB"), "form", "kept"), ["held", "train"], METER)
    assert readings["held"].held_bytes == rows + weights
    assert readings["train"].peak_bytes == rows + weights + rows  # and the gradient


@pytest.mark.parametrize(
    ("formula", "limits"),
    [("N*D*e + keeps*N*N*e", (2048, 18_432)), ("N*D*e*(1 + 8*y)", (2048, 18_432)), ("N*N*e + N*D*e", (18_432, 18_432))],
)
def test_a_formula_counts_what_an_option_costs_only_where_it_is_on(formula: str, limits: tuple[int, int]) -> None:
    made = with_a_map(formula)
    calls = [FormCall.at_case(made, "form", case) for case in made.cases]
    assert tuple(limit_of(call, made.budgets[0], {}) for call in calls) == limits
    assert [judged.status for call in calls for judged in measure_and_judge(call, made.budgets, METER)] == ["pass"] * 2


def test_dims_that_are_doubled_together_show_a_square_that_neither_shows_alone() -> None:
    def outer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.outer(x, y).sum()

    made = Contract(
        "outer",
        naive=outer,
        forms={"form": outer},
        dims={"N": Dim(1, 9), "M": Dim(1, 9)},
        inputs=[TensorSpec("x", "N"), TensorSpec("y", "M")],
        cases={"small": {"N": 256, "M": 256}},
        scaling=[Scaling("form", dim=dim, case="small", phase="forward") for dim in ("N", "N M")],
    )
    alone, together = (check_scaling(made, law, METER) for law in made.scaling)
    assert (alone.status, together.status) == ("pass", "fail")
    assert together.message.startswith("grows like (N M)^2.00 from N=1024, M=1024 (4.00 MiB) to N=4096, M=4096 (64.00")
    assert made.scaling[1].spelled() == "form [small, forward] grows at most like (N M)^1 over 4 doublings"


class _Looked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor, keeps: bool) -> torch.Tensor:
        ctx.save_for_backward(ids if keeps else ids.clone())
        ctx.num_rows = len(weight)
        return weight[ids]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        return None, gradient.new_zeros(ctx.num_rows, gradient.shape[1]).index_add(0, ids, gradient), None


@pytest.mark.parametrize(("keeps", "size"), [(True, 16 * 8), (False, 0)])
def test_an_input_of_integers_is_saved_as_any_other(keeps: bool, size: int) -> None:
    looking = Contract(
        "looking",
        naive=lambda ids, weight: weight[ids],
        forms={"form": lambda ids, weight: _Looked.apply(ids, weight, keeps)},
        dims={"N": Dim(1, 9), "V": Dim(1, 9)},
        inputs=[TensorSpec("ids", "N", dtype="int64", values=Integers("V")), TensorSpec("weight", "V 4", grad=True)],
        cases={"small": {"N": 16, "V": 8}},
    )
    draw = Draw(looking.cases["small"])
    readings = measure_phases(FormCall(looking, "form", draw), ["train", "saved"], get_meter("simulated"))
    assert readings["saved"].peak_bytes == size


class _Rooted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, keeps: bool) -> torch.Tensor:
        root = x.sqrt()
        ctx.save_for_backward(root if keeps else x)
        return root

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.saved_tensors[0], None


@pytest.mark.parametrize(("keeps", "saved", "results"), [(True, 0, 400), (False, 400, 0)])
def test_a_result_that_is_kept_for_backward_is_a_reading_of_its_own(keeps: bool, saved: int, results: int) -> None:
    made = contract(lambda x: _Rooted.apply(x, keeps))
    readings = measure_phases(FormCall.at_case(made, "form", "small"), ["train", "saved", "results"], METER)
    assert (readings["saved"].peak_bytes, readings["results"].peak_bytes) == (saved, results)
    assert [row.what for row in readings["results"].alive_at_peak] == (["result 0"] if keeps else [])


def test_a_result_that_is_a_view_of_a_saved_input_counts_once() -> None:
    made = contract(lambda x: (x * x.detach()).sum() + x.view(-1))
    readings = measure_phases(FormCall.at_case(made, "form", "small"), ["saved", "results"], METER)
    assert (readings["saved"].peak_bytes, readings["results"].peak_bytes) == (400, 0)


def test_a_leak_that_only_an_option_has_is_found_at_drawn_shapes() -> None:
    history = []

    def form(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if bias is not None:
            history.append(bias * 1)
        return x * 2 if bias is None else x * 2 + bias

    adding = Contract(
        "adding",
        naive=lambda x, bias: x * 2 if bias is None else x * 2 + bias,
        forms={"form": form},
        dims={"N": Dim(1, 9)},
        inputs=[TensorSpec("x", "N 4", grad=True), TensorSpec("bias", "4", optional=True)],
        cases={"small": {"N": 16}},
        budgets=[Budget("form", phase="train", bytes="1 MiB")],
    )
    (found,) = check_drawn_budgets(adding, "form", get_meter("simulated"), examples=8)
    assert (found.check, found.status) == ("leak", "fail")
    assert "present=bias" in found.reproduce


def test_a_meter_that_really_runs_the_steps_is_asked_at_small_shapes_until_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Real:
        """Its bytes are those of a simulation; each step takes two seconds."""

        name, simulation, now_s = "real", None, 0.0

        def measure(self, build: Any, *, warmup: int = 1) -> Any:
            self.now_s += 2.0
            return METER.measure(build, warmup=warmup)

    meter: Any = Real()
    monkeypatch.setattr(drawn_budgets.time, "monotonic", lambda: meter.now_s)
    made = contract(square, budgets=[Budget("form", phase="forward", bytes="1 MiB")])
    for one, said in ((meter, "held at 3 drawn shapes each"), (METER, "held at 8 drawn shapes each")):
        (found,) = check_drawn_budgets(made, "form", one, examples=8)
        assert said in found.message
