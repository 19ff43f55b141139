"""pytest sessions inside of a test."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_python import forked_python
from sub_sessions import OPTIONS

REAL_HOME = Path.home()


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., pytest.RunResult]:
    """pytest in a process of its own."""
    # pytester moves the home folder; the self-test of the fake device need not run again for that
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME") or f"{REAL_HOME}/.cache")

    def run(*arguments: str) -> pytest.RunResult:
        begin = time.perf_counter()
        done = forked_python("-m", "pytest", *OPTIONS, *arguments, cwd=pytester.path)
        sys.stdout.write(done.stdout)  # shown where the test fails
        sys.stderr.write(done.stderr)
        lines = done.stdout.splitlines(), done.stderr.splitlines()
        return pytest.RunResult(done.returncode, *lines, duration=time.perf_counter() - begin)

    return run
