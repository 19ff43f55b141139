"""ci/versions with a Python that only pretends to install and to test: environments, outcomes, and what is refused."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# the interpreter that is found, and the one in the environment that it makes
BASE = """#!/usr/bin/env bash
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$FAKES/python" "$3/bin/python" ;;
  "-c "*) echo 3.99 ;;
esac
"""
PYTHON = """#!/usr/bin/env bash
all="$*"
echo "$all" >> "$FAKES/calls"
said() { if [ -n "$1" ]; then echo "$1" >&2; exit 1; fi; }
case "$all" in
  "-m pip install"*torch==*) said "${FAKE_PIP:-}"; exit 0 ;;
  "-m pip install"*) exit 0 ;;
  "-m pytest"*)
    if [ -n "$FAKE_REPORT" ]; then echo "$FAKE_REPORT" > "${all##*--junitxml=}"; fi
    exit "${FAKE_TEST:-0}" ;;
  *"platform.python_version()"*) echo 3.99.1; exit 0 ;;
  *"import describe"*) said "${FAKE_IMPORT:-}"; echo "$FAKE_VERSIONS"; exit 0 ;;
  *find_spec*) exit 1 ;;
esac
exec "$REAL_PYTHON" "$@"
"""
VERSIONS = {
    "torch": "2.15.0+cu132", "cuda": "13.2", "numpy": "2.4.6", "triton": "3.9.0", "python": "3.99.1",
    "machine": "aarch64", "gpu": "none", "date": "2026-11-16T12:00:00Z", "commit": "0123456789ab",
}  # fmt: skip
PASSED = '<testsuites><testsuite><testcase classname="a.b" name="one"/><testcase classname="a.b" name="two"><skipped/>'
PASSED += "</testcase></testsuite></testsuites>"
FAILED = PASSED.replace("<skipped/>", "<failure/>")
RESULT = "torch-2.15.0-python-3.99-numpy-2.4.6-triton-3.9.0-aarch64.json"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    where = tmp_path / "copy"
    shutil.copytree(ROOT / "ci", where / "ci", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", where)
    (where / "memfix").mkdir()
    shutil.copy(ROOT / "memfix/versions.py", where / "memfix")
    fakes = tmp_path / "fakes"
    fakes.mkdir()
    for name, text in (("python3.99", BASE), ("python", PYTHON)):
        (fakes / name).write_text(text)
        (fakes / name).chmod(0o755)
    return where


def versions(copy: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    fakes = copy.parent / "fakes"
    settings = {**os.environ, "FAKES": str(fakes), "REAL_PYTHON": sys.executable, "FAKE_VERSIONS": json.dumps(VERSIONS)}
    settings |= {"PATH": f"{fakes}:{Path(sys.executable).parent}:{os.environ['PATH']}", "FAKE_REPORT": PASSED}
    settings.pop("MEMFIX_PYTHON", None)
    return subprocess.run(
        [str(copy / "ci/versions"), *arguments], env={**settings, **environment}, capture_output=True, text=True
    )


def calls(copy: Path, of: str) -> list[str]:
    return [line for line in (copy.parent / "fakes/calls").read_text().splitlines() if line.startswith(of)]


def kept(copy: Path) -> list[str]:
    return [path.name for path in copy.glob("benchmarks/results/versions/*")]


def test_environment_is_made_tested_and_its_outcome_kept(copy: Path) -> None:
    done = versions(copy, "2.15.0", "--python", "3.99", "--numpy", "2.4.6", "--triton", "3.9.0")
    assert done.returncode == 0, done.stderr
    assert "torch 2.15.0+cu132, 1 passed, 0 failed, 1 skipped" in done.stdout
    folder = copy / ".versions/torch-2.15.0-python-3.99-numpy-2.4.6-triton-3.9.0"
    assert (folder / "memfix-versions").exists()
    installs = [line.split("--disable-pip-version-check ")[1] for line in calls(copy, "-m pip")]
    assert installs[0] == "torch==2.15.0 numpy==2.4.6"
    assert "hypothesis" in installs[1]
    assert "torch" not in installs[1]  # a range of it could bring another
    assert installs[2] == "--no-deps triton==3.9.0"  # torch pins another one
    (tests,) = calls(copy, "-m pytest")
    assert "tests/meters tests/checks tests/plugin" in tests
    assert kept(copy) == [RESULT]
    found = json.loads((copy / "benchmarks/results/versions" / RESULT).read_text())
    assert found.pop("seconds") >= 0
    assert found == {**VERSIONS, "passed": 1, "failed": 0, "skipped": 1, "failures": []}


def test_complete_environment_is_used_again(copy: Path) -> None:
    versions(copy, "2.15.0", "--python", "3.99")
    installed = len(calls(copy, "-m pip"))
    assert versions(copy, "2.15.0", "--python", "3.99").returncode == 0
    assert len(calls(copy, "-m pip")) == installed


def test_failures_are_named_and_end_with_1(copy: Path) -> None:
    done = versions(copy, "2.15.0", "--python", "3.99", FAKE_REPORT=FAILED, FAKE_TEST="1")
    assert done.returncode == 1, done.stderr
    found = json.loads((copy / "benchmarks/results/versions" / RESULT).read_text())
    assert (found["passed"], found["failed"], found["failures"]) == (1, 1, ["a.b::two"])


def test_other_tests_are_run_and_not_kept(copy: Path) -> None:
    done = versions(copy, "2.15.0", "--python", "3.99", "--", "tests/gate", "-k", "lock")
    assert done.returncode == 0, done.stderr
    (tests,) = calls(copy, "-m pytest")
    assert "tests/gate -k lock" in tests
    assert "tests/meters" not in tests
    assert kept(copy) == []


def test_interpreter_is_used_as_it_is(copy: Path) -> None:
    done = versions(copy, MEMFIX_PYTHON=str(copy.parent / "fakes/python"))
    assert done.returncode == 0, done.stderr
    assert kept(copy) == [RESULT]
    assert calls(copy, "-m pip") == []
    assert not (copy / ".versions").exists()


@pytest.mark.parametrize(
    ("said", "exit_code", "message"),
    [
        (
            "ERROR: Could not find a version that satisfies the requirement torch==2.99 "
            "(from versions: 2.14.1, 2.15.0)\n"
            "ERROR: No matching distribution found for torch==2.99",
            4,
            f"pip finds no torch==2.99 for Python 3.99.1 on {platform.machine()}; there are 2.14.1, 2.15.0",
        ),
        (
            "WARNING: Retrying: NewConnectionError('Failed to establish a new connection')\n"
            "ERROR: Could not find a version that satisfies the requirement torch==2.15.0 (from versions: 2.13.0+cpu)\n"
            "ERROR: No matching distribution found for torch==2.15.0",
            2,
            "pip reaches no package index for torch==2.15.0; try again with a network",
        ),
        (
            "ERROR: No space left on device",
            2,
            "pip could not install torch==2.15.0 numpy: ERROR: No space left on device",
        ),
    ],
    ids=["unknown version", "no network", "full disk"],
)
def test_what_cannot_be_installed_is_said_and_leaves_nothing(
    copy: Path, said: str, exit_code: int, message: str
) -> None:
    done = versions(copy, "2.15.0", "--python", "3.99", FAKE_PIP=said)
    assert done.returncode == exit_code, done.stderr
    assert done.stderr.splitlines()[-1] == f"ci/versions: {message}"
    assert list((copy / ".versions").iterdir()) == []
    assert versions(copy, "2.15.0", "--python", "3.99").returncode == 0  # mended, and it works


def test_half_made_environment_is_made_anew(copy: Path) -> None:
    """A run that was killed leaves a folder without a stamp."""
    folder = copy / ".versions/torch-2.15.0-python-3.99"
    folder.mkdir(parents=True)
    (folder / "rest").touch()
    assert versions(copy, "2.15.0", "--python", "3.99").returncode == 0
    assert not (folder / "rest").exists()


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        ([], 4, "name a torch, such as ci/versions 2.15.0, or an interpreter: MEMFIX_PYTHON=python3 ci/versions"),
        (["2.15.0", "--nmpy", "2"], 4, "unrecognized arguments: --nmpy 2; see the head of ci/versions"),
        (["2.15.0", "--numpy"], 4, "argument --numpy: expected one argument; see the head of ci/versions"),
        (["newest"], 4, "torch must be a version such as 2.15.0, got 'newest'"),
        (["2.15.0", "--python", "3"], 4, "python must be a version such as 3.12, got '3'"),
        (["2.15.0", "--python", "3.10"], 4, "memfix needs Python 3.11 or later, got --python 3.10"),
        (["2.15.0", "--python", "3.98"], 2, "no python3.98 on this machine; install it, or name another by --python"),
    ],
)
def test_wrong_argument_is_refused_with_the_next_step(
    copy: Path, arguments: list[str], exit_code: int, message: str
) -> None:
    done = versions(copy, *arguments)
    assert (done.returncode, done.stderr.strip()) == (exit_code, f"ci/versions: {message}")


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (None, [], "MEMFIX_PYTHON={python} is no interpreter; name one, such as python3"),
        (
            '[ "$1" = --version ] && echo Python 3.10.2; exit 1',
            [],
            "memfix needs Python 3.11 or later, MEMFIX_PYTHON is Python 3.10.2; name another",
        ),
        (
            'exec "$REAL_PYTHON" "$@"',
            ["2.15.0", "--numpy", "2.4.6"],
            "MEMFIX_PYTHON is used as it is; leave out 2.15.0 --numpy 2.4.6, or MEMFIX_PYTHON",
        ),
    ],
    ids=["none", "too old", "with a version"],
)
def test_interpreter_that_cannot_be_used_is_refused(
    copy: Path, script: str | None, arguments: list[str], message: str
) -> None:
    python = copy.parent / "interpreter"
    if script is not None:
        python.write_text(f"#!/usr/bin/env bash\n{script}\n")
        python.chmod(0o755)
    done = versions(copy, *arguments, MEMFIX_PYTHON=str(python))
    assert (done.returncode, done.stderr.strip()) == (4, f"ci/versions: {message.format(python=python)}")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"FAKE_REPORT": "", "FAKE_TEST": "3"}, "the tests did not run: ci/test ended with 3; see above"),
        ({"FAKE_REPORT": "<testsuites/>"}, "no test was found; name a folder or a file of tests/"),
        (
            {"FAKE_IMPORT": "ImportError: libcudart.so.13"},
            "cannot import torch and memfix: ImportError: libcudart.so.13",
        ),
    ],
)
def test_run_without_an_outcome_is_not_kept(copy: Path, environment: dict[str, str], message: str) -> None:
    done = versions(copy, "2.15.0", "--python", "3.99", **environment)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert kept(copy) == []
