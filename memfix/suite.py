"""A contract as pytest tests, for anybody's test file: ``test_my_loss = memfix.suite(contract)``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

from .contract import BadInput, Contract
from .laws import NAIVE, Phase, Scaling, SpeedBudget

if TYPE_CHECKING:
    from .checks.effort import Effort
    from .checks.finding import Finding
    from .meters.base import Meter, Reading


class Session(Protocol):
    """What a check asks of the test session that it runs in; the plugin's fixture gives it."""

    @property
    def effort(self) -> Effort: ...
    @property
    def meter(self) -> Meter: ...
    @property
    def simulated_meter(self) -> Meter: ...
    def record_reading(self, name: str, size: int, reading: Reading, key: tuple[str, ...] | None = None) -> None: ...
    def against_lock(self, key: tuple[str, str, str, Phase], size: int, reading: Reading) -> Sequence[Finding]: ...


GpuUse = Literal["alone", "beside", "meters"]
"""``alone``: nobody else may use the GPU. ``beside``: others may that measure nothing. ``meters``: it is used by meters
only, which see to it themselves."""


@dataclass(frozen=True)
class Check:
    """One test of a suite: what it is called, and what it runs. ``gpu``: it needs one, as the marker says."""

    name: str
    run: Callable[[Session], Sequence[Finding]]
    gpu: GpuUse | None = None


def suite(*contracts: Contract, only: Literal["gpu", "cpu"] | None = None) -> Callable[..., None]:
    """One parametrised test with every check of the contracts. Give it a name that starts with ``test_``.

    Without a GPU: equality and speed on the CPU, bad inputs, and on the simulated meter budgets, scaling, leaks and
    kernels that compile.
    With one, and marked ``gpu``: equality and speed there, and the allocator's bytes against the simulated ones.

    ``only="gpu"`` leaves out the checks that need no GPU, for contracts that ``memfix gate`` proves already;
    ``only="cpu"`` leaves out the others.
    """
    import pytest

    if only not in ("gpu", "cpu", None):
        raise ValueError(f"only must be 'gpu', 'cpu' or None, got {only!r}")
    checks = [
        pytest.param(
            check,
            id=check.name if len(contracts) == 1 else f"{contract.name}-{check.name}",
            marks=[pytest.mark.gpu(use=check.gpu)] if check.gpu else [],
        )
        for contract in contracts
        for check in _checks(contract)
        if only is None or (only == "gpu") == (check.gpu is not None)
    ]

    @pytest.mark.parametrize("check", checks)
    def test(check: Check, memfix_session: Session) -> None:
        __tracebackhide__ = True
        bad = [finding for finding in check.run(memfix_session) if finding.status in ("fail", "error")]
        if bad:
            pytest.fail("\n\n".join(finding.text() for finding in bad), pytrace=False)

    return test


def _checks(contract: Contract) -> Iterator[Check]:
    unequal = contract.known_unequal_forms()  # memory is judged only where equality holds
    for form in contract.forms:
        for dtype in contract.dtypes:
            yield Check(f"{form}-equal-{dtype}", partial(_equality, contract, form, dtype, "cpu"))
            if contract.memory == "gpu":
                on_gpu = partial(_equality, contract, form, dtype, "cuda")
                yield Check(f"{form}-equal-{dtype}-cuda", on_gpu, gpu="beside")
        for bad in contract.bad_inputs:
            yield Check(f"{form}-refuses-{bad.name.replace(' ', '_')}", partial(_bad_input, contract, form, bad))
        if form in unequal:
            continue
        for case in contract.cases:
            yield Check(f"{form}-small-{case}", partial(_budgets, contract, form, case))
        if any(budget.form == form and budget.case is None for budget in contract.budgets):
            yield Check(f"{form}-small-drawn", partial(_drawn, contract, form))
        if contract.forms[form].has_kernels:
            yield Check(f"{form}-compiles", partial(_compiles, contract, form))
    for law in contract.scaling:
        yield Check(f"{law.form}-grows-{law.dim}", partial(_scaling, contract, law))
    for timed in contract.speed:
        name = f"{timed.form}-fast-{timed.case}-{timed.device}"
        yield Check(name, partial(_speed, contract, timed), gpu="alone" if timed.device == "cuda" else None)
    for form in (NAIVE, *(form for form in contract.forms if form not in unequal)):
        for case in contract.cases if contract.memory == "gpu" else ():
            yield Check(f"{form}-predicted-{case}", partial(_agreement, contract, form, case), gpu="meters")


