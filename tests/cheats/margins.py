"""Counts the places of the gate in which each cheat fails: the margin of the check that must catch the cheat.

    python -m tests.cheats.margins [--json PATH] [--jobs NUMBER]

A place is one measurement or call of ``memfix gate`` in its profile ``ci``: for equality a drawn call in one dtype, for
budgets and leaks a case in one phase or a drawn shape, for kept memory a case, for the lock a case or a variant, for
scaling a law, for bad inputs a call that must be refused.
The incident is left out: much smaller cases must catch every cheat. Bytes are exact, so one place is enough for checks
of memory. Rounding errors differ by CPU, so equality must catch a cheat in at least ``DEMANDED["equality"]`` calls.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

from memfix import Case, Contract
from memfix.atomic_write import write_whole
from memfix.checks.bad_inputs import check_bad_input
from memfix.checks.calls import equality_calls
from memfix.checks.children import start_worker
from memfix.checks.comparing import Unequal
from memfix.checks.drawn_budgets import measure_and_judge
from memfix.checks.draws import Drawn, memory_calls
from memfix.checks.effort import PROFILES
from memfix.checks.equality import compare_once
from memfix.checks.examine import meter_of
from memfix.checks.form_call import FormCall
from memfix.checks.interpreter import in_interpreter
from memfix.checks.measuring import measure_case, measure_phases
from memfix.checks.memory import judge_kept, judge_leak
from memfix.checks.plan import place_of
from memfix.checks.scaling import measure_growth
from memfix.checks.variants import variants
from memfix.cuda_kernels.emulated import KernelFault
from memfix.meters import get_meter
from memfix.provenance import describe
from memfix.registry import all_contracts

FOLDER = Path(__file__).resolve().parent
EFFORT = PROFILES["ci"]
FORM = "cheat"
ShowsIn = Callable[[Case], bool]
"""The type of a cheat's optional function ``shows_in``: whether the cheat can fail in this case."""
DEMANDED = {"equality": 3, "budget": 1, "leak": 1, "kept": 1, "lock": 1, "scaling": 1, "bad input": 1}


@dataclass(frozen=True)
class Margin:
    """The number of places in which a cheat fails (``shows``), of all places that were checked."""

    cheat: str
    op: str
    check: str
    shows: int
    places: int


def names() -> list[str]:
    """Return the names of all cheats, sorted by op: consecutive cheats of an op share cached answers of naive."""
    no_cheats = {"margins", "test_cheats"}
    found = [path.stem for path in FOLDER.glob("*.py") if path.stem not in no_cheats]
    return sorted(found, key=lambda name: (load(name).OP, name))


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"cheat_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def margin(name: str, *, enough: int | None = None) -> Margin:
    """Count the places in which the cheat fails; stop after ``enough`` of them."""
    counted, cheat = partial(_counted, name, enough), load(name)
    runs_kernels = cheat.CAUGHT_BY == "equality" and _contract_with(cheat).forms[FORM].is_interpreted
    return in_interpreter(counted) if runs_kernels else counted()


def _contract_with(cheat: ModuleType) -> Contract:
    return all_contracts()[cheat.OP].with_form(FORM, cheat.form, like=cheat.LIKE)


def _counted(name: str, enough: int | None) -> Margin:
    cheat = load(name)
    contract = _contract_with(cheat)
    shows = places = 0
    for is_shown in _PLACES[cheat.CAUGHT_BY](contract, cheat):
        places += 1
        shows += is_shown
        if enough is not None and shows >= enough:
            break
    return Margin(name, cheat.OP, cheat.CAUGHT_BY, shows, places)


