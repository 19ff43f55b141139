"""The GPU-free meter: runs the step on fake tensors and counts the bytes of every storage while it is alive.

Kernels do not run and tensors take no memory, so a laptop can measure a 100 GiB train step, and two runs give the same
bytes. Modules:

- ``environment``: enters all modes and patches
- ``fake_device``, ``hide_dispatch_modes``: make any build of torch take CUDA's code paths
- ``torch_cuda_stubs``, ``streams``, ``python_patches``, ``dispatcher_overrides``, ``attention``: show user code the
  simulated GPU, and ``threads`` those threads that it starts
- ``torch_imports``: imports the modules that torch loads lazily without the patches
- ``compiled``: compiles regions under ``torch.compile`` for the simulated GPU
- ``tracking``: the dispatch mode that handles each operator
- ``storages``, ``running_phase``, ``engine``, ``composite``, ``in_parts``, ``launches``: keep what the tracker needs
- ``fake_execution``, ``fake_result_cache``, ``fake_kernels``: make the fake results of operators
- ``workspace``, ``tables``, ``cublas``: know the memory that kernels and libraries allocate internally
- ``memory_guard``, ``memory_access``: keep kernels from the memory of simulated tensors, give these addresses, and copy
  them deeply
- ``prebuilt``: moves real weights to the simulated GPU and back
- ``values``, ``value_operators``, ``kernel_writes``: keep the values of small tensors, until a kernel writes into them
- ``watched_numbers``: record how comparisons of unknown numbers come out
- ``assumptions``, ``decisions``, ``peers``: answer reads of unknown values; ``refusals`` explains what is not supported
- ``ledger``, ``source_lines``, ``gpus``: count the bytes, find the source lines behind them, describe the GPUs
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from ...errors import ON_A_GPU, MeasurementError, UsageError
from ...units import format_bytes
from ...versions import untested_torch
from ..base import Reading, Step, StepBuilder
from ..stages import listening, stages_of
from . import fake_device, tables
from .gpus import get_gpu

if TYPE_CHECKING:
    from .assumptions import Followed, Scenario
    from .decisions import Decision
    from .launches import Launch
    from .tracking import StorageTracker
    from .watched_numbers import Outcomes, Place

_MOST_TURNS = 6
"""Further runs in which comparisons come out the other way; each may reach comparisons that no run had made."""


class SimulatedMeter:
    name = "simulated"

    def __init__(self, gpu: str = "H200", assume: Mapping[str, Decision] | None = None) -> None:
        self.gpu = get_gpu(gpu)
        self._assume = assume

    @property
    def simulation(self) -> SimulatedMeter:
        return self

    def unavailable_reason(self) -> str | None:
        return fake_device.unavailable_reason()

    def capacity_bytes(self) -> None:
        """Return None, no limit: fake tensors take no memory."""

    def expecting(self, total_bytes: int) -> SimulatedMeter:
        return self

    def measure(self, build: StepBuilder, *, warmup: int = 1) -> Reading:
        """Measure the step; if it reads unknown values, measure it again under other assumed values, for bounds.

        Often the values are only numbers for a log line, such as the loss; then further calls of the same step show
        that they do not matter. Otherwise the step is built anew for each set of assumed values. Runs that raise are
        left out, because no successful run can have had their values. A single number, such as a loss that the step
        checks, may be what raises, so the other assumptions are tried again with the usual numbers.

        Answers may contradict each other, such as the counts of elements that a router sends to each expert. So if the
        step reads counts, raises under some answers, or reads them in a loop, it is measured again with assumed indices
        in place of those that it chooses by unknown values; all that follows from these indices is known. Where unknown
        values still decide how often a loop runs, the meter computes them, if that is little work.

        A step that raises if its masks have no elements is measured with one element each. If it raises under the most
        or the fewest and not where masks have half, it is not known where it begins to raise, and there are no bounds.
        """
        from .assumptions import ONE_OUTCOME, ONE_SIDED

        runs = self._runs(build, warmup)
        if runs[0].has_choices and (runs[0].reads_counts or _refused(runs) or _is_unbounded(runs)):
            runs = _with_choices(runs, self._runs(build, warmup, "chosen"))
        computed = self._runs(build, warmup, "computed") if _is_unbounded(runs) else []
        if computed and not any(run.in_a_loop for run in computed):
            runs = computed
        measured = _measured(runs)
        if not measured:
            raise _common_error(runs)
        reading = _bounded(measured[0], measured[1:])
        if _seen_one_way(runs):
            reading = _without_bounds(reading, ONE_OUTCOME)
        if _is_one_sided(measured):
            reading = _without_bounds(reading, ONE_SIDED)
        if runs is computed:
            reading = _of_computed_loop(reading)
        if reading.exact or tables.table_of(self.gpu) is not None:
            return reading
        return self._beyond_measured(reading, measured[0], build, warmup)

    def _runs(self, build: StepBuilder, warmup: int, follows: Followed = "known") -> list[_Run]:
        """A run under the usual answers, and runs under other answers if the unknown values may matter."""
        from .assumptions import HALF, ONE_ELEMENT, are_numbers

        run = functools.partial(self._run, build, warmup, follows=follows)
        usual = run("usual")
        if not usual.rests_on or usual.is_same_under_others:
            return [usual]
        scenarios: list[Scenario] = ["least"] if usual.is_most else ["most", "least"]
        others = [run(scenario) for scenario in scenarios]
        if not are_numbers(usual.rests_on):
            refused = [scenario for scenario, other in zip(scenarios, others, strict=True) if other.reading is None]
            others += [run(scenario, "usual") for scenario in refused]
            if "least" in _refused(others):
                others.append(run("least", "usual", fewest=ONE_ELEMENT))
            if _refused([usual, *others]) & {"least", "usual" if usual.is_most else "most"}:
                others.append(run("least", "usual", fewest=HALF))
        runs = [usual, *others]
        if _measured(runs):
            self._turn_outcomes(runs, run)
        return runs

    def _turn_outcomes(self, runs: list[_Run], run: Callable[..., _Run]) -> None:
        """Add runs in which comparisons of unknown numbers come out the other way, if all runs saw one outcome only.
        Such a run gives the answers of one that reached these comparisons."""
        tried: set[tuple[Scenario, frozenset[Place]]] = set()
        while len(tried) < _MOST_TURNS:
            places = _seen_one_way(runs)
            ways = ((by, by.outcomes.turned | places.intersection(by.outcomes.seen)) for by in runs)
            new = [
                (by, turned)
                for by, turned in ways
                if turned > by.outcomes.turned and (by.scenario, turned) not in tried
            ]
            if not new:
                return
            by, turned = new[0]
            tried.add((by.scenario, turned))
            runs.append(run(by.scenario, fewest=by.fewest, turned=turned))

    def _beyond_measured(self, reading: Reading, run: _Run, build: StepBuilder, warmup: int) -> Reading:
        """The reading of a GPU that has no calibration table, with bounds for what is not known about that GPU."""
        from .assumptions import NO_BOUNDS
        from .attention import unmeasured_backend

        backend = unmeasured_backend(self.gpu)
        if NO_BOUNDS in reading.notes or run.unbounded - {backend}:
            return dataclasses.replace(reading, at_least=None, at_most=None)
        readings = [reading]
        if backend in reading.notes:
            prefers = not self.gpu.prefers_cudnn_attention
            other = copy.copy(self)
            other.gpu = dataclasses.replace(self.gpu, prefers_cudnn_attention=prefers)
            there = other._run(build, warmup, "usual", follows=run.follows)
            readings += [] if there.reading is None else [there.reading]
        lowest, highest = _bounds(readings)
        return dataclasses.replace(reading, at_least=lowest, at_most=highest)

    def _run(
        self,
        build: StepBuilder,
        warmup: int,
        scenario: Scenario,
        of_numbers: Scenario | None = None,
        *,
        fewest: float = 0.0,
        follows: Followed = "known",
        turned: frozenset[Place] = frozenset(),
    ) -> _Run:
        """Measure the step; eagerly if compiled code fails."""
        from .compiled import CompiledCodeError

        run = functools.partial(
            self._run_once, build, warmup, scenario, of_numbers or scenario, fewest, follows, turned
        )
        try:
            return run()
        except CompiledCodeError as error:
            return run(runs_eager=str(error))

    def _run_once(
        self,
        build: StepBuilder,
        warmup: int,
        scenario: Scenario,
        of_numbers: Scenario,
        fewest: float,
        follows: Followed,
        turned: frozenset[Place],
        runs_eager: str | None = None,
    ) -> _Run:
        """Build and measure the step. ``runs_eager`` is a reason to run regions under ``torch.compile`` eagerly."""
        from .assumptions import are_numbers
        from .compiled import CompiledCodeError
        from .refusals import explained
        from .source_lines import line_of

        with self._simulated(scenario, runs_eager) as tracker:
            answers = tracker.answers
            answers.of_numbers, answers.fewest, answers.makes_choices = of_numbers, fewest, follows == "chosen"
            answers.outcomes.turned = turned
            if follows == "computed":
                tracker.values.keep_more()
            try:
                with explained():
                    step = build("cuda")
                    gc.collect()
                    decided = tracker.may_numbers_decide_what_is_kept()
                    tracker.ledger.restart()
                    for _ in range(warmup):
                        step()
                    gc.collect()
                    decided |= tracker.may_numbers_decide_what_is_kept()
                    kept = tracker.ledger.left_behind(line_of)
                    reading = self._reading(tracker, step, is_first_call=warmup == 0)
                if scenario == "usual":  # under other answers the step may skip a place that `assume` names
                    tracker.decisions.require_used()
            except Exception as error:
                rests_on = tuple(tracker.assumed_before | tracker.assumed)
                is_final = not (rests_on or answers.has_choices)
                if is_final or isinstance(error, (CompiledCodeError, UsageError)):
                    raise
                return _Run(
                    scenario, None, (), rests_on, answers.outcomes.copy(), error, is_most=answers.are_most,
                    has_choices=answers.has_choices, reads_counts=answers.reads_counts, fewest=fewest,
                )  # fmt: skip
            reading = dataclasses.replace(reading, kept=(*kept, *reading.kept))
            unbounded = frozenset(tracker.notes) - tracker.bounded - tracker.of_this_torch
            assumed, rests_on = tuple(tracker.assumed), tuple(tracker.assumed_before | tracker.assumed)
            run = _Run(
                scenario, reading, assumed, rests_on, answers.outcomes.copy(), None, answers.in_a_loop, unbounded,
                answers.are_most, has_choices=answers.has_choices, reads_counts=answers.reads_counts, fewest=fewest,
                follows=follows,
            )  # fmt: skip
            if scenario != "usual" or not warmup or decided or not rests_on or not answers.asked_again:
                return run
            if not are_numbers(rests_on) or not self._is_same_under_others(tracker, step, reading):
                return run
            return dataclasses.replace(run, is_same_under_others=True, outcomes=answers.outcomes)

    def _is_same_under_others(self, tracker: StorageTracker, step: Step, reading: Reading) -> bool:
        """Whether further calls of the step take the same bytes under other numbers, or raise because of them, and
        every comparison of numbers came out both ways."""
        from .assumptions import SCENARIOS

        answers = tracker.answers
        for scenario in SCENARIOS[1:]:
            answers.scenario = answers.of_numbers = scenario
            try:
                other = self._reading(tracker, step)
            except Exception:
                if not answers.has_answered:  # it raised before it read a number: it cannot be called again
                    return False
            else:
                if _bytes_of(other) != _bytes_of(reading):
                    return False
        return not answers.outcomes.one_sided()

    def measure_first_calls(self, build: Callable[[str], Iterator[Step]]) -> list[Reading]:
        """Readings of several steps on the same state. Each step runs once, without a warm-up."""
        with self._simulated() as tracker:
            readings = []
            for step in build("cuda"):
                reading = self._reading(tracker, step)
                doubts = tuple(tracker.assumed)  # the steps share state, so other answers cannot be tried
                readings.append(
                    dataclasses.replace(reading, exact=reading.exact and not doubts, notes=(*reading.notes, *doubts))
                )
            return readings

    def launches(self, build: StepBuilder) -> list[Launch]:
        """The launches of Triton and CUDA kernels in the step's first call. Nothing is measured."""
        with self._simulated() as tracker:
            step = build("cuda")
            tracker.launches = []
            step()
            return tracker.launches

    @contextlib.contextmanager
    def _simulated(self, scenario: Scenario = "usual", runs_eager: str | None = None) -> Iterator[StorageTracker]:
        from .environment import simulated_gpu
        from .refusals import explained

        hides_modes = fake_device.self_test().cannot_hide_modes is None
        simulation = simulated_gpu(
            self.gpu, hides_modes=hides_modes, scenario=scenario, runs_eager=runs_eager, assume=self._assume
        )
        with simulation as tracker, explained():
            yield tracker

    def _reading(self, tracker: StorageTracker, step: Step, *, is_first_call: bool = False) -> Reading:
        from .source_lines import line_of

        gc.collect()
        ledger = tracker.ledger
        ledger.restart()
        tracker.begin_step()
        if is_first_call:
            tracker.note("a first call: what libraries take once, such as cuBLAS its workspace, is not counted")
        with listening(ledger.enter_stage):
            result = step()
        ledger.settle()
        tracker.note_late_frees()
        requested, allocated = ledger.requested, ledger.allocated
        held_bytes = requested.live - requested.base
        peak_bytes, allocated_bytes = requested.peak - requested.base, allocated.peak - allocated.base
        base_bytes, timeline = requested.base, ledger.timeline(line_of)
        in_cycles = _collected(tracker)
        if in_cycles:  # in a real run, the time of a collection is not known
            held = f"{format_bytes(in_cycles)} were held by reference cycles"
            tracker.note(f"{held} until the collector ran, whenever that is")
        del result
        in_cycles += _collected(tracker)
        cannot_hide, of_torch = fake_device.self_test().cannot_hide_modes, self._doubt_of_torch()
        notes = tuple(doubt for doubt in (cannot_hide, of_torch, *tracker.notes) if doubt)
        # each doubt must be covered by the bounds, which may coincide where no uncertain kernel runs at the peak
        doubts = set(notes) - tracker.of_this_torch - {of_torch}
        is_bounded = bool(doubts) and doubts <= tracker.bounded
        return Reading(
            meter=self.name,
            device=self.gpu.name,
            peak_bytes=peak_bytes,
            base_bytes=base_bytes,
            held_bytes=held_bytes,
            leaked_bytes=requested.live - requested.base,
            allocated_bytes=allocated_bytes,
            cyclic_bytes=in_cycles,
            exact=not notes,
            at_least=requested.least_peak - base_bytes if is_bounded else None,
            at_most=requested.most_peak - base_bytes if is_bounded else None,
            notes=notes,
            alive_at_peak=timeline.at_peak(),
            kept=tuple(tracker.storages.of_earlier_simulations),
            stages=stages_of(timeline),
            timeline=timeline,
        )

    def _doubt_of_torch(self) -> str | None:
        import torch

        table = tables.table_of(self.gpu)
        return untested_torch(torch.__version__, table.surroundings.get("torch") if table else None)


