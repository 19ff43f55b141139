"""The time gate's course: fresh processes until they can tell, and a second opinion before it fails."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...checks.finding import Finding, Status
from ...contract import Contract
from ...errors import MeterUnavailable
from ...provenance import describe
from ...units import format_seconds
from ..judge import Verdict
from .base_checkout import Copies, copies_at
from .child import Station, Subject, Timed
from .rule import ALLOWED, CANARY_FACTOR, MOST_PROCESSES, Spread, allowed_over_base, answer
from .timing_plan import BASE, CANARY, NAIVE_FORM, Place, places_of
from .worker_pool import FreshProcesses

Say = Callable[[str], None]


def run_time_gate(
    contracts: Sequence[Contract],
    *,
    device: str,
    base_ref: str | None = None,
    processes: int = 1,
    needs_idle_gpu: bool = True,
    places: Mapping[str, Sequence[Place]] | None = None,
    slower_by: Mapping[str, float] | None = None,
    say: Say = lambda _: None,
) -> Verdict:
    """Judge the times of ``contracts``: against naive as they promise, and with ``base_ref`` against that commit.

    So many ``processes`` are asked at least. A GPU that others use is refused, if ``needs_idle_gpu``. ``places`` by op
    are where else than the contracts say; ``slower_by`` slows today's forms, each by a share, to try the gate.
    """
    _require(device, needs_idle_gpu)
    findings: list[Finding] = []
    with copies_at(base_ref, contracts) if base_ref else contextlib.nullcontext(Copies()) as copies:
        findings += [
            Finding("time", op, "", "note", f"the op is there at {copies.ref} and gone now") for op in copies.ops_gone()
        ]
        for contract in contracts:
            chosen = places_of(contract, device) if places is None else places[contract.name]
            folder = copies.folders.get(contract.name)
            station = Station(contract.name, device, folder, slower_by or {})
            with FreshProcesses(station) as fresh:
                referee = _Referee(contract, device, copies.ref, processes, fresh, say)
                findings += referee.judged(_subjects(contract, chosen, with_base=folder is not None))
    if not any("ratio" in finding.figures for finding in findings):
        findings.append(Finding("time", "gate", "", "error", f"nothing was timed on {device}"))
    notes = copies.notes if base_ref else ["no --base: forms were held against naive only"]
    return Verdict((), tuple(findings), f"clock, {device}", tuple(notes), describe())


def _require(device: str, needs_idle_gpu: bool) -> None:
    from ...meters import readiness
    from ...meters.cuda import gpu_unavailable_reason

    if device == "cpu":
        return
    if reason := gpu_unavailable_reason():
        raise MeterUnavailable(f"no time on {device}: {reason}; take --device cpu")
    if needs_idle_gpu:
        readiness.read().require()


def _subjects(contract: Contract, places: Sequence[Place], *, with_base: bool) -> list[Subject]:
    """Every form against base and, where it has a budget, naive; and one against itself, slowed.

    What a report shipped stays as it is shown, so it is held against naive alone.
    """
    subjects = [(place, BASE) for place in places if with_base and not contract.forms[place.form].reported]
    subjects += [(place, NAIVE_FORM) for place in places if place.times_naive is not None]
    return [(places[0], CANARY), *subjects] if subjects else []


@dataclass
class _Referee:
    contract: Contract
    device: str
    ref: str
    processes: int
    fresh: FreshProcesses
    say: Say

    def judged(self, subjects: Sequence[Subject]) -> Iterator[Finding]:
        """One finding a subject, and the canary's word where it was not seen."""
        first = self._measured(subjects)
        doubtful = [subject for subject, timed in first.items() if self._is_bad(subject, timed)]
        second = self._measured(doubtful) if doubtful else {}
        for subject in subjects:
            yield self._finding(subject, first[subject], second.get(subject))

    # ---------------------------------------------------------------- measuring
    def _measured(self, subjects: Sequence[Subject]) -> dict[Subject, list[Timed]]:
        """Each subject in one process after the other, until they can tell."""
        found: dict[Subject, list[Timed]] = {subject: [] for subject in subjects}
        asked, number = list(subjects), 0
        while asked and number < MOST_PROCESSES:
            for timed in self.fresh.timed(asked, base_first=number % 2 == 1):
                found[timed.subject].append(timed)
            number += 1
            self.say(f"{self.contract.name}: timed in {number} process{'es' if number > 1 else ''}")
            if number >= self.processes:
                asked = [subject for subject in asked if self._answer(subject, found[subject]) == "undecided"]
        return found

    # ---------------------------------------------------------------- judging
    def _spread(self, timed: Sequence[Timed]) -> Spread | None:
        races = [one.race for one in timed if one.race is not None]
        if len(races) < len(timed):
            return None
        return Spread(
            tuple(race.ratio for race in races),
            sum(race.pairs for race in races),
            statistics.median(race.first_s for race in races),
            statistics.median(race.second_s for race in races),
        )

    def _limit(self, subject: Subject, spread: Spread) -> float:
        place, against = subject
        if against == NAIVE_FORM and place.times_naive is not None:
            return place.times_naive
        return ALLOWED if against == CANARY else allowed_over_base(self.device, spread)

    def _answer(self, subject: Subject, timed: Sequence[Timed]) -> str:
        spread = self._spread(timed)
        return "nothing" if spread is None else answer(spread, self._limit(subject, spread))

    def _is_bad(self, subject: Subject, timed: Sequence[Timed]) -> bool:
        return self._answer(subject, timed) == ("within" if subject[1] == CANARY else "over")

    def _finding(self, subject: Subject, first: Sequence[Timed], second: Sequence[Timed] | None) -> Finding:
        place, against = subject
        last = first if second is None else second
        spread = self._spread(last)
        if spread is None:
            return self._without_time(subject, next(one for one in last if one.race is None))
        limit = self._limit(subject, spread)
        bad = self._is_bad(subject, last)
        if against == CANARY:
            message = f"made {100 * (CANARY_FACTOR - 1):.0f} % slower on purpose, it reads {spread.spelled()}"
            message += ": no time of this machine can be believed now" if bad else ""
            status: Status = "error" if bad else "pass"
        else:
            of = "naive's time" if against == NAIVE_FORM else f"its own time at {self.ref}"
            message = f"takes {spread.spelled()} {of}, allowed {limit:.3g}x on {self.device}"
            message += f" ({format_seconds(spread.first_s)} against {format_seconds(spread.second_s)})"
            message += "; measured again, it was within" if second is not None and not bad else ""
            status = "fail" if bad else "pass"
        check = {CANARY: "canary", NAIVE_FORM: "speed"}.get(against, "time")
        figures = {
            "ratio": spread.ratio, "low": spread.low, "high": spread.high, "limit": limit,
            "processes": len(spread.ratios), "pairs": spread.pairs,
            "seconds": spread.first_s, f"{against}_seconds": spread.second_s,
        }  # fmt: skip
        details = () if second is None or not bad or against == CANARY else (self._first_word(first),)
        reproduce = self._command() if status != "pass" else ""
        return Finding(
            check, self.contract.name, place.form, status, message, place.case, place.phase, details, reproduce, figures
        )

    def _without_time(self, subject: Subject, timed: Timed) -> Finding:
        place, against = subject
        what = (
            f"no time at {self.ref}: {timed.trouble}"
            if timed.is_new
            else f"not timed against {against}: {timed.trouble}"
        )
        status: Status = "note" if timed.is_new else "error"
        return Finding("time", self.contract.name, place.form, status, what, place.case, place.phase)

    def _first_word(self, first: Sequence[Timed]) -> str:
        spread = self._spread(first)
        assert spread is not None
        return f"  before that: {spread.spelled()}"

    def _command(self) -> str:
        base = f" --base {self.ref}" if self.ref else ""
        return f"memfix gate {self.contract.name} --time{base} --device {self.device}"
