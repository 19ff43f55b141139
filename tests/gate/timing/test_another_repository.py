"""The time gate in somebody else's repository, which brings its op by an entry point and imports itself by name."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_python import forked_python
from forked_workers import PROGRAM

ROOT = Path(__file__).resolve().parents[3]
FILES = {
    "src/theirs/__init__.py": "",
    "src/theirs/forms.py": """
import torch

ROUNDS = 1

def dense(x):
    return torch.tanh(x).cumsum(0)

def chunked(x):
    for _ in range(ROUNDS):
        result = torch.tanh(x).cumsum(0)
    return result
""",
    "src/theirs/memory.py": """
from memfix import Contract, Dim, TensorSpec

import theirs.forms
from theirs.forms import chunked

contract = Contract(
    name="their_scan",
    naive=theirs.forms.dense,
    forms={"chunked": chunked},
    dims={"N": Dim(1, 64), "D": Dim(1, 64)},
    inputs=[TensorSpec("x", "N D", grad=True)],
    cases={"small": {"N": 64, "D": 8}},
)
""",
    "src/theirs-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n",
    "src/theirs-1.0.dist-info/entry_points.txt": "[memfix.contracts]\ntheirs = theirs.memory:contract\n",
}


@pytest.fixture
def repository(tmp_path: Path, commit_all: Callable[[Path], None]) -> Path:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    commit_all(tmp_path)
    return tmp_path


def memfix(repository: Path, clock: Path, *more: str, forks: bool = True) -> subprocess.CompletedProcess[str]:
    """``memfix gate --time``. With ``forks`` its timing processes are forked from it, and do not import torch again."""
    folders = [clock, repository / "src", ROOT]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1"}
    environment.pop("GITHUB_ACTIONS", None)
    program = ("-c", PROGRAM) if forks else ("-m", "memfix")
    arguments = ("gate", "their_scan", "--time", "--device", "cpu", "--base", "main", "--json", "-", *more)
    return forked_python(*program, *arguments, cwd=repository, env=environment)


def test_their_form_that_does_its_work_fifty_times_fails_with_its_ratio(repository: Path, clock_of_calls: Path) -> None:
    forms = repository / "src/theirs/forms.py"
    forms.write_text(forms.read_text().replace("ROUNDS = 1", "ROUNDS = 50"))
    ended = memfix(repository, clock_of_calls)
    assert ended.returncode == 1, ended.stderr
    data = json.loads(ended.stdout)
    (row,) = (found for found in data["findings"] if found["check"] == "time")
    assert row["status"] == "fail"
    assert row["figures"]["ratio"] > 1.5
    assert any("judged too: src/theirs/forms.py" in note for note in data["notes"])


def test_their_only_case_is_too_large_for_a_cpu_and_a_smaller_one_is_timed(
    repository: Path, clock_of_calls: Path, commit_all: Callable[[Path], None]
) -> None:
    forms, memory = repository / "src/theirs/forms.py", repository / "src/theirs/memory.py"
    needs_too_much = "def chunked(x):\n    torch.empty(1 << 60 if len(x) > 1000 else 0, dtype=torch.uint8)"
    forms.write_text(forms.read_text().replace("def chunked(x):", needs_too_much))
    memory.write_text(memory.read_text().replace('"small": {"N": 64,', '"large": {"N": 2048,'))
    commit_all(repository)
    ended = memfix(repository, clock_of_calls, "--limit", "60")
    data = json.loads(ended.stdout)
    (note,) = (note for note in data["notes"] if "their_scan/chunked" in note)
    assert note.startswith(
        "their_scan/chunked [large, train] on cpu: it needs more memory than there is; timed at N=512 instead ("
    )
    (row,) = (found for found in data["findings"] if found["check"] == "time")
    assert (row["case"], "ratio" in row["figures"]) == ("large", True)
    assert row["message"].endswith(", at N=512 in place of large")


def test_their_contract_in_an_old_spelling_at_the_base_is_a_note(
    repository: Path, clock_of_calls: Path, commit_all: Callable[[Path], None]
) -> None:
    memory = repository / "src/theirs/memory.py"
    today = memory.read_text()
    memory.write_text(today.replace('"N D", grad=True', '"N D", grad=True, low=0.0'))
    commit_all(repository)
    memory.write_text(today)
    ended = memfix(repository, clock_of_calls, forks=False)
    (row,) = (found for found in json.loads(ended.stdout)["findings"] if found["check"] == "time")
    assert (row["status"], row["message"]) == (
        "note",
        "no time at main: this memfix cannot read the contract at the base: input 'x': low=0.0 is spelled "
        "values=Uniform(0.0, 1.0)",
    )
