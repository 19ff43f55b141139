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
with _ProcessLock(sys.argv[1]):
    print("got it", flush=True)
"""


def start(path: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True, env=environment
    )


def stranger() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != _ProcessLock.HELD_BY_PARENT}


def test_another_process_waits_until_the_lock_is_free(tmp_path: Path) -> None:
    with _ProcessLock(str(tmp_path / "gpu.lock")):
        child = start(tmp_path / "gpu.lock", stranger())
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=2)
    assert child.communicate(timeout=20)[0] == "got it\n"


def test_a_child_of_the_holder_does_not_wait_for_its_parent(tmp_path: Path) -> None:
    with _ProcessLock(str(tmp_path / "gpu.lock")):
        child = start(tmp_path / "gpu.lock", dict(os.environ))
        assert child.communicate(timeout=20)[0] == "got it\n"
        other = start(tmp_path / "gpu.lock", stranger())
        time.sleep(0.5)
        assert other.poll() is None, "the child's leaving must not free what the parent holds"
    assert other.communicate(timeout=20)[0] == "got it\n"


def test_the_holder_may_take_it_again(tmp_path: Path) -> None:
    lock = _ProcessLock(str(tmp_path / "gpu.lock"))
    with lock, lock:
        assert os.environ[_ProcessLock.HELD_BY_PARENT] == str(tmp_path / "gpu.lock")
    assert _ProcessLock.HELD_BY_PARENT not in os.environ
