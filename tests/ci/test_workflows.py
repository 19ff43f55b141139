"""The workflows and the action: linted, every step a script in ci/, and no token where a fork's code runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def loaded(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def triggers(path: Path) -> set[str]:
    """YAML 1.1 reads the key ``on`` as true."""
    return set(loaded(path)[True])


def steps_of(path: Path) -> list[dict[str, Any]]:
    data = loaded(path)
    jobs = data["jobs"].values() if "jobs" in data else [data["runs"]]
    return [step for job in jobs for step in job["steps"]]


ALL = [*WORKFLOWS, ROOT / "action.yml"]


def test_the_linters_find_nothing() -> None:
    missing = [tool for tool in ("check-jsonschema", "zizmor", "shellcheck") if not _has(tool)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; pip install -e '.[lint]'")
    done = subprocess.run(
        [ROOT / "ci/lint-workflows"],
        env={**os.environ, "MEMFIX_PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _has(tool: str) -> bool:
    return shutil.which(tool) is not None or (Path(sys.executable).parent / tool).exists()


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_every_step_is_a_script_that_runs_on_a_laptop(path: Path) -> None:
    commands = [step["run"] for step in steps_of(path) if "run" in step]
    assert commands
    for command in commands:
        script = re.fullmatch(r"(?:\$GITHUB_ACTION_PATH/)?(ci/[a-z-]+)( [^\n]*)?", command)
        assert script, command
        assert (ROOT / script[1]).stat().st_mode & 0o111, f"{script[1]} cannot be run"


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_actions_of_others_are_pinned_to_a_commit(path: Path) -> None:
    for step in steps_of(path):
        if "uses" in step and step["uses"] != "./":
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]), step["uses"]


def test_only_the_workflow_that_runs_no_code_of_a_pull_request_can_write() -> None:
    for path in WORKFLOWS:
        data = loaded(path)
        granted = [data["permissions"], *(job.get("permissions", {}) for job in data["jobs"].values())]
        writes = any("write" in permissions.values() for permissions in granted)
        assert writes == (path.name in ("comment.yml", "docs.yml")), path.name
    assert loaded(ROOT / ".github/workflows/docs.yml")[True] == {"push": {"branches": ["main"]}}
    comment = ROOT / ".github/workflows/comment.yml"
    assert triggers(comment) == {"workflow_run"}
    checkouts = [step for step in steps_of(comment) if step.get("uses", "").startswith("actions/checkout@")]
    assert checkouts
    assert all("ref" not in step["with"] and "repository" not in step["with"] for step in checkouts)


def test_the_comment_waits_for_the_workflow_of_that_name_and_takes_its_artifact() -> None:
    pull_request, comment = (ROOT / ".github/workflows" / name for name in ("pull-request.yml", "comment.yml"))
    assert loaded(comment)[True]["workflow_run"]["workflows"] == [loaded(pull_request)["name"]]
    (kept,) = (step["with"]["name"] for step in steps_of(pull_request) if "upload-artifact" in step.get("uses", ""))
    (taken,) = (step["with"]["name"] for step in steps_of(comment) if "download-artifact" in step.get("uses", ""))
    assert kept == taken


def test_forks_run_on_hosted_machines_and_the_gpu_runs_what_is_trusted() -> None:
    assert triggers(ROOT / ".github/workflows/pull-request.yml") == {"pull_request", "merge_group"}
    gpu = ROOT / ".github/workflows/gpu.yml"
    assert triggers(gpu) == {"merge_group", "push", "workflow_dispatch"}
    for path in WORKFLOWS:
        for job in loaded(path)["jobs"].values():
            assert ("self-hosted" in job["runs-on"]) == (path == gpu)


def test_the_history_is_fetched_wherever_a_base_is_compared_with() -> None:
    for name in ("pull-request.yml", "gpu.yml"):
        first = steps_of(ROOT / ".github/workflows" / name)[0]
        assert first["with"]["fetch-depth"] == 0


def test_a_value_that_somebody_else_chooses_reaches_a_script_by_its_environment() -> None:
    for path in ALL:
        assert all("${{" not in step.get("run", "") for step in steps_of(path))


def test_every_input_of_the_action_reaches_its_script() -> None:
    action = loaded(ROOT / "action.yml")
    used = set(re.findall(r"inputs\.([\w-]+)", yaml.safe_dump(action["runs"])))
    assert used == set(action["inputs"])
    script = (ROOT / "ci/action").read_text(encoding="utf-8")
    (step,) = (step for step in action["runs"]["steps"] if "run" in step)
    assert all(name in script for name in step["env"])
    assert all(f"{name}=%s" in script for name in action["outputs"])
