"""The action in another repository: its words, its outputs, and a fork's pull request from the run to the comment."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from actions_runner import ROOT, Ended, Runner
from ci_script import ci_script
from fake_github import REPOSITORY, FakeGitHub
from rendered_markdown import rendered

PAGE = (ROOT / "docs/ci.md").read_text(encoding="utf-8")
DOCUMENTED = dict(re.findall(r"<!-- file: (\S+) -->\n```yaml\n(.*?)```", PAGE, re.S))
COMMIT = "0123456789" * 4
HOSTILE = (
    "@everyone #1 ![x](https://evil.example/x.png) <b>`\n::set-output name=exit-code::0\n::error::x\n$(touch pwned)"
)
# says how it was called, writes every report that it is asked for, and ends with FAKE_CODE
PYTHON = f"""#!{sys.executable} -IS
import json, os, pathlib, sys
words = sys.argv[1:]
print(json.dumps(words))
for option, path in zip(words, words[1:]):
    if option in ("--md", "--json", "--sarif", "--memfix-md", "--memfix-json"):
        pathlib.Path(path).write_text("a report\\n")
sys.exit(int(os.environ["FAKE_CODE"]))
"""


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    """A machine whose Python only says how it was called."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return Runner(tmp_path / "machine", {}, python=str(python), environment={"FAKE_CODE": "1"})


def called(ended: Ended) -> list[str]:
    return json.loads(ended.log)


# ---------------------------------------------------------------- what it runs, and what it hands on
def test_the_action_runs_the_gate_and_hands_on_its_code_and_its_reports(runner: Runner) -> None:
    ended = runner.play_action(arguments="my_loss --profile dev", base="main")
    folder = runner.temp / "memfix-report"
    endings = {"report": "md", "json": "json", "sarif": "sarif"}
    reports = {name: str(folder / f"report.{ending}") for name, ending in endings.items()}
    assert ended.exit_code == 1
    written = ["--md", reports["report"], "--json", reports["json"], "--sarif", reports["sarif"]]
    assert called(ended) == ["-m", "memfix", "gate", "my_loss", "--profile", "dev", "--base=main", *written]
    assert ended.outputs == {**reports, "exit-code": "1"}


def test_the_action_runs_tests_and_puts_their_table_in_the_job_summary(runner: Runner) -> None:
    runner.environment["FAKE_CODE"] = "0"
    ended = runner.play_action(tests="tests/test_loss.py -q")
    assert ended.succeeded
    assert called(ended)[:4] == ["-m", "pytest", "tests/test_loss.py", "-q"]
    assert ended.outputs["sarif"] == "", "pytest writes none"
    assert runner.summary() == "a report\n"


def test_a_report_that_was_not_written_is_no_output(runner: Runner) -> None:
    assert set(filter(None, runner.play_action(tests="x").outputs)) >= {"json"}
    Path(runner.python).write_text("#!/bin/sh\nexit 4\n")
    ended = runner.play_action(tests="x")
    assert {name: value for name, value in ended.outputs.items() if value} == {"exit-code": "4"}


EITHER = "give either 'arguments' (the ops and options of memfix gate) or 'tests' (the arguments of pytest)"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, EITHER),
        ({"arguments": "# only a comment"}, EITHER),
        ({"arguments": "my_loss", "tests": "tests"}, EITHER),
        ({"tests": "x", "base": "main"}, "'base' is for memfix gate, and 'tests' runs pytest: leave one of them out"),
        *[
            ({"arguments": "my_loss", name: 'one "two'} if name == "install" else {name: 'one "two'},
             f"the input '{name}' cannot be split into words: no closing quotation; close it, or escape it by \\")
            for name in ("arguments", "tests", "install")
        ],
    ],
)  # fmt: skip
def test_inputs_that_cannot_be_used_are_one_sentence(runner: Runner, inputs: dict[str, str], message: str) -> None:
    ended = runner.play_action(**inputs)
    assert ended.log.startswith(f"ci/action: {message}")
    assert ended.log.count("\n") == 1
    assert ended.exit_code == 4


