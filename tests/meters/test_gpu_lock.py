"""Who waits for a GPU, and for parts of its memory: the locks themselves need no GPU to be tested."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from memfix.meters import gpu_sharing, process_lock
from memfix.meters.process_lock import ProcessLock, SharedParts

PARTS = 4
CHILD = f"""
import sys
sys.path.insert(0, {str(Path(process_lock.__file__).parent)!r})
import fcntl

def flock(file, how, flock=fcntl.flock):
    try:
        flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        print("waits", flush=True)
        flock(file, how)

fcntl.flock = flock
import process_lock
path, how = sys.argv[1:]
if how == "count":
    print(process_lock.SharedParts(path, {PARTS}).num_taken())
    sys.exit()
if how.strip("!").isdigit():
    waits = iter([lambda: print("waits", flush=True)])
    process_lock.time = type("Time", (), {{"sleep": lambda _: next(waits, lambda: None)(), "monotonic": lambda: 0.0}})
    parts = process_lock.SharedParts(path, {PARTS})
    parts.PATIENCE_S = 0 if how.endswith("!") else 60
    wanted = parts.taken(int(how.strip("!")))
else:
    wanted = process_lock.ProcessLock(path).held(alone=how == "alone")
with wanted:
    print("has it", flush=True)
"""
"""Says whether it has to wait, and when it has the lock, or as many parts as it wants. One with a ``!`` has waited long
enough to be overtaken by nobody."""
STUCK_S = 600
"""No lock of a test takes so long, however busy the machine is."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gpu.lock"


@pytest.fixture
def lock(path: Path) -> ProcessLock:
    return ProcessLock(str(path))


class Child:
    """Another process that wants the lock. A stranger, unless it is given its parent's environment."""

    def __init__(self, path: Path, how: str, environment: dict[str, str] | None = None) -> None:
        if environment is None:
            environment = {key: value for key, value in os.environ.items() if key != ProcessLock(str(path)).variable}
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), how], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self._process.stdout is not None
        self._said = self._process.stdout

    def waits(self) -> bool:
        return self._said.readline() == "waits\n"

    def gets_it(self) -> bool:
        return self.says("has it")

    def says(self, at_last: str) -> bool:
        said, _ = self._process.communicate(timeout=STUCK_S)
        return self._process.returncode == 0 and said.endswith(f"{at_last}\n")


def test_another_process_waits_until_the_lock_is_free(lock: ProcessLock, path: Path) -> None:
    with lock.held(alone=True):
        child = Child(path, "alone")
        assert child.waits()
    assert child.gets_it()


def test_a_child_of_the_holder_does_not_wait_for_its_parent(lock: ProcessLock, path: Path) -> None:
    with lock.held(alone=True):
        assert Child(path, "alone", dict(os.environ)).gets_it()
        other = Child(path, "alone")
        assert other.waits(), "the child's leaving must not free what the parent holds"
    assert other.gets_it()


def test_the_holder_may_take_it_again(lock: ProcessLock, path: Path) -> None:
    with lock.held(alone=True), lock.held(alone=True):
        assert os.environ[lock.variable] == "alone"
    assert lock.variable not in os.environ


def test_those_that_measure_nothing_share_it(lock: ProcessLock, path: Path) -> None:
    with lock.held(alone=False):
        assert Child(path, "beside").gets_it()
        measuring = Child(path, "alone")
        assert measuring.waits()
    assert measuring.gets_it()


def test_who_shares_it_and_then_measures_has_it_alone_meanwhile(lock: ProcessLock, path: Path) -> None:
    with lock.held(alone=False):
        with lock.held(alone=True), lock.held(alone=False):
            other = Child(path, "beside")
            assert other.waits()
        assert other.gets_it()
    assert lock.variable not in os.environ


def test_who_shares_it_and_then_measures_does_not_wait_for_one_who_waits_for_him(lock: ProcessLock, path: Path) -> None:
    with lock.held(alone=False):
        first = Child(path, "alone")
        assert first.waits()
        with lock.held(alone=True):
            assert first.gets_it(), "it came first"


def test_nobody_overtakes_one_who_waits_to_have_it_alone(lock: ProcessLock, path: Path) -> None:
    with lock.held(alone=False):
        first = Child(path, "alone")
        assert first.waits()
        second = Child(path, "beside")
        assert second.waits(), "though it could share it now"
        assert Child(path, "beside", dict(os.environ)).gets_it(), "for a child its parent would wait"
    assert first.gets_it()
    assert second.gets_it()