def _equality(contract: Contract, form: str, dtype: str, device: str, session: Session) -> Sequence[Finding]:
    from .checks.equality import check_equality

    examples = session.effort.equality_examples
    return [check_equality(contract, form, dtype=dtype, device=device, examples=examples)]


def _bad_input(contract: Contract, form: str, bad: BadInput, _session: Session) -> Sequence[Finding]:
    from .checks.bad_inputs import check_bad_input

    return [check_bad_input(contract, form, bad)]


def _budgets(contract: Contract, form: str, case: str, session: Session) -> Sequence[Finding]:
    """Budgets, leaks and, where there is one, the lock, at one case."""
    from .checks.examine import meter_of
    from .checks.inputs import Draw, phases_beside, phases_of
    from .checks.memory import bytes_of, judge_budget, judge_kept, judge_leak, readings_for

    budgets = contract.budgets_of(form, case)
    draw = Draw(contract.cases[case])
    phases = phases_of(contract)
    beside = phases_beside(phases)
    every_phase: list[tuple[str, Phase]] = [(form, phase) for phase in (*phases, *beside)]
    readings = readings_for(contract, budgets, draw, meter_of(contract, session.meter), also=every_phase)
    findings = [judge_budget(contract, budget, draw.case, readings) for budget in budgets]
    kept = judge_kept(contract, form, draw.case, readings)
    findings += [kept] if kept is not None else []
    for (f, phase), reading in readings.items():
        if phase in beside and not reading.peak_bytes:
            continue
        key, size = (contract.name, f, case, phase), bytes_of(reading, phase)
        session.record_reading(f"{contract.name}/{f} [{case}, {phase}]", size, reading, key)
        findings += session.against_lock(key, size, reading)
        leak = judge_leak(contract, f, draw.case, phase, reading)
        findings += [leak] if leak is not None else []
    return findings


def _drawn(contract: Contract, form: str, session: Session) -> Sequence[Finding]:
    from .checks.examine import meter_of
    from .checks.memory import check_drawn_budgets

    meter = meter_of(contract, session.simulated_meter)
    found = check_drawn_budgets(contract, form, meter, examples=session.effort.memory_examples)
    return [found] if found is not None else []


def _compiles(contract: Contract, form: str, session: Session) -> Sequence[Finding]:
    from .checks.compiling import check_compiles

    return [check_compiles(contract, form, session.simulated_meter)]


def _scaling(contract: Contract, law: Scaling, session: Session) -> Sequence[Finding]:
    from .checks.examine import meter_of
    from .checks.scaling import check_scaling

    return [check_scaling(contract, law, meter_of(contract, session.simulated_meter))]


def _speed(contract: Contract, law: SpeedBudget, _session: Session) -> Sequence[Finding]:
    from .checks.speed import check_speed

    return [check_speed(contract, law)]


def _agreement(contract: Contract, form: str, case: str, session: Session) -> Sequence[Finding]:
    """The simulated bytes against the allocator's, phase by phase, where the GPU can hold the case."""
    import pytest

    from .checks.agreement import check_agreement

    found = check_agreement(contract, form, case, session.simulated_meter)
    if not found:
        pytest.skip(f"{contract.name}/{form} at {case} does not fit this GPU")
    return found
