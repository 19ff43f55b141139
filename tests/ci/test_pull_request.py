"""What the CPU job of a pull request runs, on this machine: the merge base, the steps, and their text."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from memfix.checks.finding import Finding
from memfix.gate.judge import Verdict
from memfix.gate.report import as_json
from memfix.gate.report.markdown import as_markdown

ROOT = Path(__file__).resolve().parents[2]
VERDICT = Verdict((), (Finding("equality", "loss", "chunked", "pass", "equal in 40 calls"),), "simulated")
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
    (made.root / "memfix").symlink_to(ROOT / "memfix")
    (made.root / "ci/report.json").write_text(as_json(VERDICT.as_dict()))
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
        "[ -f ci/silent ] || cp ci/report.json reports/$name.json\n"
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
    assert comment.count(as_markdown(VERDICT)) == 2
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


def test_a_step_that_left_no_report_is_said(steps: Checkout) -> None:
    (steps.root / "ci/silent").touch()
    (steps.root / "ci/bytes.code").write_text("2")
    assert steps.run("ci/pull-request", "bytes").returncode == 2
    comment = (steps.root / "reports/comment.md").read_text()
    assert "bytes left no report: the log of the run says why." in comment
    assert "| time |" not in comment


def test_a_step_or_a_base_that_is_not_there_is_a_usage_error(steps: Checkout) -> None:
    unknown = steps.run("ci/pull-request", "speed")
    assert (unknown.returncode, unknown.stderr) == (
        4, "ci/pull-request: no step speed; there are test, benchmarks, docs, bytes, time and asv\n"
    )  # fmt: skip
    assert steps.run("ci/pull-request", "--base", "no-such-ref", "test").returncode == 4
    assert not (steps.root / "reports").exists()


def test_failed_tests_are_named_and_those_left_out_are_counted(tmp_path: Path) -> None:
    (tmp_path / "steps.tsv").write_text("test\t1\t300\nbenchmarks\t1\t60\n")
    failed = "".join(f'<testcase classname="tests.t" name="n{n}"><failure/></testcase>' for n in range(22))
    (tmp_path / "test.xml").write_text(f'<testsuites><testcase classname="tests.t" name="fine"/>{failed}</testsuites>')
    (tmp_path / "benchmarks.xml").write_text(
        '<testsuites><testcase classname="b" name="last"><error/></testcase></testsuites>'
    )
    command = [sys.executable, ROOT / "ci/comment.py", "write", tmp_path, "--base", "0123456789abcdef" * 2 + "01234567"]
    assert subprocess.run(command).returncode == 0
    text = (tmp_path / "comment.md").read_text()
    assert "| test | **regression** | 300 s | `ci/test` |" in text
    assert "- `tests.t::n0`" in text
    assert "- `tests.t::n19`\n- and 3 more" in text
    assert "| benchmarks | **regression** | 60 s | `ci/test tests/benchmarks` |" in text
    assert "fine" not in text
