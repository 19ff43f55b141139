"""What one fresh process times: the forms of one op, each against its own copy at base, naive, and itself slowed."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...checks.inputs import Draw, StepOf
from ...checks.interpreter import take_one_core
from ...contract import Contract
from ...errors import MemfixError
from ...laws import NAIVE
from ...meters.base import Step
from ...meters.clock import Race, race, slowed
from ...meters.cuda import gpu_beside_others, gpu_to_ourselves
from ...registry import contracts
from .copies import NotAtBase, form_at_base
from .places import BASE, CANARY, NAIVE_FORM, Against, Place
from .rule import CANARY_FACTOR, MOST_RACE_S, PAIRS, SAMPLE_S

Subject = tuple[Place, Against]


@dataclass(frozen=True)
class Task:
    """What a process is to time of one op. ``odd`` ones make the base's step first: nothing may hang on the order.

    ``slower_by`` makes today's forms slower on purpose: how the gate itself is tested.
    """

    op: str
    subjects: tuple[Subject, ...]
    device: str
    base: Path | None
    odd: bool = False
    slower_by: float = 0.0


@dataclass(frozen=True)
class Timed:
    """One subject in one process: a race, or why there is none. ``is_new`` where the base cannot have it."""

    subject: Subject
    race: Race | None
    trouble: str = ""
    is_new: bool = False


def run_task(task: Task) -> list[Timed]:
    """In a process of its own."""
    if task.device == "cpu":
        take_one_core()
    (contract,) = contracts([task.op])
    _get_ready(contract, task)
    return [_timed(contract, subject, task) for subject in task.subjects]


def _get_ready(contract: Contract, task: Task) -> None:
    """What takes seconds and is not timed, before the GPU is wanted alone: until then others have it."""
    for place, against in task.subjects:
        if against == BASE and task.base is not None:
            with contextlib.suppress(Exception):  # which is said where it is to be timed
                form_at_base(task.base, contract.name, place.form)
    if task.device == "cuda":
        import torch

        if any(contract.forms[place.form].has_kernels for place, _ in task.subjects):
            importlib.import_module("triton")
        with gpu_beside_others():
            torch.zeros(1, device=task.device)


def _timed(contract: Contract, subject: Subject, task: Task) -> Timed:
    try:
        with _alone_on(task.device):
            first, second = _steps(contract, subject, task)
            return Timed(
                subject,
                race(first, second, device=task.device, pairs=PAIRS, sample_s=SAMPLE_S, most_s=MOST_RACE_S),
            )
    except NotAtBase as reason:
        return Timed(subject, None, str(reason), is_new=True)
    except MemfixError as error:
        return Timed(subject, None, str(error))
    except Exception as error:
        return Timed(subject, None, f"{type(error).__name__}: {error}".splitlines()[0])


def _steps(contract: Contract, subject: Subject, task: Task) -> Sequence[Step]:
    """The two to be timed, today's first."""
    place, against = subject
    draw = Draw(contract.cases[place.case])

    def today() -> Step:
        step = StepOf(contract, place.form, draw, place.phase)(task.device)
        return slowed(step, 1 + task.slower_by, task.device) if task.slower_by else step

    def other() -> Step:
        if against == BASE:
            assert task.base is not None
            with_base = contract.with_form(BASE, form_at_base(task.base, contract.name, place.form), like=place.form)
            return StepOf(with_base, BASE, draw, place.phase)(task.device)
        form = NAIVE if against == NAIVE_FORM else place.form
        return StepOf(contract, form, draw, place.phase)(task.device)

    if task.odd:
        second, first = other(), today()
    else:
        first, second = today(), other()
    return (slowed(first, CANARY_FACTOR, task.device) if against == CANARY else first), second


@contextlib.contextmanager
def _alone_on(device: str) -> Iterator[None]:
    with gpu_to_ourselves() if device == "cuda" else contextlib.nullcontext():
        yield
