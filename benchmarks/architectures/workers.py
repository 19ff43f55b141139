"""Processes that make the rows. One that hangs or ends is replaced, and its row says so."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch

from memfix.checks.children import start_worker
from memfix.orphans import ends_with_parent

from ..predicted_rows import Row
from .one_row import SECONDS, row_of

Job = tuple[str, str, str]
"""The arguments of ``row_of``."""
MOST_SECONDS = 2 * SECONDS + 30
"""The time after which a process is killed: code that does not return to Python cannot be interrupted."""


def rows(jobs: Sequence[Job], num_workers: int) -> Iterator[Row]:
    """Yield the row of each job, in order."""
    own = threading.local()
    started: list[_Worker] = []

    def row(job: Job) -> Row:
        if not hasattr(own, "worker"):
            own.worker = _Worker(num_workers)
            started.append(own.worker)
        return own.worker.row(job)

    with ThreadPoolExecutor(num_workers) as threads:
        try:
            yield from threads.map(row, jobs)
        finally:
            threads.shutdown(cancel_futures=True)
            for worker in started:
                worker.end()


class _Worker:
    """A process that makes one row at a time. It belongs to the thread that started it, and ends with that thread."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._process: Any = None
        self._pipe: Connection | None = None

    def row(self, job: Job) -> Row:
        pipe = self._pipe or self._start()
        pipe.send(job)
        is_usable, row = False, {"task": job[1], "class": job[2]}
        if not pipe.poll(MOST_SECONDS):
            row |= {"error": f"it takes longer than {MOST_SECONDS} s"}
        else:
            try:
                is_usable, row = pipe.recv()
            except (EOFError, OSError):
                self._process.join()
                row |= {"error": f"the process ended with exit code {self._process.exitcode}"}
        if not is_usable:
            self.end()
        return row

    def end(self) -> None:
        if self._pipe is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._pipe = None

    def _start(self) -> Connection:
        spawn = multiprocessing.get_context("spawn")
        ours, its = spawn.Pipe()
        self._process = spawn.Process(target=_make_rows, args=(its, self._num_workers))
        self._process.start()
        its.close()
        self._pipe = ours
        return ours


@ends_with_parent
def _make_rows(pipe: Connection, num_workers: int) -> None:
    start_worker(num_workers)
    while True:
        row = row_of(*pipe.recv())
        pipe.send((_is_usable(), row))


def _is_usable() -> bool:
    """Whether the process can still use the GPU: after an illegal access every call fails."""
    gc.collect()
    if not torch.cuda.is_available():
        return True
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return True
    return False
