"""Makes an environment with a given torch, runs the tests in it and stores the outcome; see ``ci/versions``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / ".versions"
RESULTS = ROOT / "benchmarks/results/versions"
TESTS = ("tests/meters", "tests/checks", "tests/plugin")
OLDEST_PYTHON = (3, 11)
STAMP = "memfix-versions"
"""The file that marks an environment as complete."""
FAILED, COULD_NOT, USAGE = 1, 2, 4
_NO_NETWORK = re.compile(
    r"name resolution|Failed to establish a new connection|Network is unreachable|Connection refused|Read timed out"
    r"|Max retries exceeded|ProxyError|connection broken|NewConnectionError|\(from versions: none\)",
    re.I,
)


class Failure(Exception):
    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Failure(USAGE, f"{message}; see the head of ci/versions")


def main(arguments: list[str]) -> int:
    pytest_arguments: list[str] = []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, pytest_arguments = arguments[:at], arguments[at + 1 :]
    try:
        asked = _asked(arguments)
        as_it_is = shutil.which(os.environ.get("MEMFIX_PYTHON", ""))
        python = Path(as_it_is) if as_it_is else _environment(asked)
        where = _versions_of(python)
        outcome = _run_tests(python, pytest_arguments or TESTS)
    except Failure as failure:
        print(f"ci/versions: {failure}", file=sys.stderr)
        return failure.exit_code
    print(f"torch {where['torch']}, {_counts(outcome)}")
    if not pytest_arguments:
        print(f"kept in {_keep({**where, **outcome}).relative_to(ROOT)}")
    return FAILED if outcome["failed"] else 0


def _asked(arguments: list[str]) -> argparse.Namespace:
    parser = _Parser(prog="ci/versions", add_help=False, allow_abbrev=False)
    parser.add_argument("torch", nargs="?")
    for option in ("--python", "--numpy", "--triton"):
        parser.add_argument(option)
    asked = parser.parse_args(arguments)
    given = [name for name, value in vars(asked).items() if value is not None]
    if os.environ.get("MEMFIX_PYTHON"):
        if given:
            raise Failure(USAGE, f"MEMFIX_PYTHON is used as it is; leave out {' '.join(arguments)}, or MEMFIX_PYTHON")
        return asked
    if asked.torch is None:
        raise Failure(
            USAGE, "name a torch, such as ci/versions 2.15.0, or an interpreter: MEMFIX_PYTHON=python3 ci/versions"
        )
    for name in given:
        digits = r"\d+\.\d+" if name == "python" else r"\d+(\.\d+)+([a-z]+\d+)?"
        if not re.fullmatch(digits, getattr(asked, name)):
            example = {"torch": "2.15.0", "python": "3.12", "numpy": "2.4.6", "triton": "3.9.0"}[name]
            raise Failure(USAGE, f"{name} must be a version such as {example}, got {getattr(asked, name)!r}")
    return asked


# ---------------------------------------------------------------- the environment
def _environment(asked: argparse.Namespace) -> Path:
    """Return the Python of the requested environment; make the environment if it is missing or incomplete."""
    base, version = _interpreter(asked.python)
    pins = [f"{name}-{value}" for name in ("numpy", "triton") if (value := getattr(asked, name))]
    folder = ENVIRONMENTS / "-".join([f"torch-{asked.torch}-python-{version}", *pins])
    python, stamp = folder / "bin/python", folder / STAMP
    needed = _needed_packages()
    wanted = "\n".join([f"torch=={asked.torch}", *pins, *needed])
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"ci/versions: making {folder.relative_to(ROOT)}", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        _call([base, "-m", "venv", str(folder)], f"could not make an environment with {base}")
        _install(python, f"torch=={asked.torch}", f"numpy=={asked.numpy}" if asked.numpy else "numpy")
        _install(python, *needed)
        # a CUDA build of torch requires its own Triton; a CPU build requires none
        if asked.triton:
            _install(python, "--no-deps", f"triton=={asked.triton}")
        elif sys.platform == "linux":
            _install(python, "triton")
        stamp.write_text(wanted)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # an incomplete environment is of no use
        raise
    return python


def _interpreter(version: str | None) -> tuple[str, str]:
    """Return a Python of this version (this process's, one on the PATH, or pyenv's) and its version."""
    if version is None:
        return sys.executable, f"{sys.version_info[0]}.{sys.version_info[1]}"
    if tuple(map(int, version.split("."))) < OLDEST_PYTHON:
        raise Failure(USAGE, f"memfix needs Python 3.11 or later, got --python {version}")
    of_pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for candidate in (sys.executable, shutil.which(f"python{version}"), *map(str, of_pyenv)):
        if candidate and _answers(candidate, "import sys; print('%d.%d' % sys.version_info[:2])") == version:
            return candidate, version
    raise Failure(COULD_NOT, f"no python{version} on this machine; install it, or name another by --python")


def _answers(python: str, program: str) -> str | None:
    done = subprocess.run([python, "-c", program], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def _needed_packages() -> list[str]:
    """Return the packages that memfix and its tests need besides torch, numpy and Triton."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {"opt_einsum", "matplotlib", "pytest-xdist"}
    found = sum(project["optional-dependencies"].values(), start=project["dependencies"])
    names = {package: re.split(r"[<>=;\[ ]", package)[0] for package in found}
    needed = set(project["dependencies"]) | {package for package, name in names.items() if name in wanted}
    return sorted(package for package in needed if names[package] not in ("torch", "numpy"))