def test_who_shares_it_for_long_makes_way(lock: ProcessLock, path: Path) -> None:
    gave_back: list[str] = []
    with lock.held(alone=False):
        lock.make_way(lambda: gave_back.append("nobody waits"))
        measuring = Child(path, "alone")
        assert measuring.waits()
        lock.make_way(lambda: gave_back.append("one waits"))
        assert measuring.gets_it()
        late = Child(path, "alone")
        assert late.waits(), "it is shared again"
    assert late.gets_it()
    assert gave_back == ["one waits"]


def test_who_measures_or_holds_nothing_makes_no_way(lock: ProcessLock, path: Path) -> None:
    gave_back: list[str] = []
    lock.make_way(lambda: gave_back.append("holds nothing"))
    with lock.held(alone=True):
        measuring = Child(path, "alone")
        assert measuring.waits()
        lock.make_way(lambda: gave_back.append("measures"))
    assert measuring.gets_it()
    assert not gave_back


# ---------------------------------------------------------------- parts
@pytest.fixture
def parts(path: Path) -> SharedParts:
    return SharedParts(str(path), PARTS)


def test_parts_that_are_free_are_had_at_once(parts: SharedParts, path: Path) -> None:
    with parts.taken(3):
        assert Child(path, "1").gets_it()


def test_parts_that_others_hold_are_counted(parts: SharedParts, path: Path) -> None:
    assert parts.num_taken() == 0
    with parts.taken(3):
        assert Child(path, "count").says("3")
        assert parts.num_taken() == 0, "its own are not others'"
        assert Child(path, "count").says("3"), "and it has them still"
    assert Child(path, "count").says("0")


@pytest.mark.parametrize("wanted", ["2", str(PARTS), str(PARTS + 5)])
def test_who_wants_more_than_is_free_waits(parts: SharedParts, path: Path, wanted: str) -> None:
    with parts.taken(3):
        child = Child(path, wanted)
        assert child.waits()
    assert child.gets_it()


def test_who_wants_few_parts_overtakes_one_who_waits_for_many(parts: SharedParts, path: Path) -> None:
    with parts.taken(1):
        first = Child(path, str(PARTS))
        assert first.waits()
        assert Child(path, str(PARTS - 1)).gets_it()
    assert first.gets_it()


def test_nobody_overtakes_one_who_has_waited_long(parts: SharedParts, path: Path) -> None:
    with parts.taken(1):
        first = Child(path, f"{PARTS}!")
        assert first.waits()
        second = Child(path, "1")
        assert second.waits(), "though a part is free now"
    assert first.gets_it()
    assert second.gets_it()


def test_who_has_some_gets_no_more_and_keeps_them_to_the_end(parts: SharedParts, path: Path) -> None:
    with parts.taken(PARTS - 1):
        with parts.taken(PARTS):
            assert Child(path, "1").gets_it()
        child = Child(path, "2")
        assert child.waits()
    assert child.gets_it()


def test_memory_is_given_back_before_the_parts_that_it_is_in(
    monkeypatch: pytest.MonkeyPatch, lock: ProcessLock, tmp_path: Path
) -> None:
    parts, taken_then = SharedParts(str(tmp_path / "parts"), PARTS), []
    monkeypatch.setattr(gpu_sharing, "current_gpu_uuid", lambda: "")
    monkeypatch.setattr(gpu_sharing, "_lock_of_gpu", lambda: lock)
    monkeypatch.setattr(gpu_sharing, "_parts_of_gpu", lambda _: parts)
    monkeypatch.setattr(gpu_sharing, "_give_back_memory", lambda: taken_then.append(len(parts._ours)))
    with gpu_sharing.gpu_for_bytes(PARTS - 1):
        pass
    assert taken_then[0] == PARTS - 1


def test_a_step_that_ran_out_of_memory_keeps_none_while_its_error_is_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, then = [], []
    monkeypatch.setattr(gpu_sharing, "_give_back_memory", lambda: then.append(tensors[0]()))

    def step() -> None:
        tensor = torch.ones(3)
        tensors.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("no more")

    with pytest.raises(torch.OutOfMemoryError, match="no more"), gpu_sharing._cache_emptied_after():
        step()
    assert then == [None]
