"""Run the commands of docs/start.md and of the page of examples/frugal, then plant faults that the gate must catch."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples/frugal"


@dataclass(frozen=True)
class Fault:
    """A change of one line that breaks an example, and texts that the gate must print about it."""

    file: str
    line: str
    changed: str
    expected: tuple[str, ...]


FAULTS = (
    Fault(
        "entropy.py", "checkpoint(_entropy, part, use_reentrant=False)", "_entropy(part)",
        ("entropy/chunked [policy, held]", "src/frugal/entropy.py:20"),
    ),
    Fault(
        "segments.py", "torch.promote_types(features.dtype, torch.float32)", "torch.float64",
        ("segment_mean/summed [example, train]", "src/frugal/segments.py:18"),
    ),
    Fault(
        "mlp.py", "checkpoint(_block, part, up, down, use_reentrant=False)", "_block(part, up, down)",
        ("mlp/checkpointed [example, held]", "src/frugal/mlp.py:20"),
    ),
    Fault(
        "mlp.py", "for part in x.split(rows)", "for part in x.split(4 * rows)",
        ("mlp/checkpointed [example, forward]", "src/frugal/mlp.py:20"),
    ),
    Fault(
        "segments.py", "sums.new_ones(len(segment))).clamp(min=1)", "sums.new_ones(len(segment)))",
        ("equality FAILED", "segment_mean/summed", "reproduce: memfix check segment_mean --form summed --at "),
    ),
)  # fmt: skip


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="memfix-example-") as place:
        folder = Path(place)
        site = folder / "site"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
        copy = copied(folder / "to-install")
        subprocess.run([*pip, "--target", str(site), str(copy)], check=True)
        from_nothing, in_package = commands()
        faults = [
            *first_proof(folder / "start"),
            *run_all(from_nothing, without_contracts(folder / "nothing"), None),
            *run_all(in_package, copied(folder / "package"), site),
            *(problem for fault in FAULTS for problem in planted(fault, folder, site)),
        ]
    for problem in faults:
        print(f"ci/examples: {problem}", file=sys.stderr)
    return 1 if faults else 0


def commands() -> list[list[str]]:
    """Return the command lines of each part of the example's page."""
    page = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    parts = re.findall(r"```console\n(.*?)```", page, re.S)
    return [[line.removeprefix("$ ") for line in part.splitlines()] for part in parts]


def first_proof(folder: Path) -> list[str]:
    """Write the files of docs/start.md, run its memfix init and later commands, and compare memfix init's output."""
    page = (ROOT / "docs/start.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", page, re.S):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    block = next(text for text in re.findall(r"```console\n(.*?)```", page, re.S) if "memfix init" in text)
    lines = block.splitlines()
    asked = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    expected = "\n".join(line for line in lines if not line.startswith("$ "))
    ended = run(asked[0], folder, None)
    print(f"exit {ended.returncode}: {asked[0]}", flush=True)
    problems = []
    if expected not in ended.stdout:
        problems.append(f"docs/start.md does not show what memfix init says:\n{ended.stdout}")
    return [*problems, *run_all(asked[1:], folder, None)]


def copied(folder: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", ".pytest_cache")
    return Path(shutil.copytree(EXAMPLE, folder, ignore=ignored))


def without_contracts(folder: Path) -> Path:
    """Return a copy of the package without any files for memfix."""
    copied(folder)
    for name in ("tests", ".github"):
        shutil.rmtree(folder / name)
    for name in ("src/frugal/contracts.py", "memory.lock", "memory.peaks.json"):
        (folder / name).unlink()
    return folder


def run(line: str, folder: Path, site: Path | None) -> subprocess.CompletedProcess[str]:
    """Run a command of the page. ``site`` has the metadata of the installed package; its code comes from ``folder``."""
    name, *arguments = shlex.split(line, comments=True)
    command = [sys.executable, *(["-m", "memfix"] if name == "memfix" else []), *arguments]
    path = [str(folder / "src"), *([str(site)] if site else []), str(ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}
    if "pytest" in arguments and not has_plugin():
        command += ["-p", "memfix.pytest_plugin"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def has_plugin() -> bool:
    from importlib.metadata import entry_points

    return any(entry.name == "memfix" for entry in entry_points(group="pytest11"))


def run_all(lines: list[str], folder: Path, site: Path | None) -> list[str]:
    problems = []
    for line in lines:
        ended = run(line, folder, site)
        print(f"exit {ended.returncode}: {line}", flush=True)
        if ended.returncode:
            problems.append(f"{line} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    return problems


def planted(fault: Fault, folder: Path, site: Path) -> list[str]:
    """Plant a fault, run the gate, and return what is wrong with its verdict."""
    copy = copied(folder / "planted")
    file = copy / "src/frugal" / fault.file
    text = file.read_text(encoding="utf-8")
    if text.count(fault.line) != 1:
        return [f"{fault.file} must have {fault.line!r} once, found {text.count(fault.line)}"]
    file.write_text(text.replace(fault.line, fault.changed), encoding="utf-8")
    ended = run("memfix gate frugal --lock memory.lock --profile dev", copy, site)
    shutil.rmtree(copy)
    print(f"exit {ended.returncode}: with {fault.changed!r} in {fault.file}", flush=True)
    missing = [text for text in fault.expected if text not in ended.stdout]
    if ended.returncode == 1 and not missing:
        return []
    return [f"{fault.changed!r} ended with {ended.returncode}, without {missing}:\n{ended.stdout}{ended.stderr}"]


if __name__ == "__main__":
    sys.exit(main())
