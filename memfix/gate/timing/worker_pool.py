"""A pool of new processes, each of which times once. On a GPU several start together, before the first one times."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from ...laws import NAIVE
from ...progress import Say, silent
from .timing_plan import Comparison, TimedForm
from .worker import SizingTask, TimingResult, TimingTask, WorkerConfig, run_worker

POOL_SIZE = {"cpu": 1, "cuda": 6}
"""On a GPU a process spends most of its time on start-up, and six take no longer than four: two to decide, two for a
second measurement, and two more where either is undecided. On a CPU concurrent start-up would disturb the timings."""
_EXIT_S = 10.0


class WorkerPool:
    """Gives each request to a new process; unused processes end with the ``with`` block.

    A process that takes longer than ``limit_s`` for one answer is ended. ``say`` is called with progress messages.
    """

    def __init__(self, config: WorkerConfig, *, limit_s: float | None = None, say: Say = silent) -> None:
        self._config, self._limit_s, self._say = config, limit_s, say
        self._ready: deque[_Worker] = deque()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._ready:
            worker.stop()

    def time(self, comparisons: Sequence[Comparison], *, base_first: bool) -> list[TimingResult]:
        """Return a result for each comparison from the next process. If it ends early, another takes the rest."""
        results: dict[Comparison, TimingResult] = {}
        while left := [one for one in comparisons if one not in results]:
            worker = self._next([comparison.timed for comparison in left])
            answers = worker.answers(TimingTask(tuple(left), base_first), self._limit_s)
            for comparison in left:
                self._say(f"{self._config.op}: {comparison.spelled()}")
                try:
                    results[comparison] = next(answers)
                except NoAnswer as error:
                    # naive alone may be too large; the form's own step is in all its comparisons
                    of_form = error.is_too_large and comparison.against != NAIVE
                    results |= {
                        one: TimingResult(one, None, str(error), is_too_large=error.is_too_large)
                        for one in left
                        if one == comparison or (of_form and one.timed == comparison.timed)
                    }
                    break
            worker.stop()
        return [results[one] for one in comparisons]

    def largest_within(
        self, step_s: float, sizes: Sequence[TimedForm], forms: Sequence[str]
    ) -> tuple[TimedForm, float] | None:
        """Return the last of ``sizes`` at which no form's step takes longer than ``step_s``, and the seconds it takes.

        The sizes grow, and the first that takes longer ends the search.
        """
        found = None
        worker = self._next(sizes[:1])
        answers = worker.answers(SizingTask(tuple(sizes), tuple(forms)), self._limit_s)
        for timed in sizes:
            self._say(f"{self._config.op}: a size of {timed.case} that fits, {2**timed.halvings} times smaller")
            try:
                seconds = next(answers)
            except NoAnswer:
                break
            if seconds is not None and seconds > step_s:
                break
            found = found if seconds is None else (timed, seconds)
        worker.stop()
        return found

    def _next(self, forms: Sequence[TimedForm]) -> _Worker:
        if not self._ready:
            distinct = list(dict.fromkeys(forms))
            self._ready.extend(_Worker(self._config, distinct) for _ in range(POOL_SIZE[self._config.device]))
            for worker in self._ready:
                worker.wait_until_ready()
        return self._ready.popleft()


class NoAnswer(Exception):
    """A process ended, or did not answer in time. ``is_too_large``: the case takes too much time or memory."""

    def __init__(self, message: str, *, is_too_large: bool) -> None:
        super().__init__(message)
        self.is_too_large = is_too_large


class _Worker:
    def __init__(self, config: WorkerConfig, forms: Sequence[TimedForm]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=run_worker, args=(theirs, config, forms), daemon=True)
        self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        with suppress(EOFError, OSError):  # the process ended; answers() reports it
            self._connection.recv()

    def answers(self, task: TimingTask | SizingTask, limit_s: float | None) -> Iterator[Any]:
        """Yield the answers to a task as they come; raise ``NoAnswer`` in place of one that does not come in time."""
        try:
            self._connection.send(task)
            while self._connection.poll(limit_s):
                yield self._connection.recv()
        except (EOFError, OSError):
            self._process.join(_EXIT_S)  # the exit code is known only after it has ended
            code = self._process.exitcode
            message = f"the process that was to time it ended with {code}"
            raise NoAnswer(message, is_too_large=code == -signal.SIGKILL) from None  # from Linux when memory runs out
        raise NoAnswer(f"it took longer than {limit_s:g} s", is_too_large=True)

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()
