"""ASV benchmarks of every op, form and case in the registry: ``LinearCrossEntropyRecomputeSmall.track_peak_train``.

The list of benchmarks is the same on every machine, because ASV publishes the list of the last run. A figure that a
machine cannot measure is n/a, with the reason under ``--show-stderr``. Each benchmark is a process. Importing this
file does not initialise CUDA, so that a fork server may start these processes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import torch._dynamo  # noqa: F401 - it and the simulated GPU are loaded here, once, for a fork server

from memfix.contract import Case, Contract
from memfix.laws import NAIVE, Phase
from memfix.meters.base import Step
from memfix.meters.simulated import environment  # noqa: F401
from memfix.registry import all_contracts

from . import figures
from .figures import class_name

KINDS = ("time", "track_peak", "track_times_below_naive", *(f"track_{name}" for name in figures.RATIOS))


def setup_cache() -> bool:
    """Make ASV run all benchmarks in one folder, where ``figures`` caches its measurements.

    ASV passes the value to every setup; it would also run a setup without an argument to make the cache.
    """
    return True


setup_cache.pretty_source = ""  # type: ignore[attr-defined]  # or each of hundreds of benchmarks shows its code


def _tracked(measure: Callable[[], float], unit: str, pretty: str) -> Callable[..., float]:
    """Make a benchmark of a figure, measured in ``setup``: ASV treats ``NotImplementedError`` as n/a only there."""
    value = functools.cache(measure)

    def track(self: object, cache: bool) -> float:
        return value()

    return _described(track, lambda cache: value(), pretty, unit=unit)


def _timed(op: str, form: str, case: str, phase: Phase, pretty: str) -> Callable[..., None]:
    """Make a benchmark of the time of one step, until its kernels have ended."""

    @functools.cache
    def step() -> Step:
        return figures.warm_step(figures.step_of(op, form, case, phase))

    def time(self: object, cache: bool) -> None:
        figures.run_and_synchronize(step())

    # one process (rounds=1); ASV calls the setup before every sample, so the cache builds and warms up the step once
    return _described(time, lambda cache: step(), pretty, rounds=1, number=1, repeat=figures.SAMPLES, warmup_time=0)


def _described(benchmark: Any, setup: Any, pretty: str, **attributes: Any) -> Any:
    """Set the attributes that ASV looks for on the function itself."""
    benchmark.setup = setup
    benchmark.pretty_source, setup.pretty_source = f"# {pretty}", ""
    benchmark.__qualname__ = benchmark.__name__  # else the code on the pages begins with "class <locals>"
    for name, value in attributes.items():
        setattr(benchmark, name, value)
    return benchmark


def fingerprint(contract: Contract, case: Case) -> str:
    """Return a hash of the shape and the inputs: ASV compares only results with the same hash. Fields of a spec at
    their default are left out, so that a field added later does not start a new history; so are fields without
    ``repr``, such as functions, whose addresses vary."""
    inputs = [
        {field.name: value for field in dataclasses.fields(spec)
         if field.repr and (value := getattr(spec, field.name)) != field.default}
        for spec in contract.inputs
    ]  # fmt: skip
    return hashlib.sha256(f"{case.spelled()} {inputs}".encode()).hexdigest()[:16]


def _members(contract: Contract, form: str, case: Case) -> dict[str, Any]:
    op, words = contract.name, (contract.name, form, case.name)
    members: dict[str, Any] = {"version": fingerprint(contract, case), "timeout": 600}

    def track(kind: str, phase: Phase, unit: str, figure: Callable[..., float], *last: str) -> None:
        measure = functools.partial(figure, *words, *last)
        members[f"track_{kind}_{phase}"] = _tracked(measure, unit, f"{op}/{form}, {phase}, at {case.spelled()}")

    for phase in figures.phases(op):
        members[f"time_{phase}"] = _timed(*words, phase, f"{op}/{form}, {phase}, at {case.spelled()}")
        track("peak", phase, "bytes", figures.peak_bytes, phase)
        if form != NAIVE:
            track("times_below_naive", phase, "times", figures.times_below_naive, phase)
    for name in figures.ratios_of(op, form):
        track(name, phase, "times", figures.ratio, name)
    return members


def _benchmark_classes() -> dict[str, type]:
    classes: dict[str, type] = {}
    for contract in all_contracts().values():
        for form in (NAIVE, *contract.forms):
            for case in contract.cases.values():
                name = class_name(contract.name, form, case.name)
                if name in classes:
                    raise ValueError(f"two benchmarks are named {name}: rename a form or a case of {contract.name}")
                classes[name] = type(name, (), _members(contract, form, case))
    return classes


globals().update(_benchmark_classes())


def __getattr__(name: str) -> type:
    """Return a skipped class for a benchmark that this commit does not have: ASV runs one list at every commit."""
    if not name[:1].isupper():
        raise AttributeError(name)

    def setup(self: object, cache: bool) -> None:
        raise NotImplementedError(f"this commit has no {name}")

    methods = {f"{kind}_{phase}": lambda self, cache: None for kind in KINDS for phase in figures.PHASES}
    return type(name, (), {"setup": setup, **methods})
