"""ci/gpu on a machine with a GPU that is only told of: its steps, its exit codes, and a copy without history."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NVML = """
import os
from types import SimpleNamespace
class NVMLError(Exception): pass
NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
answers = dict(nvmlDeviceGetName="NVIDIA Fake", nvmlSystemGetDriverVersion="1.2.3", nvmlDeviceGetHandleByIndex=0,
    nvmlDeviceGetUtilizationRates=SimpleNamespace(gpu=int(os.environ.get("FAKE_BUSY", 0))),
    nvmlDeviceGetMemoryInfo=SimpleNamespace(used=0), nvmlDeviceGetComputeRunningProcesses=[])
def __getattr__(name):
    if not name.startswith("nvml"):
        raise AttributeError(name)
    return lambda *arguments: answers.get(name, 1)
"""
# answers for the commands that ci/gpu calls by -m; everything else is Python's own, and whether the GPU is ready, which
# takes a second, where FAKE_BUSY says how much it is used
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *"memfix ready"*) if [ -z "${FAKE_BUSY:-}" ]; then exit 0; fi ;;
  "-m memfix gate --time"*) echo "called: $*"; exit "${FAKE_TIME:-0}" ;;
  "-m memfix gate"*) echo "called: $*"; exit "${FAKE_GATE:-0}" ;;
  "-m benchmarks.walk"*) echo "called: $* with $ASV_PYTHONPATH"; exit "${FAKE_ASV:-0}" ;;
  "-m pytest"*) echo "called: $*"; exit "${FAKE_TEST:-0}" ;;
  *"find_spec('ruff')"* | *"find_spec('mypy')"*) exit 1 ;;
esac
exec "$REAL_PYTHON" "$@"
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkout as it is copied to a GPU machine: with .gpu-site, without history."""
    where = tmp_path / "copy"
    for folder in ("memfix", "ci"):
        shutil.copytree(ROOT / folder, where / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (where / ".gpu-site").mkdir()
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake/pynvml.py").write_text(NVML)
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return where


def gpu(copy: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "MEMFIX_PYTHON": str(copy.parent / "python"), "REAL_PYTHON": sys.executable}
    settings |= {"PYTHONPATH": str(copy.parent / "fake"), "ASV_PYTHONPATH": "", **environment}
    return subprocess.run([str(copy / "ci/gpu"), *arguments], env=settings, capture_output=True, text=True)


def called(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line.removeprefix("called: ") for line in done.stdout.splitlines() if line.startswith("called: ")]


def test_all_steps_run_in_order_and_take_their_options(copy: Path) -> None:
    done = gpu(copy, "--wait", "0", "--base", "main", "--bench", "Rope", "--bench", "Kda", "--quick", FAKE_BUSY="0")
    assert done.returncode == 0, done.stdout + done.stderr
    test, gate, timing, asv = called(done)
    assert test.endswith(" tests tests/benchmarks -m gpu --memfix-strict")
    assert gate == "-m memfix gate --meter cuda"
    assert timing == "-m memfix gate --time --device cuda --base main"
    site = copy / ".gpu-site"
    assert asv == f"-m benchmarks.walk HEAD --wait 0 --bench Rope --bench Kda --quick with {site}"
    assert done.stdout.count("NVIDIA Fake, driver 1.2.3: ready") == 4


def test_one_step_can_be_chosen_and_a_range_is_walked(copy: Path) -> None:
    assert called(gpu(copy, "time", "--wait", "0")) == ["-m memfix gate --time --device cuda"]
    (asv,) = called(gpu(copy, "--walk", "HEAD~3..HEAD", "--wait", "0"))
    assert asv.startswith("-m benchmarks.walk HEAD~3..HEAD --wait 0 --fixes")


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ({"FAKE_TIME": "1"}, 1),
        ({"FAKE_TEST": "2"}, 2),
        ({"FAKE_TEST": "5"}, 2),
        ({"FAKE_TEST": "2", "FAKE_GATE": "1"}, 1),
        ({"FAKE_TIME": "1", "FAKE_ASV": "4"}, 4),
    ],
)
def test_every_step_runs_and_the_worst_end_counts(copy: Path, ends: dict[str, str], code: int) -> None:
    done = gpu(copy, "--wait", "0", **ends)
    assert done.returncode == code
    assert len(called(done)) == 4
    steps = {"test": "FAKE_TEST", "gate": "FAKE_GATE", "time": "FAKE_TIME", "asv": "FAKE_ASV"}
    head, *rows = done.stdout.splitlines()[-5:]
    assert head == "step   exit seconds"
    assert [row.split()[:2] for row in rows] == [[step, ends.get(name, "0")] for step, name in steps.items()]
    assert all(re.fullmatch(r"\d+", row.split()[2]) for row in rows)
    assert re.search(r"== ci/gpu gate: exit \d after \d+ s", done.stdout)


def test_a_busy_gpu_is_not_measured(copy: Path) -> None:
    done = gpu(copy, "--wait", "0", FAKE_BUSY="60")
    assert done.returncode == 2
    assert not called(done)
    assert "busy 60 % of the time: a time taken now is not this code's own" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["nonsense"], "unknown argument nonsense"), (["--walk"], "--walk needs a value")],
)
def test_usage(copy: Path, arguments: list[str], message: str) -> None:
    done = gpu(copy, *arguments)
    assert done.returncode == 4
    assert f"ci/gpu: {message}; see the head of ci/gpu (exit 4)" in done.stderr


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_copy_without_history_takes_the_one_that_came_along(copy: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
        command = ["git", "-C", str(copy), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (copy / ".gitignore").write_text("__pycache__/\n.gpu-site*/\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "as it was")
    head = git("rev-parse", "HEAD")
    git("bundle", "create", "-q", ".gpu-site/history.bundle", "HEAD")
    shutil.rmtree(copy / ".git")
    assert gpu(copy, "asv", "--wait", "0").returncode == 0
    assert git("rev-parse", "HEAD") == head
    assert git("status", "--porcelain") == ""
