"""Fresh processes, each of which times once. On a GPU several get ready together, before the first of them times."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from .child import Station, Subject, Task, Timed, stand_by
from .timing_plan import Place

TOGETHER = {"cpu": 1, "cuda": 6}
"""Starting up takes most of a process's time on a GPU, and six take no longer than four: two that can tell, two for a
second opinion, and two where either is in doubt. On a CPU, where it would be heard, they come one by one."""
_ENDING_S = 10.0


class FreshProcesses:
    """Asked one after the other; what stands by when nobody asks any more is sent away on leaving the block."""

    def __init__(self, station: Station) -> None:
        self._station = station
        self._standing_by: deque[_Process] = deque()

    def __enter__(self) -> FreshProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._standing_by:
            process.send_away()

    def timed(self, subjects: Sequence[Subject], *, base_first: bool) -> list[Timed]:
        """What the next process reads of each subject."""
        if not self._standing_by:
            places = list(dict.fromkeys(place for place, _ in subjects))
            self._standing_by.extend(_Process(self._station, places) for _ in range(TOGETHER[self._station.device]))
            for process in self._standing_by:
                process.wait_until_ready()
        process = self._standing_by.popleft()
        try:
            return process.timed(Task(tuple(subjects), base_first))
        finally:
            process.send_away()


class _Process:
    def __init__(self, station: Station, places: Sequence[Place]) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=stand_by, args=(theirs, station, places), daemon=True)
        self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        with suppress(EOFError, OSError):  # which it says when it is asked
            self._ours.recv()

    def timed(self, task: Task) -> list[Timed]:
        try:
            self._ours.send(task)
            answer: list[Timed] = self._ours.recv()
        except (EOFError, OSError):
            self._process.join(_ENDING_S)  # it is about to, and has a code only then
            trouble = f"the process that was to time it ended with {self._process.exitcode}"
            return [Timed(subject, None, trouble) for subject in task.subjects]
        return answer

    def send_away(self) -> None:
        self._process.kill()
        self._process.join()
        self._ours.close()