@dataclasses.dataclass(frozen=True)
class _Run:
    """One run under some answers for unknown values: its reading, or the error that it raised."""

    scenario: Scenario
    reading: Reading | None
    assumed: tuple[str, ...]
    """The assumptions behind values that the measured step read."""
    rests_on: tuple[str, ...]
    """These, and the assumptions of the build and the warm-up."""
    outcomes: Outcomes
    error: Exception | None = None
    in_a_loop: bool = False
    unbounded: frozenset[str] = frozenset()
    """The notes whose uncertainty the reading's bounds do not cover."""
    is_most: bool = False
    """Whether the scenario "most" would have given the same answers."""
    is_same_under_others: bool = False
    """Whether further calls took the same bytes under other answers."""
    has_choices: bool = False
    """Whether the step chose indices by unknown values, as a router does."""
    reads_counts: bool = False
    """Whether it read an unknown integer."""
    fewest: float = 0.0
    """The share of a mask's elements that were set under "least"."""
    follows: Followed = "known"


def _measured(runs: list[_Run]) -> list[_Run]:
    return [run for run in runs if run.reading is not None]


def _refused(runs: list[_Run]) -> set[Scenario]:
    """The scenarios under which the step raises."""
    return {run.scenario for run in runs} - {run.scenario for run in _measured(runs)}


