"""What one fresh process times: the forms of one op, each against its own copy at base, naive, and itself slowed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ...checks.children import take_one_core
from ...checks.inputs import Draw, StepOf
from ...contract import Contract
from ...errors import MeasurementError, MemfixError
from ...laws import NAIVE
from ...meters.base import Step
from ...meters.clock import Race, race, slowed
from ...meters.cuda import gpu_beside_others, gpu_to_ourselves
from ...registry import contracts, source_of
from .import_base import NotAtBase, form_at_base
from .rule import CANARY_FACTOR, MOST_PAIRS, RACE_S, SAMPLE_S, SCATTER
from .timing_plan import BASE, CANARY, NAIVE_FORM, Against, Place, smallest_case

Subject = tuple[Place, Against]
_PROCESSOR = 36
"""Among the fields that follow a process's name in ``/proc/self/stat``."""


@dataclass(frozen=True)
class Station:
    """Where the forms of an op are timed, and against what.

    ``slower_by`` makes today's forms slower on purpose, each by a share: how the gate itself is tested.
    """

    op: str
    device: str
    base: Path | None
    slower_by: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """What it is to time. With ``base_first`` the base is made and timed first: nothing may hang on the order."""

    subjects: tuple[Subject, ...]
    base_first: bool


@dataclass(frozen=True)
class Timed:
    """One subject in one process: a race, or why there is none. ``is_new`` where the base cannot have it."""

    subject: Subject
    race: Race | None
    trouble: str = ""
    is_new: bool = False


def stand_by(connection: Connection, station: Station, places: Sequence[Place]) -> None:
    """The whole life of the process: get ready for ``places``, say so, time one task, answer."""
    if station.device == "cpu":
        take_one_core()
    (contract,) = contracts([station.op])
    if station.device == "cuda":
        _open_gpu(contract, places, station.device)
    connection.send("ready")
    task: Task = connection.recv()
    if station.device == "cuda":
        _stay_on_one_core()
    connection.send([_timed(contract, subject, station, task.base_first) for subject in task.subjects])


def _open_gpu(contract: Contract, places: Sequence[Place], device: str) -> None:
    """One small step of every form: in it torch and Triton load for seconds what nobody wants to see timed."""
    draw = Draw(smallest_case(contract))
    with gpu_beside_others():
        for form, phase in dict.fromkeys((place.form, place.phase) for place in places):
            with contextlib.suppress(Exception):  # which is said where it is to be timed
                StepOf(contract, form, draw, phase)(device)()


def _stay_on_one_core() -> None:
    """The one it is on. What is bound by launches is known to 4 % after a second where a scheduler moves its threads
    (kda's ``streamed`` beside an H200), and to 1 % from one core."""
    if not hasattr(os, "sched_setaffinity"):
        return
    core = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_PROCESSOR])
    for thread in Path("/proc/self/task").iterdir():  # one of torch's runs the backward
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread.name), {core})


def _timed(contract: Contract, subject: Subject, station: Station, base_first: bool) -> Timed:
    device, (enough_s, most_s) = station.device, RACE_S[subject[1]]
    try:
        with _alone_on(device):
            first, second = _steps(contract, subject, station, base_first)
            found = race(
                first, second, device=device, pairs=MOST_PAIRS, sample_s=SAMPLE_S, enough_s=enough_s, most_s=most_s,
                known_to=SCATTER, second_begins=base_first,
            )  # fmt: skip
            return Timed(subject, found)
    except NotAtBase as reason:
        return Timed(subject, None, str(reason), is_new=True)
    except MemfixError as error:
        return Timed(subject, None, str(error))
    except Exception as error:
        return Timed(subject, None, f"{type(error).__name__}: {error}".splitlines()[0])


def _steps(contract: Contract, subject: Subject, station: Station, base_first: bool) -> Sequence[Step]:
    """The two to be timed, today's first."""
    place, against = subject
    device, draw = station.device, Draw(contract.cases[place.case])

    def today() -> Step:
        step, share = StepOf(contract, place.form, draw, place.phase)(device), station.slower_by.get(place.form)
        return slowed(step, 1 + share, device) if share else step

    def other() -> Step:
        if against == BASE:
            with_base = contract.with_form(BASE, _at_base(contract, place.form, station), like=place.form)
            return StepOf(with_base, BASE, draw, place.phase)(device)
        form = NAIVE if against == NAIVE_FORM else place.form
        return StepOf(contract, form, draw, place.phase)(device)

    if base_first:
        second, first = other(), today()
    else:
        first, second = today(), other()
    return (slowed(first, CANARY_FACTOR, device) if against == CANARY else first), second


def _at_base(contract: Contract, form: str, station: Station) -> Callable[..., Any]:
    assert station.base is not None
    function = form_at_base(station.base, source_of(contract.name), contract.name, form)
    if function is contract.function(form):
        raise MeasurementError(f"at both commits it is {function.__module__}.{function.__qualname__}, one and the same")
    return function


@contextlib.contextmanager
def _alone_on(device: str) -> Iterator[None]:
    with gpu_to_ourselves() if device == "cuda" else contextlib.nullcontext():
        yield
