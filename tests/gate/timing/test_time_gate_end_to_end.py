"""The whole command on a checkout in which a form has become slower. Its clock counts calls, not seconds.

Its processes are forked from the command; ``test_another_repository.py`` has one started afresh.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_python import forked_python
from forked_workers import PROGRAM

ROOT = Path(__file__).resolve().parents[3]
FORM = Path("memfix/ops/rope/shared_table.py")
PLANTED = """

import functools

_once = shared_table_rope


@functools.wraps(_once)
def shared_table_rope(*inputs, **options):
    for _ in range(4):
        _once(*inputs, **options)
    return _once(*inputs, **options)
"""
AT_LEAST = 1.5  # forward five times, backward once


@pytest.fixture
def checkout(tmp_path: Path, commit_all: Callable[[Path], None]) -> Path:
    """This package as one commit."""
    shutil.copytree(ROOT / "memfix", tmp_path / "memfix", ignore=shutil.ignore_patterns("__pycache__"))
    commit_all(tmp_path)
    return tmp_path


def test_a_form_that_does_its_work_five_times_fails_with_its_ratio(checkout: Path, clock_of_calls: Path) -> None:
    with (checkout / FORM).open("a", encoding="utf-8") as file:
        file.write(PLANTED)
    environment = {**os.environ, "PYTHONPATH": f"{clock_of_calls}{os.pathsep}{checkout}", "OMP_NUM_THREADS": "1"}
    environment.pop("GITHUB_ACTIONS", None)
    arguments = ["gate", "rope", "--time", "--base", "main", "--json", "-"]
    done = forked_python("-c", PROGRAM, *arguments, cwd=checkout, env=environment)
    assert done.returncode == 1, done.stderr
    data = json.loads(done.stdout)
    (row,) = (found for found in data["findings"] if found["check"] == "time")
    assert row["status"] == "fail"
    assert row["figures"]["ratio"] > AT_LEAST
    assert any("uncommitted changes" in note for note in data["notes"])