# ---------------------------------------------------------------- words
WORDS = [
    ("tests/test_a.py\ntests/test_b.py\n", ["tests/test_a.py", "tests/test_b.py"]),
    ('-k "one or two"', ["-k", "one or two"]),
    ("-k 'it'\"'\"'s' a\\ b", ["-k", "it's", "a b"]),
    ("# all of it\na  # why\n  # don't\nb#c '#d' \\#e", ["a", "b#c", "#d", "#e"]),
    ("a \\\n  b \\\r\nc\r\nd", ["a", "b", "c", "d"]),
    ("'one\ntwo' \"\"", ["one\ntwo", ""]),
    ("-e .[test] 'memfix>=1' x@git+https://host/x#egg=x", ["-e", ".[test]", "memfix>=1", "x@git+https://host/x#egg=x"]),
    (
        "$(touch pwned) `touch pwned` ; touch pwned & | > pwned * ~ $HOME ${{ github.token }} !! {a,b}",
        "$(touch pwned) `touch pwned` ; touch pwned & | > pwned * ~ $HOME ${{ github.token }} !! {a,b}".split(),
    ),
    ("--x=\u202eé\u2028", ["--x=\u202eé\u2028"]),
]


@pytest.fixture(scope="module")
def action() -> ModuleType:
    return ci_script("action")


@pytest.mark.parametrize(("text", "words"), WORDS)
def test_an_input_is_split_as_a_shell_splits_it_and_never_evaluated(
    action: ModuleType, text: str, words: list[str]
) -> None:
    assert action.words(text) == words


@pytest.mark.parametrize("name", ["arguments", "tests"])
def test_every_word_of_every_line_arrives(runner: Runner, name: str) -> None:
    text = "\n".join(text for text, _ in WORDS)
    expected = [word for _, words in WORDS for word in words]
    ended = runner.play_action(**{name: text})
    start = 3 if name == "arguments" else 2
    assert called(ended)[start : start + len(expected)] == expected
    assert not list(runner.folder.rglob("pwned"))


def test_every_package_of_every_line_is_installed(
    action: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(action.subprocess, "run", run)
    for name, value in {"INSTALL": "-e .[test]  # ours\n'lab >= 2'", "TESTS": "tests", "PYTHON": ""}.items():
        monkeypatch.setenv(f"MEMFIX_{name}", value)
    monkeypatch.setenv("RUNNER_TEMP", str(tmp_path))
    monkeypatch.delenv("GITHUB_OUTPUT", raising=False)
    with pytest.raises(SystemExit) as ended:
        action.main()
    assert ended.value.code == 0
    venv, memfix, packages, tests = calls
    assert venv[1:4] == ["-m", "venv", "--clear"]
    assert memfix[-1] == f"{ROOT}[gate]"
    assert packages[-3:] == ["-e", ".[test]", "lab >= 2"]
    assert tests[:4] == [f"{tmp_path}/memfix-report/venv/bin/python", "-m", "pytest", "tests"]


def test_a_base_is_one_value_whatever_it_is_called(runner: Runner) -> None:
    ended = runner.play_action(arguments="my_loss", base="--update $(touch pwned)\nx")
    assert "--base=--update $(touch pwned)\nx" in called(ended)
    assert not list(runner.folder.rglob("pwned"))


# ---------------------------------------------------------------- with the real memfix
def test_a_failing_test_in_the_second_line_fails_the_check(tmp_path: Path) -> None:
    runner = Runner(tmp_path, {}, python=sys.executable, environment={"PYTHONPATH": str(ROOT)})
    (runner.workspace / "test_first.py").write_text("def test_one(): pass\n\ndef test_other(): assert False\n")
    (runner.workspace / "test_second.py").write_text("def test_two(): assert False\n")
    ended = runner.play_action(tests='test_first.py\ntest_second.py\n-p no:cacheprovider -q -k "one or two"')
    assert (ended.exit_code, ended.outputs["exit-code"]) == (1, "1"), ended.log
    assert "FAILED test_second.py::test_two" in ended.log
    assert "1 failed, 1 passed, 1 deselected" in ended.log


LAB = """
import memfix
from memfix import Dim, TensorSpec

def dense_loss(x):
    return x.exp().sum()

def chunked_loss(x):
    raise RuntimeError({hostile!r})

contract = memfix.Contract(
    name="my_loss", naive=dense_loss, forms={{"chunked": chunked_loss}}, dims=dict(N=Dim(1, 4)),
    inputs=[TensorSpec("x", "N", grad=True)], cases={{"small": dict(N=3, dtype="float32")}},
)
"""


@pytest.mark.parametrize(("fork", "shown"), [(False, True), (True, False)])
def test_findings_are_shown_on_lines_where_the_token_may_write(runner: Runner, fork: bool, shown: bool) -> None:
    (step,) = (text for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.S) if "upload-sarif" in text)
    runner.event["pull_request"] = {"head": {"repo": {"fork": fork}}}
    steps = "jobs:\n  gate:\n    steps:\n      - {id: memfix, uses: OWNER/memfix@v1, with: {arguments: my_loss}}\n"
    runner.play_job(steps + "".join(f"      {line}\n" for line in step.splitlines()))
    uploads = [given["sarif_file"] for name, given in runner.used if "upload-sarif" in name]
    assert uploads == ([str(runner.temp / "memfix-report/report.sarif")] if shown else [])


