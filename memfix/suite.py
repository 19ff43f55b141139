"""A contract as pytest tests, for anybody's test file: ``test_my_loss = memfix.suite(contract)``.

As in the gate, no memory of a form passes unless the form was found equal in every dtype. A memory test looks up what
the session's equality tests found. Where they did not run, because they were not selected or because another of xdist's
workers ran them, it compares the form first, with the small effort of the profile ``dev``. If the form is unequal the
memory test fails, and if it cannot be compared here the test is skipped.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Protocol

from .checks.effort import PROFILES
from .checks.examine import Found, Tools, run_check, run_checks, standing_of, unless_unequal
from .checks.plan import MEASURED, Check, equality_checks, suite_plan
from .contract import Contract
from .laws import NAIVE, Phase, SpeedBudget

if TYPE_CHECKING:
    from .checks.finding import Finding
    from .meters.base import Reading


class Session(Protocol):
    """What a test needs from the session that it runs in; the plugin's fixture provides it."""

    @property
    def tools(self) -> Tools: ...
    @property
    def file(self) -> str: ...
    def found(self, contract: Contract) -> Found: ...
    def record_reading(self, name: str, size: int, reading: Reading, key: tuple[str, ...] | None = None) -> None: ...
    def against_lock(self, key: tuple[str, str, str, Phase], size: int, reading: Reading) -> Sequence[Finding]: ...


GpuUse = Literal["alone", "beside", "meters"]
"""``alone``: the test has the GPU to itself. ``beside``: others use it that measure nothing. ``meters``: only meters
use the GPU, and reserve it themselves."""


_MEMORY = (*MEASURED, "budget", "scaling")


def suite(*contracts: Contract, only: Literal["gpu", "cpu"] | None = None, speed: bool = True) -> Callable[..., None]:
    """One parametrised test with every check of the contracts. Give it a name that starts with ``test_``.

    Without a GPU: equality and speed on the CPU, bad inputs, and on the simulated meter budgets, scaling, leaks and
    kernels that compile.
    With one, and marked ``gpu``: equality and speed there, and the allocator's bytes against the simulated ones.

    ``only="gpu"`` leaves out the checks that need no GPU, for contracts that ``memfix gate`` proves already;
    ``only="cpu"`` leaves out the others. ``speed=False`` leaves out times, for contracts whose times
    ``memfix gate --time`` holds: it runs nothing else meanwhile, while tests may run on many workers.
    """
    import pytest

    if only not in ("gpu", "cpu", None):
        raise ValueError(f"only must be 'gpu', 'cpu' or None, got {only!r}")
    tests = [
        pytest.param(
            contract,
            check,
            id=_name(check) if len(contracts) == 1 else f"{contract.name}-{_name(check)}",
            marks=[pytest.mark.gpu(use=use)] if (use := _gpu_use(check)) else [],
        )
        for contract in contracts
        for check in suite_plan(contract)
        if (only is None or (only == "gpu") == (_gpu_use(check) is not None)) and (speed or check.kind != "speed")
    ]

    @pytest.mark.parametrize(("contract", "check"), tests)
    def test(contract: Contract, check: Check, memfix_session: Session) -> None:
        __tracebackhide__ = True
        findings = _findings(contract, check, memfix_session)
        bad = [finding for finding in findings if finding.status in ("fail", "error")]
        if bad:
            pytest.fail("\n\n".join(_text(finding, memfix_session.file) for finding in bad), pytrace=False)
        if check.kind == "agreement" and not findings:
            pytest.skip(f"{contract.name}/{check.form} at {check.case} does not fit this GPU")
        if check.kind in _MEMORY and findings and findings[0].status == "note":
            pytest.skip(findings[0].text())

    test.memfix_contracts = contracts  # type: ignore[attr-defined]  # for --from, which takes them out of a test file
    return test


