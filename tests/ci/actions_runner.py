"""Plays GitHub's runner: the steps of a workflow's job or of a composite action, from the files themselves.

It knows the environment files, workflow commands in the log, ``if``, ``with``, ``env``, the expressions that our files
use, and a handful of actions of others. Whatever it does not know raises, so that a test follows the file it plays.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
COMMAND = re.compile(r"^\s*::([\w-]+)(?: ([^:]*))?::(.*)$", re.M)
OWN_ACTIONS = {
    "./": ROOT / "action.yml", "OWNER/memfix@v1": ROOT / "action.yml",
    "./comment": ROOT / "comment/action.yml", "OWNER/memfix/comment@v1": ROOT / "comment/action.yml",
}  # fmt: skip


@dataclass
class Ended:
    """A job or an action that ended: the code of the step that failed, outputs, log and the workflow commands in it."""

    exit_code: int = 0
    outputs: dict[str, str] = field(default_factory=dict)
    log: str = ""

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0

    @property
    def commands(self) -> list[tuple[str, str, str]]:
        return COMMAND.findall(self.log)


@dataclass
class Runner:
    """One job's machine. ``event`` is the payload, ``path`` goes before the PATH, ``python`` spares installing."""

    folder: Path
    event: dict[str, Any]
    python: str = ""
    path: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, bytes] = field(default_factory=dict)
    used: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.workspace, self.temp = self.folder / "workspace", self.folder / "temp"
        for folder in (self.workspace, self.temp):
            folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "event.json").write_text(json.dumps(self.event))

    def play_job(self, workflow: str) -> Ended | None:
        """Play the only job of a workflow; None where its ``if`` says no."""
        data = yaml.safe_load(workflow)
        (job,) = data["jobs"].values()
        self.environment |= data.get("env", {})
        if not self._is_true(job.get("if", "true"), {}, Ended()):
            return None
        return self._play(job["steps"], {}, ROOT)

    def play_action(self, action: Path = ROOT / "action.yml", **inputs: str) -> Ended:
        """Play a composite action with these inputs, and the defaults of the others."""
        data = yaml.safe_load(action.read_text(encoding="utf-8"))
        unknown = inputs.keys() - data["inputs"].keys()
        assert not unknown, f"the action has no inputs {unknown}"
        defaults = {name: str(value.get("default", "")) for name, value in data["inputs"].items()}
        if "python" in defaults:
            defaults["python"] = self.python
        given = {name: self._filled(value, {}) for name, value in defaults.items()} | inputs
        ended = self._play(data["runs"]["steps"], {"inputs": given}, action.parent)
        steps = {"steps": {"memfix": {"outputs": ended.outputs}}}
        ended.outputs = {name: self._filled(value["value"], steps) for name, value in data.get("outputs", {}).items()}
        return ended

    def summary(self) -> str:
        path = self.folder / "summary.md"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    # ---------------------------------------------------------------- steps
    def _play(self, steps: list[dict[str, Any]], known: dict[str, Any], action_path: Path) -> Ended:
        whole = Ended()
        known = {**known, "steps": {}}
        for step in steps:
            if not self._is_true(step.get("if", "success()"), known, whole):
                continue
            done = self._use(step, known) if "uses" in step else self._run(step, known, action_path)
            whole.log += done.log
            whole.exit_code = whole.exit_code or done.exit_code
            whole.outputs |= done.outputs
            if "id" in step:
                known["steps"][step["id"]] = {"outputs": done.outputs}
        return whole

    def _run(self, step: dict[str, Any], known: dict[str, Any], action_path: Path) -> Ended:
        assert "${{" not in step["run"], "a value in a script is code"
        files = {name: self.folder / name.lower() for name in ("GITHUB_OUTPUT", "GITHUB_ENV", "GITHUB_PATH")}
        for file in files.values():
            file.write_text("")
        script = self.folder / "step.sh"
        script.write_text(step["run"], encoding="utf-8")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("GITHUB_", "RUNNER_", "MEMFIX_", "GH_"))}
        environment = {
            **kept, **self.environment, **{name: str(file) for name, file in files.items()},
            "GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(self.folder / "summary.md"),
            "GITHUB_EVENT_PATH": str(self.folder / "event.json"), "GITHUB_WORKSPACE": str(self.workspace),
            "GITHUB_ACTION_PATH": str(action_path), "RUNNER_TEMP": str(self.temp),
            **{name: self._filled(str(value), known) for name, value in step.get("env", {}).items()},
        }  # fmt: skip
        if self.path is not None:
            environment["PATH"] = f"{self.path}{os.pathsep}{environment['PATH']}"
        where = self.workspace / self._filled(step.get("working-directory", "."), known)
        shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail"] if step.get("shell") else ["bash", "-e"]
        done = subprocess.run(
            [*shell, script], cwd=where, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert files["GITHUB_ENV"].read_text() == files["GITHUB_PATH"].read_text() == ""
        log = done.stdout.decode("utf-8", "replace")
        return Ended(done.returncode, _outputs(files["GITHUB_OUTPUT"].read_text(encoding="utf-8")), log)

    def _use(self, step: dict[str, Any], known: dict[str, Any]) -> Ended:
        name = step["uses"]
        given = {key: self._filled(str(value), known) for key, value in step.get("with", {}).items()}
        self.used.append((name, given))
        if name in OWN_ACTIONS:
            return self.play_action(OWN_ACTIONS[name], **given)
        action = name.partition("@")[0]
        if action == "actions/upload-artifact":
            self.artifacts[given["name"]] = zipped(Path(given["path"]))
            return Ended()
        assert action in ("actions/checkout", "actions/setup-python", "github/codeql-action/upload-sarif"), name
        return Ended()

    # ---------------------------------------------------------------- expressions
    def _filled(self, text: str, known: dict[str, Any]) -> str:
        """``text`` with every ``${{ }}`` replaced once, as the runner does: a value is not looked into."""
        return re.sub(r"\$\{\{(.*?)\}\}", lambda found: str(self._value(found[1], known, Ended())), text)

    def _is_true(self, condition: Any, known: dict[str, Any], so_far: Ended) -> bool:
        bare = re.sub(r"^\$\{\{(.*)\}\}$", r"\1", str(condition).strip())
        # a step is left out after a failure unless its condition asks how the job stands
        asks = "cancelled()" in bare or "success()" in bare
        return bool(self._value(bare, known, so_far)) and (asks or so_far.succeeded)

    def _value(self, expression: str, known: dict[str, Any], so_far: Ended) -> Any:
        expression = expression.strip()
        for mark, combined in ((" || ", lambda a, b: a or b), (" && ", lambda a, b: a and b)):
            left, found, right = expression.partition(mark)
            if found:
                return combined(self._value(left, known, so_far), self._value(right, known, so_far))
        if compared := re.fullmatch(r"(\S+) ([!=]=) '([^']*)'", expression):
            return (str(self._value(compared[1], known, so_far)) == compared[3]) == (compared[2] == "==")
        if expression.startswith("!"):
            return not self._value(expression[1:], known, so_far)
        simple = {"success()": so_far.succeeded, "cancelled()": False, "true": True, "github.token": "a-token"}
        if expression in simple:
            return simple[expression]
        found_at: Any = {"github": {"event": self.event}, **known}
        for key in expression.split("."):
            found_at = found_at[key] if key in ("github", "event", "inputs", "steps") else found_at.get(key, "")
        return found_at


def _outputs(text: str) -> dict[str, str]:
    """A file of outputs as the runner reads it, ``name=value`` in each line; values of several lines are not ours."""
    outputs: dict[str, str] = {}
    for line in text.splitlines():
        name, found, value = line.partition("=")
        assert found, f"the runner refuses the line {line!r}"
        assert name not in outputs, f"{name} is written twice"
        outputs[name] = value
    return outputs


def zipped(path: Path) -> bytes:
    """An artifact of one file, or of a folder's files."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in path.rglob("*") if path.is_dir() else [path]:
            archive.write(file, file.relative_to(path if path.is_dir() else path.parent))
    return content.getvalue()
