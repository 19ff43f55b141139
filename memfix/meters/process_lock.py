"""What the processes of one machine share in turn: a lock that is held alone or beside others, and equal parts."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, Literal

How = Literal["alone", "beside"]


class ProcessLock:
    """A lock on a file. The process that holds it, and any child it starts meanwhile, may take it again.

    A process that wants the lock queues at a second file, the door, so that shared holders cannot overtake a process
    that waits for exclusive access. No process queues while it holds the lock, so there is no deadlock.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.variable = f"MEMFIX_LOCK_{zlib.crc32(path.encode()):08X}"
        """The environment variable that tells children that the lock is held."""
        self._threads = threading.RLock()
        self._wanted: list[How] = []
        """Whether each nested block asked for exclusive access, outermost first. The innermost decides."""
        self._file: Any = None

    @contextlib.contextmanager
    def held(self, *, alone: bool) -> Iterator[None]:
        with self._threads:
            by_parent = self._held_by_parent()
            if by_parent == "alone" or (by_parent == "beside" and not alone):
                yield
                return
            outer = self._wanted[-1] if self._wanted else None
            inner: How = "alone" if alone or outer == "alone" else "beside"
            self._change(outer, inner)
            self._wanted.append(inner)
            try:
                yield
            finally:
                self._wanted.pop()
                self._change(inner, outer)

    def make_way(self, before: Callable[[], None]) -> None:
        """If another process waits and this one holds the lock shared: call ``before``, release the lock, retake it."""
        with self._threads:
            if self._wanted[-1:] == ["beside"] and self._somebody_waits():
                before()
                self._let_go()
                self._take("beside")

    def _held_by_parent(self) -> str | None:
        return os.environ.get(self.variable) if self._file is None else None

    def _change(self, before: How | None, now: How | None) -> None:
        if now == before:
            return
        if before is not None:
            self._let_go()
        if now is not None:
            self._take(now)

    def _take(self, how: How) -> None:
        file = open(self._path, "w")  # noqa: SIM115 - held until the last block ends
        with self._door() as door:
            fcntl.flock(door, fcntl.LOCK_EX)
            fcntl.flock(file, fcntl.LOCK_EX if how == "alone" else fcntl.LOCK_SH)
        self._file = file
        os.environ[self.variable] = how

    def _let_go(self) -> None:
        os.environ.pop(self.variable, None)
        self._file.close()  # which unlocks it
        self._file = None

    def _somebody_waits(self) -> bool:
        with self._door() as door:
            try:
                fcntl.flock(door, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def _door(self) -> IO[str]:
        return open(f"{self._path}.door", "w")


class SharedParts:
    """Equal parts of something, such as a GPU's memory. A process takes some of them; whoever came first goes first.

    A process that has some may ask again and gets no more, so a block may be nested.
    """

    _LOOK_EVERY_S = 0.01

    def __init__(self, path: str, number: int) -> None:
        self._path = path
        self._number = number
        self._has_some = False

    @contextlib.contextmanager
    def taken(self, number: int) -> Iterator[None]:
        """Wait for ``number`` parts, at most all of them, and hold them until the block ends."""
        if self._has_some:
            yield
            return
        with open(self._path, "w") as file:  # closing it gives the parts back
            with open(f"{self._path}.door", "w") as door:
                fcntl.flock(door, fcntl.LOCK_EX)
                self._take(file, min(number, self._number))
            self._has_some = True
            try:
                yield
            finally:
                self._has_some = False

    def _take(self, file: IO[str], number: int) -> None:
        taken: set[int] = set()
        parts = itertools.cycle(range(self._number))
        while len(taken) < number:
            part = next(parts)
            if part not in taken and _took(file, part):
                taken.add(part)
            elif part == self._number - 1:
                time.sleep(self._LOOK_EVERY_S)


def _took(file: IO[str], part: int) -> bool:
    """Take one byte of a file for this process. Returns False if another process has it."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, part)
    except (BlockingIOError, PermissionError):
        return False
    return True