def _text(finding: Finding, file: str) -> str:
    """Return the finding as text, with a command that finds the contract in its test file."""
    again = f"{finding.reproduce} --from {shlex.quote(file)}" if finding.reproduce else ""
    return replace(finding, reproduce=again).text()


def _name(check: Check) -> str:
    what = {
        "equality": f"equal-{check.dtype}{'-cuda' if check.place == 'cuda' else ''}",
        "bad input": f"refuses-{check.bad_input.replace(' ', '_')}",
        "memory": f"small-{check.case}",
        "variant": f"small-{check.case}",
        "budget": "small-drawn",
        "compile": "compiles",
        "scaling": f"grows-{getattr(check.law, 'dim', '')}",
        "speed": f"fast-{check.case}-{getattr(check.law, 'device', '')}",
        "agreement": f"predicted-{check.case}",
    }
    return f"{check.form}-{what[check.kind]}"


def _gpu_use(check: Check) -> GpuUse | None:
    """How a test uses the GPU that it needs, as the marker says it; None where it needs none."""
    if isinstance(check.law, SpeedBudget):
        return "alone" if check.law.device == "cuda" else None
    if check.kind == "agreement":
        return "meters"
    return "beside" if check.place == "cuda" else None


def _findings(contract: Contract, check: Check, session: Session) -> list[Finding]:
    if check.kind in _MEMORY:
        return _memory_findings(contract, check, session)
    outcome = session.found(contract)[check] = run_check(check, contract, session.tools)
    return [*outcome.findings]


def _memory_findings(contract: Contract, check: Check, session: Session) -> list[Finding]:
    """Return the findings about a form's memory. For an unequal form: why none can pass, and failures."""
    from .checks.form_call import FormCall
    from .checks.memory import judge_case

    found = session.found(contract)
    budgets = contract.budgets_of(check.form, check.case) if check.kind == "memory" else []
    beside = {(budget.reference, budget.phase) for budget in budgets if budget.reference}
    needed = [replace(check, form=form) for form in (check.form, *sorted({form for form, _ in beside}))]
    for one in needed:
        _compare_unless_known(contract, one.form, session)
    run_checks(contract, [one for one in needed if one not in found], session.tools, found)
    outcomes = {one.form: found[one] for one in needed if one in found}
    findings = [finding for outcome in outcomes.values() for finding in outcome.findings]
    readings = {(form, phase): r for form, outcome in outcomes.items() for phase, r in outcome.readings.items()}
    if check.kind in MEASURED:
        findings += judge_case(FormCall.at_case(contract, check.form, check.case), readings)
    standing = standing_of(contract, check.form, found)
    if standing.no_memory is not None:
        why = replace(standing.no_memory, status=standing.equality[-1].status)
        return list(unless_unequal(why, findings))
    for (form, phase), reading in readings.items():
        if form == check.form or (form, phase) in beside:
            findings += _recorded(session, (contract.name, form, check.case, phase), reading)
    return findings


def _compare_unless_known(contract: Contract, form: str, session: Session) -> None:
    """Compare ``form``, with little effort, in those dtypes in which the session has not compared it. No GPU is used
    where the meter simulates one."""
    if form != NAIVE:
        found, tools = session.found(contract), replace(session.tools, effort=PROFILES["dev"])
        device = None if tools.meter.simulation is None else "cpu"
        known = {check.dtype for check in found if (check.kind, check.form) == ("equality", form)}
        left = [check for check in equality_checks(contract, form, device) if check.dtype not in known]
        run_checks(contract, left, tools, found)


def _recorded(session: Session, key: tuple[str, str, str, Phase], reading: Reading) -> Sequence[Finding]:
    """Record a reading for the session's reports, and compare it with the lock."""
    from .checks.memory import bytes_of

    op, form, case, phase = key
    size = bytes_of(reading, phase)
    session.record_reading(f"{op}/{form} [{case}, {phase}]", size, reading, key)
    return session.against_lock(key, size, reading)
