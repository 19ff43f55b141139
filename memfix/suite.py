"""A contract as pytest tests, for anybody's test file: ``test_my_loss = memfix.suite(contract)``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .contract import NAIVE, Contract, Phase

if TYPE_CHECKING:
    from .checks.finding import Finding


@dataclass(frozen=True)
class Check:
    """One test of a suite: what it is called, and what it runs. ``gpu``: it needs one."""

    name: str
    run: Callable[[Any], Sequence[Finding]]
    gpu: bool = False


def suite(*contracts: Contract) -> Callable[..., None]:
    """One parametrised test with every check of the contracts. Give it a name that starts with ``test_``.

    Without a GPU: equality on the CPU, bad inputs, and budgets, scaling and leaks on the simulated meter. With
    one, and marked ``gpu``: equality there, and the allocator's bytes against the simulated ones.
    """
    import pytest

    checks = [
        pytest.param(check, id=check.name if len(contracts) == 1 else f"{contract.name}-{check.name}",
                     marks=[pytest.mark.gpu] if check.gpu else [])
        for contract in contracts
        for check in _checks(contract)
    ]  # fmt: skip

    @pytest.mark.parametrize("check", checks)
    def test(check: Check, memfix_session: Any) -> None:
        __tracebackhide__ = True
        bad = [finding for finding in check.run(memfix_session) if finding.status in ("fail", "error")]
        if bad:
            pytest.fail("\n\n".join(finding.text() for finding in bad), pytrace=False)

    return test


def _checks(contract: Contract) -> Iterator[Check]:
    for form in contract.forms:
        for dtype in contract.dtypes:
            yield Check(f"{form}-equal-{dtype}", _equality(contract, form, dtype, "cpu"))
        for bad in contract.bad_inputs:
            yield Check(f"{form}-refuses-{bad.name.replace(' ', '_')}", _bad_input(contract, form, bad))
        for case in contract.cases:
            yield Check(f"{form}-small-{case}", _budgets(contract, form, case))
        yield Check(f"{form}-small-drawn", _drawn(contract, form))
        for law in contract.scaling:
            if law.form == form:
                yield Check(f"{form}-grows-{law.dim}", _scaling(contract, law))
    for form in contract.forms:
        for dtype in contract.dtypes:
            yield Check(f"{form}-equal-{dtype}-cuda", _equality(contract, form, dtype, "cuda"), gpu=True)
    for form in (NAIVE, *contract.forms):
        for case in contract.cases:
            yield Check(f"{form}-predicted-{case}", _agreement(contract, form, case), gpu=True)


def _equality(contract: Contract, form: str, dtype: str, device: str) -> Callable[[Any], Sequence[Finding]]:
    def run(session: Any) -> Sequence[Finding]:
        from .checks.equality import check_equality

        return [check_equality(contract, form, dtype=dtype, device=device, examples=session.effort.equality_examples)]

    return run


def _bad_input(contract: Contract, form: str, bad: Any) -> Callable[[Any], Sequence[Finding]]:
    def run(_session: Any) -> Sequence[Finding]:
        from .checks.bad_inputs import check_bad_input

        return [check_bad_input(contract, form, bad)]

    return run


def _budgets(contract: Contract, form: str, case: str) -> Callable[[Any], Sequence[Finding]]:
    def run(session: Any) -> Sequence[Finding]:
        from .checks.inputs import Draw, phases_of
        from .checks.memory import bytes_of, forms_needed, judge_budget, judge_leak, measure

        budgets = contract.budgets_of(form, case)
        draw = Draw(contract.cases[case])
        needed = {(f, budget.phase) for budget in budgets for f in forms_needed(budget)}
        needed |= {(form, phase) for phase in phases_of(contract)}
        readings = {(f, phase): measure(contract, f, draw, phase, session.meter) for f, phase in sorted(needed)}
        locked: list[Finding] = []
        for (f, phase), reading in readings.items():
            key, size = (contract.name, f, case, phase), bytes_of(reading, phase)
            session.record_reading(f"{contract.name}/{f} [{case}, {phase}]", size, reading, key)
            locked += session.against_lock(key, size, reading)
        leaks = [judge_leak(contract, form, draw.case, phase, r) for (f, phase), r in readings.items() if f == form]
        judged = [judge_budget(contract, budget, draw.case, readings) for budget in budgets]
        return [*judged, *locked, *(leak for leak in leaks if leak is not None)]

    return run


def _drawn(contract: Contract, form: str) -> Callable[[Any], Sequence[Finding]]:
    def run(session: Any) -> Sequence[Finding]:
        from .checks.memory import check_drawn_budgets

        found = check_drawn_budgets(contract, form, session.simulated_meter, examples=session.effort.memory_examples)
        return [found] if found is not None else []

    return run


def _scaling(contract: Contract, law: Any) -> Callable[[Any], Sequence[Finding]]:
    def run(session: Any) -> Sequence[Finding]:
        from .checks.scaling import check_scaling

        return [check_scaling(contract, law, session.simulated_meter)]

    return run


def _agreement(contract: Contract, form: str, case: str) -> Callable[[Any], Sequence[Finding]]:
    """The simulated bytes against the allocator's, phase by phase, where the GPU can hold the case."""

    def run(session: Any) -> Sequence[Finding]:
        import pytest

        from .checks.agreement import check_agreement, fits_here
        from .checks.inputs import phases_of

        phases: tuple[Phase, ...] = phases_of(contract)
        if not fits_here(contract, form, case, session.simulated_meter):
            pytest.skip(f"{contract.name}/{form} at {case} does not fit this GPU")
        return [check_agreement(contract, form, case, phase, session.simulated_meter) for phase in phases]

    return run
