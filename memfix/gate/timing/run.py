"""The time gate: forms are timed in new processes until these decide, and timed again before the gate fails."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...checks.finding import Finding, Status
from ...checks.measured import Ratio
from ...contract import Contract
from ...errors import MeterUnavailable
from ...laws import NAIVE
from ...progress import Say, silent
from ...provenance import describe
from ...units import format_seconds
from ..judge import Verdict
from .base_checkout import BaseCheckouts, check_out_base
from .rule import CANARY_FACTOR, LIMIT_S, MOST_PROCESSES, STEPS_OF_LIMIT, Decision, Spread, allowed, decide
from .timing_plan import Comparison, TimedForm, comparisons_of, forms_to_time
from .worker import TimingResult, WorkerConfig
from .worker_pool import WorkerPool


def run_time_gate(
    contracts: Sequence[Contract],
    *,
    device: str,
    base_ref: str | None = None,
    processes: int = 1,
    limit_s: float = LIMIT_S,
    needs_idle_gpu: bool = True,
    timed_forms: Mapping[str, Sequence[TimedForm]] | None = None,
    slower_by: Mapping[str, float] | None = None,
    say: Say = silent,
) -> Verdict:
    """Judge the times of ``contracts``: against naive by their budgets, and with ``base_ref`` against that commit.

    At least ``processes`` time each form. On a CPU a case that takes one of them longer than ``limit_s`` is halved
    until it fits. With ``needs_idle_gpu`` a GPU that others use is refused. ``timed_forms`` by op replace those of the
    contracts; ``slower_by`` slows today's forms, each by a share, to test the gate.
    """
    _require_device(device, needs_idle_gpu)
    findings: list[Finding] = []
    smaller: list[str] = []
    with check_out_base(base_ref, contracts) if base_ref else contextlib.nullcontext(BaseCheckouts()) as base:
        findings += base.gone_ops()
        for contract in contracts:
            timed = forms_to_time(contract, device) if timed_forms is None else timed_forms[contract.name]
            folder = base.folders.get(contract.name)
            config = WorkerConfig(contract.name, device, folder, slower_by or {})
            with WorkerPool(config, limit_s=limit_s if device == "cpu" else None, say=say) as workers:
                op = _OpTimer(contract, device, base.ref, processes, limit_s, workers)
                findings += op.findings(comparisons_of(contract, timed, with_base=folder is not None))
                smaller += op.notes
    if not any(isinstance(finding.measured, Ratio) for finding in findings):
        findings.append(Finding("time", "gate", "", "error", f"nothing was timed on {device}"))
    notes = base.notes if base_ref else ["no --base: forms were held against naive only"]
    return Verdict((), tuple(findings), f"clock, {device}", (*notes, *smaller), describe())


def _require_device(device: str, needs_idle_gpu: bool) -> None:
    from ...meters import readiness
    from ...meters.cuda import gpu_unavailable_reason

    if device == "cpu":
        return
    if reason := gpu_unavailable_reason():
        raise MeterUnavailable(f"no time on {device}: {reason}; take --device cpu")
    if needs_idle_gpu:
        readiness.read().require()


@dataclass(eq=False)
class _OpTimer:
    """Times the forms of one op and judges the ratios."""

    contract: Contract
    device: str
    ref: str
    processes: int
    limit_s: float
    workers: WorkerPool
    notes: list[str] = field(default_factory=list)
    """Notes on cases that were too large, and what was timed instead."""

    def findings(self, comparisons: Sequence[Comparison]) -> Iterator[Finding]:
        """Yield one finding for each comparison. What fails is measured a second time, and that result counts."""
        first = self._measure(comparisons)
        smaller = self._smaller([results[-1] for results in first.values() if results[-1].is_too_large])
        first |= self._measure(list(smaller.values()))
        comparisons = [smaller.get(one, one) for one in comparisons]
        failing = [comparison for comparison in comparisons if self._fails(comparison, first[comparison])]
        second = self._measure(failing)
        for comparison in comparisons:
            yield self._finding(comparison, first[comparison], second.get(comparison))

    def _smaller(self, too_large: Sequence[TimingResult]) -> dict[Comparison, Comparison]:
        """Return a smaller size for each comparison at a case that is too large, where one fits.

        A budget beside naive is declared for its own case: it is not judged at another.
        """
        found: dict[Comparison, Comparison] = {}
        notes: dict[TimedForm, str] = {}
        for result in too_large:
            timed, against = result.comparison
            if against != NAIVE and (fitting := self._fitting(timed)):
                found[result.comparison] = Comparison(fitting[0], against)
                subject = f"{self.contract.name}/{timed.form} [{timed.case}, {timed.phase}] on {self.device}"
                instead = f"{self._sizes(fitting[0])} instead ({format_seconds(fitting[1])} a step)"
                notes[timed] = (
                    f"{subject}: {result.error}; timed at {instead}: declare a case of that size, or give --limit"
                )
        self.notes += notes.values()
        return found

    @functools.cache  # noqa: B019 (as long as its op is timed)
    def _fitting(self, timed: TimedForm, *others: str) -> tuple[TimedForm, float] | None:
        """Return the largest size at which a step of the form, and of ``others``, is quick enough, and its seconds."""
        sizes = timed.smaller(self.contract)
        return self.workers.largest_within(self._step_s, sizes, (timed.form, *others)) if sizes else None

    @property
    def _step_s(self) -> float:
        return self.limit_s / STEPS_OF_LIMIT

    def _sizes(self, timed: TimedForm) -> str:
        """Return the dims that differ from those of the case, as text."""
        full = self.contract.cases[timed.case].dims
        return ", ".join(
            f"{dim}={size}" for dim, size in timed.case_in(self.contract).dims.items() if size != full[dim]
        )

    def _measure(self, comparisons: Sequence[Comparison]) -> dict[Comparison, list[TimingResult]]:
        """Time each comparison in one process after the other, until they decide it."""
        found: dict[Comparison, list[TimingResult]] = {comparison: [] for comparison in comparisons}
        open_ones, number = list(comparisons), 0
        while open_ones and number < MOST_PROCESSES:
            for result in self.workers.time(open_ones, base_first=number % 2 == 1):
                found[result.comparison].append(result)
            number += 1
            if number >= self.processes:
                open_ones = [one for one in open_ones if self._decision(one, found[one]) == "undecided"]
        return found

    def _decision(self, comparison: Comparison, results: Sequence[TimingResult]) -> Decision | None:
        """Return the decision, or None where a process could not time the comparison."""
        spread = _spread(results)
        return None if spread is None else decide(spread, allowed(comparison, self.device, spread))

    def _fails(self, comparison: Comparison, results: Sequence[TimingResult]) -> bool:
        """Whether a comparison fails: a form over its limit, or a canary within it."""
        return self._decision(comparison, results) == ("within" if comparison.against == "canary" else "over")

    def _finding(
        self, comparison: Comparison, first: Sequence[TimingResult], second: Sequence[TimingResult] | None
    ) -> Finding:
        timed, against = comparison
        results = first if second is None else second
        spread = _spread(results)
        if spread is None:
            return self._not_timed(comparison, next(result for result in results if result.race is None))
        measured = spread.measured(against, allowed(comparison, self.device, spread))
        fails = self._fails(comparison, results)
        details: tuple[str, ...] = ()
        if against == "canary":
            message = f"made {100 * (CANARY_FACTOR - 1):.0f} % slower on purpose, it reads {measured.spelled()}"
            message += ": no time of this machine can be believed now" if fails else ""
        else:
            of = "naive's time" if against == "naive" else f"its own time at {self.ref}"
            message = measured.message(of, self.device)
            message += f", at {self._sizes(timed)} in place of {timed.case}" if timed.halvings else ""
            before = _spread(first) if second is not None else None
            if before is not None and fails:
                details = (f"  before that: {before.measured(against, measured.limit).spelled()}",)
            elif before is not None:
                message += "; measured again, it was within"
        check, status_of_failure = _CHECKS[against]
        return Finding(
            check, self.contract.name, timed.form, status_of_failure if fails else "pass", message, timed.case,
            timed.phase, details, self._command() if fails else "", measured,
        )  # fmt: skip

    def _not_timed(self, comparison: Comparison, result: TimingResult) -> Finding:
        timed, against = comparison
        what = f"no time at {self.ref}" if result.is_new else f"not timed against {against}"
        status: Status = "note" if result.is_new else "error"
        message = f"{what}: {result.error}" + (self._what_to_declare(comparison) if result.is_too_large else "")
        return Finding("time", self.contract.name, timed.form, status, message, timed.case, timed.phase)

    def _what_to_declare(self, comparison: Comparison) -> str:
        timed, against = comparison
        step = format_seconds(self._step_s)
        if against != NAIVE:
            tried = timed.smaller(self.contract)
            neither = f"; neither fits the smallest size that was tried, {self._sizes(tried[0])}" if tried else ""
            return f"{neither}; declare a case of which a step takes at most {step}, or give --limit"
        fitting = self._fitting(timed, NAIVE)
        such = f", such as {self._sizes(fitting[0])} ({format_seconds(fitting[1])} a step)" if fitting else ""
        return (
            f"; declare the SpeedBudget at a case of which a step of both takes at most {step}{such}, or with "
            "device='cuda', or give --limit"
        )

    def _command(self) -> str:
        base = f" --base {self.ref}" if self.ref else ""
        limit = f" --limit {self.limit_s:g}" if self.limit_s != LIMIT_S else ""
        return f"memfix gate {self.contract.name} --time{base} --device {self.device}{limit}"


_CHECKS: dict[str, tuple[str, Status]] = {
    "base": ("time", "fail"), "naive": ("speed", "fail"), "canary": ("canary", "error"),
}  # fmt: skip
"""The check's name and the status of a failure, by what a form is compared with."""


def _spread(results: Sequence[TimingResult]) -> Spread | None:
    """Return all races, or None where a process could not time the comparison."""
    races = tuple(result.race for result in results if result.race is not None)
    return Spread(races) if len(races) == len(results) else None