# ---------------------------------------------------------------- by check: for each place, whether the cheat fails
# cases of ``shows_in`` come first: most cheats with that function fail in no others, and these take as long
def _calls(contract: Contract, cheat: ModuleType) -> Iterator[bool]:
    shows_in = _shows_in(cheat)
    place, examples = place_of(contract, FORM, "cpu"), EFFORT.equality_examples
    by_dtype = [equality_calls(contract, FORM, dtype, examples, place=place) for dtype in contract.dtypes]
    special = [call for calls in by_dtype for call in calls if _is_special(call)]
    plain = [[call for call in calls if not _is_special(call)] for calls in by_dtype]
    # interleave dtypes and special calls: some cheats fail in one of them only
    in_turns = filter(None, itertools.chain.from_iterable(itertools.zip_longest(special, *plain)))
    for call in sorted(in_turns, key=lambda call: not shows_in(call.draw.case)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # from cheats, and from a CPU without instructions for a dtype
                compare_once(contract, FORM, call.draw, place)
        # torch refuses some cheats by a RuntimeError; any other error is a bug of the cheat itself
        except (Unequal, KernelFault, RuntimeError):
            yield True
        else:
            yield False


def _shows_in(cheat: ModuleType) -> ShowsIn:
    return getattr(cheat, "shows_in", lambda case: False)


def _is_special(call: Drawn) -> bool:
    """Whether the call has a NaN in one input, or is in another mode: no graph, autocast, differentiated twice."""
    return call.draw.spoiled is not None or call.draw.mode != "plain"


def _budgets(contract: Contract, cheat: ModuleType) -> Iterator[bool]:
    shows_in = _shows_in(cheat)
    meter = meter_of(contract, get_meter("simulated"))
    at_any_shape = [budget for budget in contract.budgets if budget.form == FORM and budget.case is None]
    drawn = memory_calls(contract, EFFORT.memory_examples)
    drawn = sorted(drawn, key=lambda call: math.prod(call.draw.case.dims.values()))

    def at_drawn(likely: bool) -> Iterator[bool]:
        for call in drawn:
            if shows_in(call.draw.case) == likely:
                findings = measure_and_judge(FormCall(contract, FORM, call.draw), at_any_shape, meter)
                yield any(finding.status == "fail" for finding in findings)

    yield from at_drawn(likely=True)
    for case in _cases(contract):
        budgets = [budget for budget in contract.budgets_of(FORM, case) if not budget.known_broken]
        for finding in measure_and_judge(FormCall.at_case(contract, FORM, case), budgets, meter):
            yield finding.status == "fail"
    yield from at_drawn(likely=False)


def _leaks(contract: Contract, _: ModuleType) -> Iterator[bool]:
    meter = meter_of(contract, get_meter("simulated"))
    for call in (FormCall.at_case(contract, FORM, case) for case in _cases(contract)):
        for phase, reading in measure_phases(call, call.phases, meter).items():
            yield judge_leak(call, phase, reading) is not None


def _kept(contract: Contract, _: ModuleType) -> Iterator[bool]:
    meter = meter_of(contract, get_meter("simulated"))
    for call in (FormCall.at_case(contract, FORM, case) for case in _cases(contract)):
        reading = measure_phases(call, ["kept"], meter)["kept"]
        yield judge_kept(call, {(FORM, "kept"): reading}) is not None


def _locked(contract: Contract, cheat: ModuleType) -> Iterator[bool]:
    """Compare the bytes with those of the honest form, which are in the lock."""
    for name in (*variants(contract), *_cases(contract)):
        call = FormCall.at_case(contract, FORM, name)
        cheats, honest = (measure_case(call.of(form), get_meter("simulated"))[0] for form in (FORM, cheat.LIKE))
        locked = {phase: reading.peak_bytes for phase, reading in honest.items()}
        yield any(reading.peak_bytes > locked.get(phase, 0) for phase, reading in cheats.items())


def _laws_of_growth(contract: Contract, _: ModuleType) -> Iterator[bool]:
    for law in contract.scaling:
        if law.form == FORM:
            yield not measure_growth(contract, law, meter_of(contract, get_meter("simulated"))).holds(law)


def _bad_inputs(contract: Contract, _: ModuleType) -> Iterator[bool]:
    for bad in contract.bad_inputs:
        yield check_bad_input(contract, FORM, bad).status == "fail"


def _cases(contract: Contract) -> list[str]:
    """Return the cases without the incident, the smallest first: it is the fastest to measure."""
    return [name for name in reversed(contract.cases) if name != "incident"]


_PLACES: dict[str, Callable[[Contract, ModuleType], Iterator[bool]]] = {
    "equality": _calls,
    "budget": _budgets,
    "leak": _leaks,
    "kept": _kept,
    "lock": _locked,
    "scaling": _laws_of_growth,
    "bad input": _bad_inputs,
}


# ---------------------------------------------------------------- the command
def main(arguments: list[str] | None = None) -> int:
    """Print the table; exit with 1 if a cheat fails in fewer places than demanded."""
    parser = argparse.ArgumentParser(prog="python -m tests.cheats.margins", description=main.__doc__)
    parser.add_argument("--json", type=Path, metavar="PATH", help="keep the counts there")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes [default: one a core]")
    asked = parser.parse_args(arguments)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(asked.jobs, context, initializer=start_worker) as workers:
        found = list(workers.map(margin, names()))
    where = f"{platform.machine()}, torch {describe()['torch']}"
    print(f"{'cheat':44} {'op':22} {'caught by':10} shows in, {where}")
    for row in found:
        print(f"{row.cheat:44} {row.op:22} {row.check:10} {row.shows} of {row.places}")
    if asked.json is not None:
        data = {
            "machine": platform.machine(),
            "surroundings": describe(),
            "profile": EFFORT.name,
            "cheats": [asdict(row) for row in found],
        }
        write_whole(asked.json, json.dumps(data, indent=2) + "\n", "the counts")
    too_few = [row for row in found if row.shows < DEMANDED[row.check]]
    for row in too_few:
        print(f"{row.cheat} shows in {row.shows} of {row.places}, demanded {DEMANDED[row.check]}", file=sys.stderr)
    return 1 if too_few else 0


if __name__ == "__main__":
    sys.exit(main())