def _install(python: Path, *packages: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return
    said, wanted = done.stderr, [package for package in packages if not package.startswith("-")]
    if _NO_NETWORK.search(said):
        raise Failure(COULD_NOT, f"pip reaches no package index for {wanted[0]}; try again with a network")
    unknown = re.search(r"No matching distribution found for (\S+)", said)
    if unknown:
        known = re.search(r"from versions: ([^)]+)", said)
        there = f"; there are {', '.join(known[1].split(', ')[-6:])}" if known else ""
        here = f"{_answers(str(python), 'import platform; print(platform.python_version())')} on {platform.machine()}"
        raise Failure(USAGE, f"pip finds no {unknown[1]} for Python {here}{there}")
    raise Failure(COULD_NOT, f"pip could not install {' '.join(wanted)}: {_last_line(said)}")


def _call(command: list[str], message: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Failure(COULD_NOT, f"{message}: {_last_line(done.stderr or done.stdout)}")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


# ---------------------------------------------------------------- the tests
_DESCRIBE = """
import json, platform, torch
from memfix.provenance import describe, installed_version
found = describe()
kept = {key: found[key] for key in ("date", "commit", "triton", "python", "machine", "gpu")}
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "numpy": installed_version("numpy"), **kept}))
"""


def _surroundings() -> dict[str, str]:
    """Return the environment variables of the tests. A GPU machine without network has packages in .gpu-site."""
    site = [str(ROOT / ".gpu-site")] if os.environ.get("MEMFIX_PYTHON") and (ROOT / ".gpu-site").is_dir() else []
    path = os.pathsep.join([str(ROOT), *site, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def _versions_of(python: Path) -> dict[str, Any]:
    done = subprocess.run([str(python), "-c", _DESCRIBE], env=_surroundings(), capture_output=True, text=True)
    if done.returncode:
        raise Failure(
            COULD_NOT, f"{python} cannot import torch and memfix: {_last_line(done.stderr)}; install what is missing"
        )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _run_tests(python: Path, arguments: Any) -> dict[str, Any]:
    """Run the tests; return the counts, the names of failures, and the seconds."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        start = time.monotonic()
        done = subprocess.run(
            [str(ROOT / "ci/test"), *arguments, f"--junitxml={report}"],
            env={**_surroundings(), "MEMFIX_PYTHON": str(python)},
        )
        seconds = round(time.monotonic() - start)
        if not report.exists():
            raise Failure(COULD_NOT, f"the tests did not run: ci/test ended with {done.returncode}; see above")
        return {**_read_report(report), "seconds": seconds}


def _read_report(report: Path) -> dict[str, Any]:
    cases = list(xml.etree.ElementTree.parse(report).iter("testcase"))
    failures = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    if not cases:
        raise Failure(COULD_NOT, "no test was found; name a folder or a file of tests/")
    return {
        "passed": len(cases) - len(failures) - len(skipped),
        "failed": len(failures),
        "skipped": len(skipped),
        "failures": sorted(f"{case.get('classname')}::{case.get('name')}" for case in failures),
    }


def _counts(outcome: dict[str, Any]) -> str:
    return f"{outcome['passed']} passed, {outcome['failed']} failed, {outcome['skipped']} skipped"


def _keep(found: dict[str, Any]) -> Path:
    torch, python = found["torch"].split("+")[0], found["python"].rsplit(".", 1)[0]
    name = f"torch-{torch}-python-{python}-numpy-{found['numpy']}-triton-{found['triton']}-{found['machine']}.json"
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / name.replace(" ", "-")
    path.write_text(json.dumps(found, indent=1) + "\n")
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
