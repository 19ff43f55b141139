"""Locks between the processes of one machine: a lock that is exclusive or shared, and a pool of equal parts."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, Literal

How = Literal["alone", "beside"]


class ProcessLock:
    """A lock on a file, taken exclusively ("alone") or shared ("beside"). A process that holds it, and any child that
    it starts meanwhile, may take it again.

    A process that wants the lock queues at a second file, the door, so that shared holders cannot overtake a process
    that waits for exclusive access. No process queues while it holds the lock, so there is no deadlock.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.variable = f"MEMFIX_LOCK_{zlib.crc32(path.encode()):08X}"
        """The environment variable that tells child processes how the lock is held."""
        self._threads = threading.RLock()
        self._held_as: list[How] = []
        """How each nested block holds the lock, outermost first. The innermost decides."""
        self._file: Any = None

    @contextlib.contextmanager
    def held(self, *, alone: bool) -> Iterator[None]:
        with self._threads:
            by_parent = self._held_by_parent()
            if by_parent == "alone" or (by_parent == "beside" and not alone):
                yield
                return
            outer = self._held_as[-1] if self._held_as else None
            inner: How = "alone" if alone or outer == "alone" else "beside"
            self._change(outer, inner)
            self._held_as.append(inner)
            try:
                yield
            finally:
                self._held_as.pop()
                self._change(inner, outer)

    def make_way(self, before: Callable[[], None]) -> None:
        """If another process waits and this one holds the lock shared: call ``before``, release the lock, retake it."""
        with self._threads:
            if self._held_as[-1:] == ["beside"] and self._somebody_waits():
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
        with _door(self._path) as door:
            fcntl.flock(door, fcntl.LOCK_EX)
            fcntl.flock(file, fcntl.LOCK_EX if how == "alone" else fcntl.LOCK_SH)
        self._file = file
        os.environ[self.variable] = how

    def _let_go(self) -> None:
        os.environ.pop(self.variable, None)
        self._file.close()  # closing the file unlocks it
        self._file = None

    def _somebody_waits(self) -> bool:
        with _door(self._path) as door:
            try:
                fcntl.flock(door, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


class SharedParts:
    """Equal parts of a resource, such as a GPU's memory. A process waits until as many parts as it wants are free.

    A process that wants few parts may overtake one that waits for many, until that one has waited ``PATIENCE_S``. In
    strict order, a hundred short measurements waited 25 s behind one that wanted most of an H200's memory. Blocks may
    be nested: a process that holds parts gets no more.
    """

    PATIENCE_S = 60.0
    _LOOK_EVERY_S = 0.01

    def __init__(self, path: str, number: int) -> None:
        self._path = path
        self._parts = range(number)
        self._ours: list[int] = []

    @contextlib.contextmanager
    def taken(self, number: int) -> Iterator[None]:
        """Wait for ``number`` parts, clamped to between one and all, and hold them until the block ends."""
        if self._ours:
            yield
            return
        self._wait_for(max(1, min(number, len(self._parts))))
        try:
            yield
        finally:
            self._give_back(self._ours)
            self._ours = []

    def num_taken(self) -> int:
        """How many parts other processes hold now."""
        with _door(self._path) as door:
            fcntl.flock(door, fcntl.LOCK_EX)
            free = self._grabbed()
            self._give_back(free)
        return len(self._parts) - len(self._ours) - len(free)

    def _wait_for(self, number: int) -> None:
        begin = time.monotonic()
        with _door(self._path) as door:
            fcntl.flock(door, fcntl.LOCK_EX)
            while not self._took(number):
                if time.monotonic() - begin < self.PATIENCE_S:
                    fcntl.flock(door, fcntl.LOCK_UN)
                time.sleep(self._LOOK_EVERY_S)
                fcntl.flock(door, fcntl.LOCK_EX)

    def _took(self, number: int) -> bool:
        """Take ``number`` parts, or none, and return whether it took any. The caller holds the door's lock."""
        free = self._grabbed()
        self._ours = free[:number] if len(free) >= number else []
        self._give_back(free[len(self._ours) :])
        return bool(self._ours)

    def _grabbed(self) -> list[int]:
        """Lock all parts that no process holds, and return them."""
        return [part for part in self._parts if part not in self._ours and _took_byte(self._file, part)]

    def _give_back(self, parts: Sequence[int]) -> None:
        for part in parts:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, part)

    @functools.cached_property
    def _file(self) -> IO[str]:
        """The lock file, with a byte for each part. It stays open, because closing it would release all locks."""
        return open(self._path, "w")


def _door(path: str) -> IO[str]:
    """The file at which processes queue for the lock file at ``path``."""
    return open(f"{path}.door", "w")


def _took_byte(file: IO[str], position: int) -> bool:
    """Lock one byte of a file for this process. Returns False if another process has it."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, position)
    except (BlockingIOError, PermissionError):
        return False
    return True