def test_a_forks_pull_request_runs_without_a_secret_and_is_commented_on_by_trusted_code(tmp_path: Path) -> None:
    """The two documented files: the run, its artifact, and the comment, for a change that is hostile all over."""
    judged, commenting = DOCUMENTED.values()
    head = {"full_name": "someone/lab", "fork": True}
    pull = {"title": HOSTILE, "head": {"ref": HOSTILE, "repo": head}}
    first = Runner(
        tmp_path / "first", {"pull_request": pull}, python=sys.executable,
        environment={"PYTHONPATH": f"{ROOT}:{tmp_path / 'first/workspace'}", "GITHUB_HEAD_REF": HOSTILE},
    )  # fmt: skip
    (first.workspace / "lab.py").write_text(LAB.format(hostile=HOSTILE))
    (first.workspace / "$(touch pwned) `x`.md").write_text(HOSTILE)
    (first.workspace / "lab-1.dist-info").mkdir()
    (first.workspace / "lab-1.dist-info/METADATA").write_text("Name: lab\nVersion: 1\n")
    (first.workspace / "lab-1.dist-info/entry_points.txt").write_text("[memfix.contracts]\nmy_loss = lab:contract\n")
    ran = first.play_job(judged)
    assert ran is not None
    assert ran.exit_code == 1, ran.log
    assert json.loads((first.temp / "memfix-report/report.sarif").read_text())["version"] == "2.1.0"
    assert all("title=memfix" in properties for _, properties, _ in ran.commands), "no message is a command"
    assert "a-token" not in first.folder.joinpath("step.sh").read_text() + ran.log
    assert rendered(first.summary()).references() == rendered(first.summary()).targets == []

    github = FakeGitHub(tmp_path / "github")
    path = github.install(pulls=[{"number": 7, "head": {"sha": COMMIT}}], artifacts=first.artifacts)
    run = {
        "id": 4242, "event": "pull_request", "conclusion": "failure", "head_sha": COMMIT, "head_branch": HOSTILE,
        "head_repository": head,
    }  # fmt: skip
    payload: dict[str, Any] = {"workflow_run": run, "repository": {"full_name": REPOSITORY}}
    second = Runner(tmp_path / "second", payload, path=path, environment={"MEMFIX_PYTHON": sys.executable})
    done = second.play_job(commenting)
    assert done is not None
    assert (done.exit_code, done.log) == (0, "ci/comment: commented on pull request 7\n")
    page = rendered(github.body())
    assert page.targets == ["https://github.com/owner/lab/actions/runs/4242"]
    assert page.references() == []
    assert "my_loss/chunked" in github.body()
    assert "RuntimeError" in github.body()
    assert [name for name, _ in second.used] == ["OWNER/memfix/comment@v1"], "nothing else runs beside the token"
    assert not list(tmp_path.rglob("pwned"))
