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


ACTIONS = [ROOT / "action.yml", ROOT / "comment/action.yml"]
ALL = [*WORKFLOWS, *ACTIONS]
COMMENT, PULL_REQUEST = (ROOT / ".github/workflows" / name for name in ("comment.yml", "pull-request.yml"))


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


@pytest.mark.parametrize("path", ALL, ids=lambda path: "/".join(path.parts[-2:]))
def test_every_step_is_a_script_that_runs_on_a_laptop(path: Path) -> None:
    commands = [step["run"] for step in steps_of(path) if "run" in step]
    assert commands or path == COMMENT
    for command in commands:
        script = re.fullmatch(r"(?:\$GITHUB_ACTION_PATH/(?:\.\./)?)?(ci/[a-z-]+)( [^\n]*)?", command)
        assert script, command
        assert (ROOT / script[1]).stat().st_mode & 0o111, f"{script[1]} cannot be run"


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_actions_of_others_are_pinned_to_a_commit(path: Path) -> None:
    for step in steps_of(path):
        if "uses" in step and not step["uses"].startswith("./"):
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]), step["uses"]


def test_only_the_workflow_that_runs_no_code_of_a_pull_request_can_write() -> None:
    for path in WORKFLOWS:
        data = loaded(path)
        granted = [data["permissions"], *(job.get("permissions", {}) for job in data["jobs"].values())]
        writes = any("write" in permissions.values() for permissions in granted)
        assert writes == (path.name in ("comment.yml", "docs.yml")), path.name
    assert loaded(ROOT / ".github/workflows/docs.yml")[True] == {"push": {"branches": ["main"]}}
    assert triggers(COMMENT) == {"workflow_run"}
    checkout, comment = steps_of(COMMENT)
    assert checkout["uses"].startswith("actions/checkout@")
    assert checkout["with"] == {"persist-credentials": False}, "the default branch, and no other"
    assert comment == {"uses": "./comment"}


def test_the_comment_waits_for_the_workflow_of_that_name_and_takes_its_artifact() -> None:
    assert loaded(COMMENT)[True]["workflow_run"]["workflows"] == [loaded(PULL_REQUEST)["name"]]
    (kept,) = (step["with"]["name"] for step in steps_of(PULL_REQUEST) if "upload-artifact" in step.get("uses", ""))
    assert kept == loaded(ROOT / "comment/action.yml")["inputs"]["artifact"]["default"]


def test_forks_run_on_hosted_machines_and_the_gpu_runs_what_is_trusted() -> None:
    assert triggers(PULL_REQUEST) == {"pull_request", "merge_group"}
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


@pytest.mark.parametrize("path", ACTIONS, ids=lambda path: "/".join(path.parts[-2:]))
def test_every_input_of_an_action_reaches_its_script(path: Path) -> None:
    action = loaded(path)
    used = set(re.findall(r"inputs\.([\w-]+)", yaml.safe_dump(action["runs"])))
    assert used == set(action["inputs"])


def test_the_action_takes_what_it_is_given_and_writes_its_outputs() -> None:
    script = (ROOT / "ci/action.py").read_text(encoding="utf-8")
    (step,) = (step for step in steps_of(ROOT / "action.yml") if "run" in step)
    assert all(name in script for name in step["env"])
    assert all(f'"{name}"' in script for name in loaded(ROOT / "action.yml")["outputs"])


# ---------------------------------------------------------------- the files that the manual shows
YAML = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/ci.md").read_text(encoding="utf-8"), re.S)


@pytest.mark.parametrize(
    ("schema", "begins", "number"), [("github-workflows", "name: ", 2), ("gitlab-ci", "memfix:", 1)]
)
def test_a_documented_file_is_what_its_ci_takes(schema: str, begins: str, number: int, tmp_path: Path) -> None:
    if not _has("check-jsonschema"):
        pytest.skip("not installed: check-jsonschema; pip install -e '.[lint]'")
    texts = [text for text in YAML if text.startswith(begins)]
    assert len(texts) == number
    files = [tmp_path / f"{place}.yml" for place in range(number)]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_documented_workflows_run_a_fork_without_a_token_that_writes() -> None:
    judged, comment = (yaml.safe_load(text) for text in YAML if text.startswith("name: "))
    assert judged[True] == "pull_request"
    assert judged["permissions"] == {"contents": "read"}
    assert "permissions" not in judged["jobs"]["gate"]
    assert comment[True]["workflow_run"]["workflows"] == [judged["name"]]
    assert comment["permissions"] == {}
    assert [step["uses"] for step in comment["jobs"]["comment"]["steps"]] == ["OWNER/memfix/comment@v1"]


def test_the_hook_for_pre_commit_is_the_documented_one_and_takes_no_file_names() -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    (used,) = (yaml.safe_load(text) for text in YAML if text.startswith("# .pre-commit-config.yaml"))
    assert [one["id"] for one in used["repos"][0]["hooks"]] == [hook["id"]]
    assert hook["entry"] == "memfix gate --changed"
    assert hook["language"] == "system", "another environment would not have the contracts"
    assert hook["pass_filenames"] is False


def test_asv_run_is_shown_after_the_command_that_it_needs() -> None:
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md")]
    blocks = [block for page in pages for block in re.findall(r"```console\n(.*?)```", page, re.S)]
    befores = [block.split("bin/asv run ")[0] for block in blocks if "bin/asv run " in block]
    assert befores
    assert all("bin/asv machine --yes" in before for before in befores)