def _seen_one_way(runs: list[_Run]) -> frozenset[Place]:
    """The places where unknown numbers decide, but had one outcome in all runs."""
    from .watched_numbers import Outcomes

    return Outcomes.together(run.outcomes for run in runs).one_sided()


def _is_one_sided(measured: list[_Run]) -> bool:
    """Whether the step ran where its masks had half of their elements, but not under the fewest and the most."""
    from .assumptions import HALF

    extremes = [run for run in measured if run.fewest != HALF]
    found = {"most" if run.scenario == "usual" and run.is_most else run.scenario for run in extremes}
    return len(extremes) < len(measured) and not {"most", "least"} <= found


def _with_choices(runs: list[_Run], chosen: list[_Run]) -> list[_Run]:
    """The runs that count, of those under answers that may contradict each other and those with assumed choices. The
    first of them is the usual one."""
    if not _measured(chosen):
        return runs
    if runs[0].reads_counts or _is_unbounded(runs):
        return chosen
    return [*chosen, *runs] if "usual" in _refused(runs) else [*runs, *chosen]


def _bounded(usual: _Run, others: list[_Run]) -> Reading:
    """The reading of the usual run, with the bounds that the other runs give it."""
    from .assumptions import ANY_COUNT, DRAWN, DRAWN_ONCE, NO_BOUNDS, OTHER_DRAWS

    reading = usual.reading
    assert reading is not None
    if not usual.rests_on:
        return reading
    readings = [reading, *(other.reading for other in others if other.reading is not None)]
    if len({_bytes_of(each) for each in readings}) == 1:  # the values do not matter, at least for these random draws
        drawn = {DRAWN, DRAWN_ONCE}.intersection(usual.rests_on).difference(usual.assumed)
        return dataclasses.replace(reading, notes=(*reading.notes, *usual.assumed, *sorted(drawn)))
    if _is_unbounded([usual, *others]):
        return _without_bounds(reading, *usual.rests_on, NO_BOUNDS)
    if any(run.reads_counts and run.follows == "known" for run in (usual, *others)):
        return _without_bounds(reading, *usual.rests_on, ANY_COUNT)
    if DRAWN in usual.rests_on and usual.follows != "computed":
        return _without_bounds(reading, *usual.rests_on, OTHER_DRAWS)
    if any(run.unbounded for run in (usual, *others)):
        return _without_bounds(reading, *usual.rests_on)
    lowest, highest = _bounds(readings)
    notes = (*reading.notes, *usual.rests_on)
    return dataclasses.replace(reading, exact=False, at_least=lowest, at_most=highest, notes=notes)


