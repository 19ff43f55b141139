"""What the CPU job of a pull request runs, on this machine: the merge base, the steps, the comment, the action."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]
STEPS = ("test", "benchmarks", "docs", "bytes", "time", "asv")


class Checkout:
    """A git repository with some of our scripts, and stand-ins for others."""

    def __init__(self, root: Path, *scripts: str) -> None:
        self.root = root
        self._commits = 0
        (root / "ci").mkdir(parents=True)
        for script in scripts:
            shutil.copy(ROOT / "ci" / script, root / "ci")
        self.git("init", "--quiet", "--initial-branch=main")
        self.commit()

    def git(self, *arguments: str) -> str:
        identity = ("-c", "user.name=memfix", "-c", "user.email=memfix@example.org", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(self.root), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self) -> str:
        self.git("add", "--all")
        self._commits += 1  # in its message, or two commits of one second are one
        self.git("commit", "--quiet", "--allow-empty", "--message", f"state {self._commits}")
        return self.git("rev-parse", "HEAD")

    def stand_in(self, name: str, text: str) -> None:
        path = self.root / name
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("GITHUB_", "MEMFIX_", "HEAD_"))}
        return subprocess.run(command, cwd=self.root, env={**kept, **environment}, capture_output=True, text=True)


# ---------------------------------------------------------------- the merge base
@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "checkout", "merge-base")


def test_the_base_is_where_the_branch_left_main(checkout: Checkout) -> None:
    left = checkout.git("rev-parse", "HEAD")
    checkout.git("switch", "--quiet", "--create", "branch")
    checkout.commit()
    checkout.git("switch", "--quiet", "main")
    checkout.commit()
    checkout.git("switch", "--quiet", "branch")
    assert checkout.run("ci/merge-base").stdout.strip() == left
    checkout.git("update-ref", "refs/remotes/origin/next", "branch")
    of_pull_request = checkout.run("ci/merge-base", GITHUB_BASE_REF="next")
    assert of_pull_request.stdout.strip() == checkout.git("rev-parse", "branch")
    assert checkout.run("ci/merge-base", GITHUB_BASE_REF="next", MEMFIX_BASE="main").stdout.strip() == left
    assert checkout.run("ci/merge-base", "branch", MEMFIX_BASE="main").stdout == of_pull_request.stdout


def test_a_base_that_is_not_there_is_a_usage_error(checkout: Checkout) -> None:
    done = checkout.run("ci/merge-base", "no-such-ref")
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == "ci/merge-base: no commit no-such-ref; fetch it, or name another\n"


def test_a_base_without_a_common_commit_is_a_usage_error(checkout: Checkout) -> None:
    checkout.git("checkout", "--quiet", "--orphan", "other")
    checkout.commit()
    done = checkout.run("ci/merge-base", "main")
    assert (done.returncode, done.stderr) == (4, "ci/merge-base: main and HEAD have no commit in common\n")


def test_a_shallow_clone_cannot_be_measured_and_the_way_out_is_said(checkout: Checkout, tmp_path: Path) -> None:
    before = checkout.git("rev-parse", "HEAD")
    checkout.commit()
    checkout.git("clone", "--quiet", "--depth=1", checkout.root.as_uri(), str(tmp_path / "shallow"))
    done = subprocess.run([tmp_path / "shallow/ci/merge-base", before], capture_output=True, text=True)
    assert done.returncode == 2
    assert "this is a shallow clone" in done.stderr
    assert "git fetch --unshallow, or check out with fetch-depth: 0" in done.stderr


def test_a_folder_that_is_no_checkout_is_a_usage_error(checkout: Checkout) -> None:
    shutil.rmtree(checkout.root / ".git")
    done = checkout.run("ci/merge-base", GIT_CEILING_DIRECTORIES=str(checkout.root.parent))
    assert (done.returncode, done.stderr) == (4, f"ci/merge-base: {checkout.root} is no git checkout\n")


def test_without_git_it_cannot_be_measured(checkout: Checkout, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "env"):
        (tools / name).symlink_to(str(shutil.which(name)))
    done = checkout.run("ci/merge-base", PATH=str(tools))
    assert (done.returncode, done.stderr) == (2, "ci/merge-base: there is no git on the PATH; install git\n")


# ---------------------------------------------------------------- the steps
@pytest.fixture
def steps(tmp_path: Path) -> Checkout:
    """The script of the CPU job over steps that end as the files ``ci/*.code`` say."""
    made = Checkout(tmp_path / "steps", "merge-base", "pull-request", "comment.py", "python")
    made.stand_in("ci/setup", f"echo {sys.executable}")
    made.stand_in(
        "ci/test",
        'name=test; [ "${*: -1}" != tests/benchmarks ] || name=benchmarks\n'
        "echo tested; exit $(cat ci/$name.code 2>/dev/null || echo 0)",
    )
    made.stand_in("ci/docs", "echo built; exit $(cat ci/docs.code 2>/dev/null || echo 0)")
    made.stand_in("ci/asv-smoke", "echo benchmarked; exit $(cat ci/asv.code 2>/dev/null || echo 0)")
    made.stand_in(
        "ci/gate",
        'name=bytes; [ "$1" != --time ] || name=time\n'
        'echo "$@" >> ci/gate.calls\n'
        '[ -f ci/silent ] || echo "### what the $name say" > reports/$name.md\n'
        "echo gated; exit $(cat ci/$name.code 2>/dev/null || echo 0)",
    )
    return made


def test_all_steps_pass_and_their_reports_are_one_comment(steps: Checkout, tmp_path: Path) -> None:
    summary = tmp_path / "summary.md"
    done = steps.run("ci/pull-request", GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY=str(summary))
    assert done.returncode == 0, done.stderr
    base = steps.git("rev-parse", "HEAD")
    calls = (steps.root / "ci/gate.calls").read_text().splitlines()
    assert [call.split(" --json")[0] for call in calls] == [f"--base {base}", f"--time --device cpu --base {base}"]
    assert [line for line in done.stdout.splitlines() if line.startswith("::group::")] == [
        f"::group::{step}" for step in STEPS
    ]
    comment = (steps.root / "reports/comment.md").read_text()
    assert comment.startswith(f"## memfix: pass\n\nAgainst `{base[:12]}`.\n")
    assert "| test | pass | " in comment
    assert "### what the bytes say" in comment
    assert "### what the time say" in comment
    assert summary.read_text() == comment
    assert steps.git("status", "--porcelain", "reports") == "", "the reports are not for committing"


@pytest.mark.parametrize(
    ("codes", "worst", "word"),
    [
        ({"time": 1}, 1, "regression"),
        ({"benchmarks": 1}, 1, "regression"),
        ({"docs": 1}, 1, "regression"),
        ({"test": 2, "bytes": 1, "asv": 2}, 1, "regression"),
        ({"asv": 2}, 2, "could not measure"),
        ({"test": 5}, 2, "could not measure"),
        ({"test": 1, "bytes": 4, "asv": 2}, 4, "usage"),
    ],
)
def test_every_step_runs_and_the_worst_code_is_the_last_word(
    steps: Checkout, codes: dict[str, int], worst: int, word: str
) -> None:
    for step, code in codes.items():
        (steps.root / f"ci/{step}.code").write_text(str(code))
    done = steps.run("ci/pull-request")
    assert done.returncode == worst
    ran = [line.split("\t")[:2] for line in (steps.root / "reports/steps.tsv").read_text().splitlines()]
    assert ran == [[step, str(codes.get(step, 0))] for step in STEPS]
    assert (steps.root / "reports/comment.md").read_text().startswith(f"## memfix: {word}\n")


def test_a_step_that_left_no_report_shows_the_end_of_its_log(steps: Checkout) -> None:
    (steps.root / "ci/silent").touch()
    (steps.root / "ci/bytes.code").write_text("2")
    assert steps.run("ci/pull-request", "bytes").returncode == 2
    comment = (steps.root / "reports/comment.md").read_text()
    assert "### bytes: no report\n\n```text\ngated\n```" in comment
    assert "| time |" not in comment


def test_a_step_or_a_base_that_is_not_there_is_a_usage_error(steps: Checkout) -> None:
    unknown = steps.run("ci/pull-request", "speed")
    assert (unknown.returncode, unknown.stderr) == (
        4, "ci/pull-request: no step speed; there are test, benchmarks, docs, bytes, time and asv\n"
    )  # fmt: skip
    assert steps.run("ci/pull-request", "--base", "no-such-ref", "test").returncode == 4
    assert not (steps.root / "reports").exists()


# ---------------------------------------------------------------- the comment
FAKE_GH = """#!/usr/bin/env python3
import json, os, sys
folder = os.path.dirname(os.path.abspath(__file__))
method, path = sys.argv[sys.argv.index("--method") + 1], sys.argv[-3 if sys.argv[-1] == "-" else -1]
data = json.load(sys.stdin) if sys.argv[-1] == "-" else None
with open(os.path.join(folder, "calls.jsonl"), "a") as calls:
    calls.write(json.dumps([method, path, data]) + "\\n")
answers = json.load(open(os.path.join(folder, "answers.json")))
print(json.dumps(answers.get(path.split("?")[0] + ("#2" if "page=2" in path else ""), [])))
"""
MARK = "<!-- memfix pull request -->"
PULLS, COMMENTS = "repos/owner/memfix/pulls", "repos/owner/memfix/issues/7/comments"
PULL = {"number": 7, "head": {"sha": "abc"}}


def comment_of(number: int, kind: str, body: str) -> dict[str, Any]:
    return {"id": number, "user": {"type": kind}, "body": body}


@pytest.fixture
def post(tmp_path: Path) -> Callable[..., tuple[str, list[Any]]]:
    """``ci/comment post`` against a stand-in for gh: what it says, and the calls that write."""

    def post(answers: dict[str, Any], body: str = "## memfix: pass\n") -> tuple[str, list[Any]]:
        tools = tmp_path / "tools"
        tools.mkdir()
        (tools / "gh").write_text(FAKE_GH)
        (tools / "gh").chmod(0o755)
        (tools / "answers.json").write_text(json.dumps(answers))
        (tmp_path / "comment.md").write_text(body)
        environment = {
            **os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "GITHUB_REPOSITORY": "owner/memfix",
            "HEAD_OWNER": "someone", "HEAD_BRANCH": "fix&state=all", "HEAD_SHA": "abc", "MEMFIX_PYTHON": sys.executable,
        }  # fmt: skip
        command = [ROOT / "ci/comment", "post", tmp_path / "comment.md"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        calls = [json.loads(line) for line in (tools / "calls.jsonl").read_text().splitlines()]
        assert calls[0][1] == f"{PULLS}?state=open&head=someone%3Afix%26state%3Dall&per_page=100"
        return done.stdout.strip(), [call for call in calls if call[0] != "GET"]

    return post


def test_the_first_run_makes_a_comment(post: Callable[..., tuple[str, list[Any]]]) -> None:
    said, writes = post({PULLS: [PULL], COMMENTS: [comment_of(1, "User", f"{MARK}\nplanted")]})
    assert said == "ci/comment: commented on pull request 7"
    assert writes == [["POST", COMMENTS, {"body": f"{MARK}\n## memfix: pass\n"}]]


def test_a_later_run_updates_it_on_whichever_page_it_is(post: Callable[..., tuple[str, list[Any]]]) -> None:
    first = [comment_of(1, "User", "looks good"), comment_of(2, "Bot", "another bot's")]
    said, writes = post({PULLS: [PULL], COMMENTS: first, f"{COMMENTS}#2": [comment_of(3, "Bot", f"{MARK}\nold")]})
    assert said == "ci/comment: updated the comment on pull request 7"
    assert [call[:2] for call in writes] == [["PATCH", "repos/owner/memfix/issues/comments/3"]]


def test_nothing_is_posted_on_a_pull_request_that_has_moved_on(post: Callable[..., tuple[str, list[Any]]]) -> None:
    said, writes = post({PULLS: [{"number": 7, "head": {"sha": "newer"}}]})
    assert said.startswith("ci/comment: no open pull request is at abc")
    assert writes == []


def test_a_comment_is_cut_to_what_github_takes_and_its_folds_are_closed(
    post: Callable[..., tuple[str, list[Any]]],
) -> None:
    long = "## memfix: regression\n<details><summary>all</summary>\n\n```text\n" + "x" * 99 + ("\n" + "y" * 99) * 900
    _, writes = post({PULLS: [PULL]}, long)
    body = writes[0][2]["body"]
    assert len(body) < 65_536
    assert body.count("<details") == body.count("</details>") == 1
    assert body.count("```") == 2
    left_out = len(f"{MARK}\n{long}") - body.index("\n```\n</details>")
    assert body.endswith(f"_{left_out:,} more characters left out: the run's artifact has them._")


def comment(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("GITHUB_", "HEAD_"))}
    command = [str(ROOT / "ci/comment"), *arguments]
    return subprocess.run(
        command, env={**kept, "MEMFIX_PYTHON": sys.executable, **environment}, capture_output=True, text=True
    )


def test_on_a_laptop_it_is_printed(tmp_path: Path) -> None:
    (tmp_path / "comment.md").write_text("## memfix: pass\n")
    done = comment("post", str(tmp_path / "comment.md"), "--dry-run")
    assert (done.returncode, done.stdout) == (0, f"{MARK}\n## memfix: pass\n\n")
    refused = comment("post", str(tmp_path / "comment.md"))
    assert refused.returncode == 4
    assert "posting needs GITHUB_REPOSITORY, HEAD_OWNER, HEAD_BRANCH, HEAD_SHA" in refused.stderr


@pytest.mark.parametrize("command", ["write", "post"])
def test_reports_that_are_not_there_are_a_usage_error(command: str, tmp_path: Path) -> None:
    done = comment(command, str(tmp_path / "missing"))
    assert done.returncode == 4
    assert "No such file or directory; run ci/pull-request first" in done.stderr


def test_failed_tests_are_named_and_those_left_out_are_counted(tmp_path: Path) -> None:
    (tmp_path / "steps.tsv").write_text("test\t1\t300\nbenchmarks\t1\t60\n")
    failed = "".join(f'<testcase classname="tests.t" name="n{n}"><failure/></testcase>' for n in range(22))
    (tmp_path / "test.xml").write_text(f'<testsuites><testcase classname="tests.t" name="fine"/>{failed}</testsuites>')
    (tmp_path / "benchmarks.xml").write_text(
        '<testsuites><testcase classname="b" name="last"><error/></testcase></testsuites>'
    )
    assert comment("write", str(tmp_path), "--base", "0123456789abcdef").returncode == 0
    text = (tmp_path / "comment.md").read_text()
    assert "| test | **regression** | 300 s | `ci/test` |" in text
    assert "- `tests.t::n0`" in text
    assert "- `tests.t::n19`\n- and 3 more" in text
    assert "| benchmarks | **regression** | 60 s | `ci/test tests/benchmarks` |" in text
    assert "fine" not in text


# ---------------------------------------------------------------- the action
@pytest.fixture
def action(tmp_path: Path) -> Run:
    """``ci/action`` in another repository, with a stand-in for its Python that says how it was called."""
    python = tmp_path / "python"
    python.write_text(
        '#!/usr/bin/env bash\necho "$@"\n'
        'for word in "$@"; do case $word in *.md) echo "a report" > "$word";; esac; done\n'
        "exit 1\n"
    )
    python.chmod(0o755)

    def action(**environment: str) -> subprocess.CompletedProcess[str]:
        files = {"GITHUB_OUTPUT": str(tmp_path / "output"), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
        paths = {"RUNNER_TEMP": str(tmp_path), "MEMFIX_PYTHON": str(python), **files}
        command = [str(ROOT / "ci/action")]
        return subprocess.run(
            command, cwd=tmp_path, env={**os.environ, **paths, **environment}, capture_output=True, text=True
        )

    return action


def test_the_action_runs_the_gate_and_hands_on_its_code_and_its_report(action: Run, tmp_path: Path) -> None:
    done = action(MEMFIX_ARGUMENTS="my_loss --profile dev", MEMFIX_BASE="main")
    report, data = tmp_path / "memfix-report/report.md", tmp_path / "memfix-report/report.json"
    assert done.returncode == 1
    assert done.stdout == f"-m memfix gate my_loss --profile dev --base main --md {report} --json {data}\n"
    assert (tmp_path / "output").read_text() == f"report={report}\njson={data}\nexit-code=1\n"


def test_the_action_runs_tests_and_puts_their_table_in_the_job_summary(action: Run, tmp_path: Path) -> None:
    done = action(MEMFIX_TESTS="tests/test_loss.py -q")
    assert done.returncode == 1
    assert done.stdout.startswith("-m pytest tests/test_loss.py -q --memfix-md ")
    assert (tmp_path / "summary.md").read_text() == "a report\n"


def test_the_action_without_anything_to_run_is_a_usage_error(action: Run) -> None:
    done = action(MEMFIX_ARGUMENTS="", MEMFIX_TESTS="")
    assert done.returncode == 4
    assert "give 'arguments'" in done.stderr
