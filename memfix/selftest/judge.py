"""Runs the gate's checks of one form on a mutant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..checks.effort import Effort
from ..checks.examine import Found, Outcome, Tools, put_together, run_check, run_checks
from ..checks.finding import Finding
from ..checks.plan import Check, gate_plan
from ..contract import Contract
from ..gate.judge import judge_lock
from ..gate.lock import Key
from ..laws import NAIVE
from ..meters import get_meter

Group = tuple[Check, ...]
"""Checks of one form that are run together: equality in one dtype, all bad inputs, or all of its memory."""


def is_memory(group: Group) -> bool:
    return group[0].kind not in ("equality", "bad input")


def check_groups(contract: Contract, forms: Sequence[str], *, interpreted: bool) -> list[Group]:
    """Return the gate's checks without a GPU in groups: those that need Triton's interpreter, or the others."""
    groups: dict[tuple[str, str, bool], Group] = {}
    for check in gate_plan(contract, get_meter("simulated"), forms=forms, device="cpu"):
        if check.form != NAIVE and (check.place == "interpreter") == interpreted:
            key = (check.form, check.dtype, is_memory((check,)))
            groups[key] = (*groups.get(key, ()), check)
    return list(groups.values())


@dataclass
class Judge:
    """Runs groups of checks. ``naive`` caches naive's outcomes, which no mutant changes."""

    effort: Effort
    lock: Mapping[Key, int] | None
    naive: Found = field(default_factory=dict)

    def first_failure(self, contract: Contract, groups: Sequence[Group]) -> Finding | None:
        findings = (finding for group in groups for finding in self._findings(contract, group))
        return next((finding for finding in findings if finding.status in ("fail", "error")), None)

    def _findings(self, contract: Contract, group: Group) -> Iterator[Finding]:
        meter = get_meter("simulated")
        tools, form = Tools(meter, self.effort), group[0].form
        if not is_memory(group):
            yield from (finding for check in group for finding in run_check(check, contract, tools).findings)
            return
        plan = gate_plan(contract, meter, forms=[form], device="cpu")
        self.naive = self.naive or run_checks(contract, [check for check in plan if check.form == NAIVE], tools, {})
        # memory checks pass only if the form is equal; here equality is assumed, because other groups check it
        equal = Outcome((Finding("equality", contract.name, form, "pass", ""),))
        found = {**self.naive, **{check: equal for check in plan if check.kind == "equality"}}
        examination = put_together(contract, plan, run_checks(contract, group, tools, found))
        yield from examination.findings
        if self.lock is not None:
            entries = {key: size for key, size in self.lock.items() if key[1] in (NAIVE, form)}
            yield from judge_lock([examination], entries, {})