def _without_bounds(reading: Reading, *why: str) -> Reading:
    return dataclasses.replace(reading, exact=False, at_least=None, at_most=None, notes=(*reading.notes, *why))


def _is_unbounded(runs: list[_Run]) -> bool:
    """Whether answers decide how often a loop runs, so that trying more answers would not bound the reading."""
    taken = {_bytes_of(run.reading) for run in runs if run.reading is not None}
    return len(taken) > 1 and any(run.in_a_loop for run in runs)


def _of_computed_loop(reading: Reading) -> Reading:
    """The estimate for a step whose loop was run on computed numbers. Its bounds come from few random draws, so the
    distance between them is added on both sides."""
    from .assumptions import COMPUTED

    reading = dataclasses.replace(reading, exact=False, notes=(*reading.notes, COMPUTED))
    if reading.at_least is None or reading.at_most is None:
        return reading
    range_bytes = reading.at_most - reading.at_least
    return dataclasses.replace(
        reading, at_least=max(0, reading.at_least - range_bytes), at_most=reading.at_most + range_bytes
    )


def _bounds(readings: list[Reading]) -> tuple[int, int]:
    """The lowest and the highest peak that any of these readings allows."""
    lowest = min(each.peak_bytes if each.at_least is None else each.at_least for each in readings)
    return lowest, max(each.highest_bytes for each in readings)


def _common_error(runs: list[_Run]) -> Exception:
    """The step's own error if it raises the same under all answers, else an error that names the assumptions."""
    first, *others = [run.error for run in runs]
    assert first is not None
    if isinstance(first, MeasurementError):  # it names the line whose values are unknown
        return first
    if all((type(other), str(other)) == (type(first), str(first)) for other in others):
        return first
    what = "; ".join(runs[0].rests_on)
    error = MeasurementError(f"{what}; under all that were tried the step raises {first!r}; {ON_A_GPU}")
    error.__cause__ = first
    return error


def _bytes_of(reading: Reading) -> tuple[int, ...]:
    return reading.peak_bytes, reading.held_bytes, reading.leaked_bytes, reading.allocated_bytes


def _collected(tracker: StorageTracker) -> int:
    """The bytes that a run of Python's cycle collector frees."""
    before = tracker.ledger.requested.live
    gc.collect()
    return before - tracker.ledger.requested.live
