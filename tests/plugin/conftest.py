"""pytest sessions inside of a test."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import pytest
from forked_python import forked_python
from sub_sessions import OPTIONS


@pytest.fixture
def run(pytester: pytest.Pytester) -> Callable[..., pytest.RunResult]:
    """pytest in a process of its own."""

    def run(*arguments: str) -> pytest.RunResult:
        begin = time.perf_counter()
        done = forked_python("-m", "pytest", *OPTIONS, *arguments, cwd=pytester.path)
        sys.stdout.write(done.stdout)  # shown where the test fails
        sys.stderr.write(done.stderr)
        lines = done.stdout.splitlines(), done.stderr.splitlines()
        return pytest.RunResult(done.returncode, *lines, duration=time.perf_counter() - begin)

    return run
