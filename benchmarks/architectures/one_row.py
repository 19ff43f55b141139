"""The row of one architecture: a small configuration that runs, and the peak of its step."""

from __future__ import annotations

import contextlib
import signal
import warnings
from collections.abc import Iterable, Iterator

import torch

import memfix
from memfix.errors import MeasurementError
from memfix.meters.base import StepBuilder

from ..predicted_rows import Row, measured
from .package import Attempt
from .packages import PACKAGES

SECONDS = 120
"""The time limit of each part: to find a configuration, and to predict and measure it."""


class Late(BaseException):
    """Passes through code that catches every exception."""


def row_of(package: str, task: str, class_name: str) -> Row:
    """Return the predicted peak of an architecture's step, and on a GPU the measured one."""
    row: Row = {"task": task, "class": class_name}
    of_package = PACKAGES[package]
    warnings.simplefilter("ignore")
    try:
        with _in_time():
            build = _first_that_runs(of_package.attempts(task, class_name), of_package.runs_on_cpu)
    except Late as late:
        return row | {"left_out": str(late)}
    except Exception as error:  # an architecture may raise anything
        return row | {"left_out": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
    try:
        with _in_time():
            return row | measured(build)
    except Late as late:
        return row | {"error": str(late)}


def _first_that_runs(attempts: Iterable[Attempt], runs_on_cpu: bool) -> StepBuilder:
    """Return the builder of a step in the first small configuration in which it runs. If there is none, raise
    why the first does not run."""
    why: Exception | None = None
    for attempt in attempts:
        try:
            build = attempt()
            _require_that_it_runs(build, runs_on_cpu)
        except Exception as error:
            why = why or error
        else:
            return build
    assert why is not None, "there is at least one attempt"
    raise why


def _require_that_it_runs(build: StepBuilder, runs_on_cpu: bool) -> None:
    """Run a step on the GPU, or else on the CPU; simulate it where a CPU may have too little memory."""
    if torch.cuda.is_available():
        build("cuda")()
    elif runs_on_cpu:
        build("cpu")()
    else:
        with contextlib.suppress(MeasurementError):  # the row says that it is refused
            memfix.peak(build)


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    """Raise ``Late`` inside after ``SECONDS``."""

    def late(*_: object) -> None:
        raise Late(f"it takes longer than {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
