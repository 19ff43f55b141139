"""ASV benchmarks of every op, form and case in the registry: ``LinearCrossEntropyRecomputeSmall.track_peak_train``.

Peaks are simulated, so every case has one on any machine. Times are taken where naive fits the machine, and are
n/a elsewhere: the list of benchmarks is the same everywhere, because ASV publishes what the last run listed.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # it and the simulated GPU are loaded here, once, for a fork server

from memfix.checks.inputs import Draw, StepOf, phases_of
from memfix.checks.memory import bytes_of
from memfix.contract import Case, Contract
from memfix.laws import NAIVE, Phase
from memfix.meters import get_meter
from memfix.meters.base import Step
from memfix.meters.simulated import environment  # noqa: F401
from memfix.registry import all_contracts
from memfix.units import format_bytes

PHASES: tuple[Phase, ...] = ("forward", "train")
CPU_LIMIT_BYTES = 64 * 2**20
WARMUP = 2


def _peak_benchmark(build: StepOf) -> Callable[..., int]:
    """Requested bytes above the inputs, simulated."""

    def setup() -> None:
        _skip_without_gradient(build)

    def track_peak(self: object) -> int:
        return bytes_of(get_meter("simulated").measure(build), build.phase)

    return _described(track_peak, build, setup)


def _time_benchmark(build: StepOf) -> Callable[..., None]:
    """Time of one step, to the end of its kernels."""

    @functools.cache
    def step() -> Step:
        _skip_without_gradient(build)
        _skip_unless_it_fits(build)
        torch.set_num_threads(1)
        built = build(_device())
        for _ in range(WARMUP):
            built()
        return built

    def setup() -> None:  # called before every timed call
        step()
        _synchronize()

    def time_step(self: object) -> None:
        step()()
        _synchronize()

    return _described(time_step, build, setup)


def _described(benchmark: Any, build: StepOf, setup: Callable[[], None]) -> Any:
    """The attributes that ASV looks for on the function itself."""
    benchmark.setup = setup
    benchmark.pretty_source = f"# {build.contract.name}/{build.form}, {build.phase}, at {build.draw.case.spelled()}"
    benchmark.__qualname__ = benchmark.__name__  # or the code shown begins with "class <locals>"
    return benchmark


def _skip_without_gradient(build: StepOf) -> None:
    if build.phase not in phases_of(build.contract):
        raise NotImplementedError(f"{build.contract.name} has no gradient")


def _skip_unless_it_fits(build: StepOf) -> None:
    """By naive's largest phase, so that every form of a case is timed or none is."""
    naive = StepOf(build.contract, NAIVE, build.draw, "train" if "train" in phases_of(build.contract) else "forward")
    reading = get_meter("simulated").measure(naive)
    needed, limit = reading.base_bytes + reading.peak_bytes, CPU_LIMIT_BYTES
    if _device() == "cuda":
        limit = torch.cuda.mem_get_info()[0] // 2
    if needed > limit:
        raise NotImplementedError(f"naive needs {format_bytes(needed)}, this machine is given {format_bytes(limit)}")


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _synchronize() -> None:
    if _device() == "cuda":
        torch.cuda.synchronize()


def _fingerprint(contract: Contract, case: Case) -> str:
    """Results are only compared at the same shape and the same inputs."""
    return hashlib.sha256(f"{case.spelled()} {list(contract.inputs)}".encode()).hexdigest()[:16]


def _class_name(*words: str) -> str:
    parts = re.split(r"[^0-9A-Za-z]+", " ".join(words))
    return "".join(part[:1].upper() + part[1:] for part in parts)


def _benchmark_classes() -> dict[str, type]:
    classes: dict[str, type] = {}
    for contract in all_contracts().values():
        for form in (NAIVE, *contract.forms):
            for case in contract.cases.values():
                name = _class_name(contract.name, form, case.name)
                if name in classes:
                    raise ValueError(f"two benchmarks are named {name}: rename a form or a case of {contract.name}")
                members: dict[str, Any] = {"version": _fingerprint(contract, case), "unit": "bytes", "timeout": 600}
                for phase in PHASES:
                    build = StepOf(contract, form, Draw(case), phase)
                    members[f"track_peak_{phase}"] = _peak_benchmark(build)
                    members[f"time_{phase}"] = _time_benchmark(build)
                classes[name] = type(name, (), members)
    return classes


globals().update(_benchmark_classes())


def __getattr__(name: str) -> type:
    """What only a later commit has: ASV asks every commit for the benchmarks of one of them, and skips these."""
    if not name[:1].isupper():
        raise AttributeError(name)

    def setup(self: object) -> None:
        raise NotImplementedError(f"this commit has no {name}")

    methods = {f"{kind}_{phase}": lambda self: None for kind in ("track_peak", "time") for phase in PHASES}
    return type(name, (), {"setup": setup, **methods})
