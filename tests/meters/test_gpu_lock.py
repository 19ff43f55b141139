"""One process measures on a GPU at a time: the lock itself needs no GPU to be tested."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memfix.meters.cuda import _ProcessLock

CHILD = """
import sys
from memfix.meters.cuda import _ProcessLock
with _ProcessLock(sys.argv[1]).held(alone=sys.argv[2] == "alone"):
    print("got it", flush=True)
"""


def start(path: Path, environment: dict[str, str], how: str = "alone") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), how], stdout=subprocess.PIPE, text=True, env=environment
    )


def stranger() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != _ProcessLock.HELD_BY_PARENT}


def test_another_process_waits_until_the_lock_is_free(tmp_path: Path) -> None:
    with _ProcessLock(str(tmp_path / "gpu.lock")).held(alone=True):
        child = start(tmp_path / "gpu.lock", stranger())
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=2)
    assert child.communicate(timeout=20)[0] == "got it\n"


def test_a_child_of_the_holder_does_not_wait_for_its_parent(tmp_path: Path) -> None:
    with _ProcessLock(str(tmp_path / "gpu.lock")).held(alone=True):
        child = start(tmp_path / "gpu.lock", dict(os.environ))
        assert child.communicate(timeout=20)[0] == "got it\n"
        other = start(tmp_path / "gpu.lock", stranger())
        time.sleep(0.5)
        assert other.poll() is None, "the child's leaving must not free what the parent holds"
    assert other.communicate(timeout=20)[0] == "got it\n"


def test_the_holder_may_take_it_again(tmp_path: Path) -> None:
    lock = _ProcessLock(str(tmp_path / "gpu.lock"))
    with lock.held(alone=True), lock.held(alone=True):
        assert os.environ[_ProcessLock.HELD_BY_PARENT] == str(tmp_path / "gpu.lock")
    assert _ProcessLock.HELD_BY_PARENT not in os.environ


def test_those_that_measure_nothing_share_it(tmp_path: Path) -> None:
    with _ProcessLock(str(tmp_path / "gpu.lock")).held(alone=False):
        assert start(tmp_path / "gpu.lock", stranger(), "beside").communicate(timeout=20)[0] == "got it\n"
        waiting = start(tmp_path / "gpu.lock", stranger(), "alone")
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(timeout=2)
    assert waiting.communicate(timeout=20)[0] == "got it\n"


def test_who_shares_it_and_then_measures_has_it_alone_meanwhile(tmp_path: Path) -> None:
    lock = _ProcessLock(str(tmp_path / "gpu.lock"))
    with lock.held(alone=False):
        with lock.held(alone=True), lock.held(alone=False):
            other = start(tmp_path / "gpu.lock", stranger(), "beside")
            with pytest.raises(subprocess.TimeoutExpired):
                other.wait(timeout=2)
        assert other.communicate(timeout=20)[0] == "got it\n"
        assert _ProcessLock.HELD_BY_PARENT not in os.environ
