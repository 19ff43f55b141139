"""A pool of fresh processes, each of which times once. On a GPU several start together, before the first one times."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from .timing_plan import Comparison, TimedForm
from .worker import TimingResult, TimingTask, WorkerConfig, run_worker

POOL_SIZE = {"cpu": 1, "cuda": 6}
"""On a GPU a process spends most of its time on start-up, and six take no longer than four: two to decide, two for a
second measurement, and two more where either is undecided. On a CPU concurrent start-up would disturb the timings."""
_EXIT_S = 10.0


class WorkerPool:
    """Gives each request to a new process; leaving the ``with`` block ends those that were not used."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._ready: deque[_Worker] = deque()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._ready:
            worker.stop()

    def time(self, comparisons: Sequence[Comparison], *, base_first: bool) -> list[TimingResult]:
        """One result for each comparison, all from the next process."""
        if not self._ready:
            forms = list(dict.fromkeys(comparison.timed for comparison in comparisons))
            self._ready.extend(_Worker(self._config, forms) for _ in range(POOL_SIZE[self._config.device]))
            for worker in self._ready:
                worker.wait_until_ready()
        worker = self._ready.popleft()
        try:
            return worker.time(TimingTask(tuple(comparisons), base_first))
        finally:
            worker.stop()


class _Worker:
    def __init__(self, config: WorkerConfig, forms: Sequence[TimedForm]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=run_worker, args=(theirs, config, forms), daemon=True)
        self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        with suppress(EOFError, OSError):  # the process ended; time() reports it
            self._connection.recv()

    def time(self, task: TimingTask) -> list[TimingResult]:
        try:
            self._connection.send(task)
            results: list[TimingResult] = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(_EXIT_S)  # the exit code is known only after it has ended
            error = f"the process that was to time it ended with {self._process.exitcode}"
            return [TimingResult(comparison, None, error) for comparison in task.comparisons]
        return results

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()
