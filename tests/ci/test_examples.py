"""ci/examples: its faults are in the example, and the gate catches one of them. The script is a job of its own."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from types import ModuleType

import pytest
from ci_script import ci_script
from forked_python import forked_python
from snippets import fault_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def examples() -> ModuleType:
    return ci_script("examples")


def test_the_page_of_the_example_has_commands_that_exist(examples: ModuleType) -> None:
    from_nothing, in_package = examples.commands()
    assert [line.split()[:2] for line in from_nothing][:3] == [["memfix", "init"]] * 3
    assert [fault for line in (*from_nothing, *in_package) if (fault := fault_of(line)) is not None] == []


def test_at_least_four_faults_are_lines_of_the_example(examples: ModuleType) -> None:
    assert len(examples.FAULTS) >= 4
    for fault in examples.FAULTS:
        assert (examples.EXAMPLE / "src/frugal" / fault.file).read_text().count(fault.line) == 1


def test_the_gate_catches_a_fault_and_names_its_line(examples: ModuleType, tmp_path: Path) -> None:
    fault = examples.FAULTS[1]
    copy = examples.copied(tmp_path / "frugal")
    file = copy / "src/frugal" / fault.file
    file.write_text(file.read_text().replace(fault.line, fault.changed))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = "gate segment_mean --from src/frugal/contracts.py --lock memory.lock --profile dev"
    ended = forked_python("-m", "memfix", *shlex.split(command), cwd=copy, env=environment)
    assert ended.returncode == 1
    for text in fault.expected:
        assert text in ended.stdout
