"""The comment on a pull request: played as a workflow, with artifacts that a fork's run is free to make up."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from actions_runner import ROOT, Ended, Runner
from ci_script import ci_script
from fake_github import REPOSITORY, FakeGitHub
from rendered_markdown import rendered

from memfix.checks.finding import Finding
from memfix.errors import MemfixError, UsageError
from memfix.gate.judge import Verdict
from memfix.gate.report import as_json
from memfix.gate.report.markdown import as_markdown

MARK = "<!-- memfix pull request -->"
COMMIT, BASE = "0123456789" * 4, "fedcba9876" * 4
BRANCH = "fix&state=all-$(touch pwned)-@everyone-`x`-[a](https://evil.example)"
PULL = {"number": 7, "head": {"sha": COMMIT}}
WORKFLOW = (ROOT / ".github/workflows/comment.yml").read_text(encoding="utf-8")
HOSTILE = "@everyone #1 [x](https://evil.example) ![y](//evil.example) <img src=z> </details>\n\n# merged\n::error::x"
VERDICT = Verdict((), (Finding("budget", "loss", "chunked", "fail", "peak 2.00 KiB, budget 1.00 KiB"),), "simulated")


def event(head: str = "someone/lab", branch: str = BRANCH, **more: Any) -> dict[str, Any]:
    """The payload that GitHub sends when a run is over."""
    run = {
        "id": 4242, "event": "pull_request", "conclusion": "failure", "head_sha": COMMIT, "head_branch": branch,
        "display_title": "$(touch pwned) ${{ github.token }}\n::error::x", "head_repository": {"full_name": head},
    }  # fmt: skip
    return {"workflow_run": run | more, "repository": {"full_name": REPOSITORY}}


def archive(members: dict[str, bytes | str]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as made:
        for name, text in members.items():
            made.writestr(name, text)
    return content.getvalue()


def report(verdict: Verdict) -> str:
    return as_json(verdict.as_dict())


def play(folder: Path, artifact: bytes | None, *, payload: Any = None, **state: Any) -> tuple[Ended, FakeGitHub]:
    """The workflow that comments, for a run that kept this artifact."""
    github = FakeGitHub(folder / "github")
    artifacts = {} if artifact is None else {"memfix-report": artifact}
    path = github.install(**{"pulls": [PULL], "artifacts": artifacts, **state})
    runner = Runner(folder, payload or event(), path=path, environment={"MEMFIX_PYTHON": sys.executable})
    ended = runner.play_job(WORKFLOW)
    assert ended is not None
    assert not list(folder.rglob("pwned"))
    return ended, github


# ---------------------------------------------------------------- played as a workflow
def test_a_forks_report_is_printed_anew_and_the_comment_says_whose_run_it_is(tmp_path: Path) -> None:
    planted = {"id": 1, "user": {"type": "User"}, "body": f"{MARK}\nplanted"}
    artifact = archive({"report.json": report(VERDICT), "comment.md": "forged", "report.md": "forged"})
    ended, github = play(tmp_path, artifact, comments=[planted])
    assert ended.succeeded
    assert ended.log == "ci/comment: commented on pull request 7\n"
    head, whose, *rest = github.body().removeprefix(f"{MARK}\n").split("\n\n")
    assert head == "## memfix: regression"
    assert whose == (
        "From a fork's own [workflow run 4242](https://github.com/owner/lab/actions/runs/4242): `someone/lab`, branch "
        f"``{BRANCH}``, at `{COMMIT}`. The fork's code wrote this report. "
        "It is its author's claim until a maintainer has run it."
    )
    assert "\n\n".join(rest).rstrip() == as_markdown(VERDICT).rstrip()
    assert github.writes()[0][:2] == ["POST", f"repos/{REPOSITORY}/issues/7/comments"]
    asked = github.calls()[0][1]
    assert "&head=someone%3Afix%26state%3Dall-%24%28touch" in asked, "a branch's name is one value of the query"


def test_a_run_of_the_repository_itself_is_not_called_a_forks(tmp_path: Path) -> None:
    _, github = play(tmp_path, archive({"report.json": report(VERDICT)}), payload=event(REPOSITORY, "mine"))
    said = f"From [workflow run 4242](https://github.com/owner/lab/actions/runs/4242) at `{COMMIT}`.\n"
    assert said in github.body()


def test_a_later_run_updates_its_comment_on_whichever_page_it_is(tmp_path: Path) -> None:
    bodies = [("User", "looks good"), ("Bot", "another bot's"), ("User", MARK), ("Bot", f"{MARK}\nold")]
    comments = [{"id": n, "user": {"type": kind}, "body": body} for n, (kind, body) in enumerate(bodies)]
    ended, github = play(tmp_path, archive({"report.json": report(VERDICT)}), comments=comments)
    assert ended.log == "ci/comment: updated the comment on pull request 7\n"
    assert [call[:2] for call in github.writes()] == [["PATCH", f"repos/{REPOSITORY}/issues/comments/3"]]


def test_nothing_is_posted_on_a_pull_request_that_has_moved_on(tmp_path: Path) -> None:
    ended, github = play(tmp_path, None, pulls=[{"number": 7, "head": {"sha": "newer"}}])
    assert ended.succeeded
    assert ended.log.startswith(f"ci/comment: no open pull request is at {COMMIT}")
    assert github.writes() == []


def test_a_report_that_is_refused_is_one_line_in_the_log_and_no_command_of_the_runner(tmp_path: Path) -> None:
    data = VERDICT.as_dict() | {"\n::error file=x::y\n": 1}
    ended, github = play(tmp_path, archive({"report.json": json.dumps(data)}))
    assert not ended.succeeded
    assert ended.log.startswith("ci/comment: report.json is refused: it has the unknown key '\\n::error file")
    assert ended.log.count("\n") == 1
    assert ended.commands == []
    assert github.writes() == []


@pytest.mark.parametrize("more", [{"event": "push"}, {"conclusion": "cancelled"}], ids=["push", "cancelled"])
def test_other_runs_are_not_commented_on(more: dict[str, str], tmp_path: Path) -> None:
    assert Runner(tmp_path, event(**more)).play_job(WORKFLOW) is None


# ---------------------------------------------------------------- artifacts
@pytest.fixture(scope="module")
def comment() -> ModuleType:
    return ci_script("comment")


@pytest.fixture
def posted(comment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is posted of an artifact, without a process."""

    def posted(artifact: bytes) -> str:
        github = FakeGitHub(tmp_path / "github")
        github.install(pulls=[PULL], artifacts={"memfix-report": artifact})
        monkeypatch.setattr(
            comment.GitHub, "_call",
            lambda _, method, path, data=None: github.answer(method, f"repos/{REPOSITORY}/{path}", data),
        )  # fmt: skip
        monkeypatch.chdir(tmp_path)
        before = sorted(tmp_path.rglob("*"))
        try:
            comment.post(comment.Run.of_event(event()), "memfix-report")
        finally:
            assert [path for path in sorted(tmp_path.rglob("*")) if path.name != "calls.jsonl"] == before
        return github.body()

    return posted


def symlink(target: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as made:
        link = zipfile.ZipInfo("report.json")
        link.create_system, link.external_attr = 3, 0o120777 << 16
        made.writestr(link, target)
    return content.getvalue()


def broken(compression: int) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", compression) as made:
        made.writestr("report.json", "{}" * 1000)
    data = bytearray(content.getvalue())
    data[45:55] = b"\xff" * 10
    return bytes(data)


def encrypted() -> bytes:
    content = bytearray(archive({"report.json": "{}"}))
    content[6] |= 1
    content[content.index(b"PK\x01\x02") + 8] |= 1
    return bytes(content)


STEP = {"name": "test", "exit_code": 1, "seconds": 3, "failed_tests": [HOSTILE]}
STEPS = {"base": BASE, "steps": [STEP]}


@pytest.mark.parametrize(
    ("artifact", "message"),
    [
        (archive({"comment.md": "forged"}), "the artifact memfix-report has none of steps.json, report.json, "),
        (archive({"../report.json": "{}", "/report.json": "{}"}), "the artifact memfix-report has none of steps"),
        (symlink("/etc/passwd"), "report.json is refused: it must be JSON: "),
        (archive({"report.json": b" " * 10_000_000}), "report.json is refused: it must have at most 8,388,608 b"),
        (archive({"report.json": b'{"meter": "\xff\xfe"}'}), "report.json is refused: it must be UTF-8, and byte 11 "),
        (archive({"report.json": '"## merged"'}), "report.json is refused: it must be an object, got '## merged'"),
        (b"no zip", "the artifact memfix-report is no zip file that can be read: 'File is not a zip file'"),
        (archive({"report.json": "{}"})[:-30], "the artifact memfix-report is no zip file that can be read: "),
        (encrypted(), "the artifact memfix-report is no zip file that can be read: "),
        (broken(zipfile.ZIP_DEFLATED), "the artifact memfix-report is no zip file that can be read: "),
        (broken(zipfile.ZIP_LZMA), "the artifact memfix-report is no zip file that can be read: "),
        (archive({"steps.json": json.dumps(STEPS | {"steps": [STEP] * 9000})}), "steps.json is refused: steps must be"),
        (archive({"steps.json": json.dumps(STEPS | {"base": "x; rm -rf ~"})}), "steps.json is refused: base must be "),
        (
            archive({"steps.json": json.dumps(STEPS | {"steps": [STEP | {"name": "@me"}]})}),
            "steps.json is refused: steps[0].name must be one of test, benchmarks, docs, bytes, time, asv, got '@me'",
        ),
    ],
    ids="text paths symlink 10-MB UTF-8 no-object no-zip cut encrypted deflate lzma steps base step".split(),
)  # fmt: skip
def test_a_forged_artifact_is_refused_in_one_sentence(posted: Any, artifact: bytes, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        posted(artifact)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_an_artifact_that_is_too_large_is_not_downloaded(comment: ModuleType, tmp_path: Path) -> None:
    class Large:
        def get(self, path: str, **query: str) -> Any:
            return {"artifacts": [{"id": 1, "size_in_bytes": 33 << 20}]}

    with pytest.raises(UsageError, match="memfix-report must have at most 33,554,432 bytes, and has more"):
        comment.artifact_files(Large(), 4242, "memfix-report")


def test_a_run_without_a_report_is_said(comment: ModuleType) -> None:
    class Empty:
        def get(self, path: str, **query: str) -> Any:
            return {"artifacts": []}

    with pytest.raises(MemfixError, match="workflow run 4242 kept no artifact memfix-report; upload the"):
        comment.artifact_files(Empty(), 4242, "memfix-report")


def test_no_text_of_a_fork_becomes_a_mention_a_link_an_image_or_html(posted: Any) -> None:
    finding = Finding("lock", HOSTILE, HOSTILE, "fail", HOSTILE, HOSTILE, HOSTILE, (HOSTILE,), HOSTILE, None, HOSTILE)
    law = Finding("law", HOSTILE, HOSTILE, "note", HOSTILE)
    hostile = report(Verdict((), (finding, law), HOSTILE, (HOSTILE,)))
    body = posted(archive({"steps.json": json.dumps(STEPS), "bytes.json": hostile, "time.json": hostile}))
    page = rendered(body)
    assert page.targets == ["https://github.com/owner/lab/actions/runs/4242"], "the only link is to the run"
    assert page.references() == []
    assert not {"img", "h1"} & set(page.elements)
    assert page.elements.count("details") == page.elements.count("summary") == 2
    assert "evil" in body, "it is shown, as code"


def test_a_large_report_stays_within_a_comment(posted: Any) -> None:
    many = tuple(
        Finding("lock", f"op{n}", "form", "fail", "@me " * 400, "case", "train", ("x" * 500,)) for n in range(300)
    )
    large = report(Verdict((), many, "simulated", ("note " * 100,) * 300))
    steps = STEPS | {"steps": [STEP | {"failed_tests": ["|" * 5000] * 200}]}
    members = {"steps.json": json.dumps(steps), "bytes.json": large, "time.json": large, "report.json": large}
    body = posted(archive(members))
    assert len(body) < 65_536
    assert body.count("<details") == body.count("</details>")
    assert "more changed rows left out here" in body


# ---------------------------------------------------------------- the command
def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # -S: the job that posts installs nothing
    command = [sys.executable, "-S", str(ROOT / "ci/comment.py"), *arguments]
    return subprocess.run(command, env={"PATH": "/nowhere", **environment}, capture_output=True, text=True)


def test_on_a_laptop_the_text_is_written(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(report(VERDICT))
    assert run("write", str(tmp_path)).returncode == 0
    assert (tmp_path / "comment.md").read_text() == f"## memfix: regression\n\n{as_markdown(VERDICT)}\n\n"


@pytest.mark.parametrize(
    ("payload", "code", "message"),
    [
        (None, 4, "posting needs GITHUB_EVENT_PATH, as in a workflow; ci/comment write makes the text anywhere"),
        (
            {"pull_request": {}},
            4,
            "posting needs the event workflow_run: another one's job may run a pull re",
        ),
        (event(), 2, "posting needs GitHub's command line, gh, and there is none on the PATH"),
    ],
)
def test_what_posting_needs_is_said(payload: Any, code: int, message: str, tmp_path: Path) -> None:
    (tmp_path / "event.json").write_text(json.dumps(payload))
    given = {"GITHUB_EVENT_PATH": str(tmp_path / "event.json")} if payload else {}
    done = run("post", **given)
    assert done.returncode == code
    assert done.stderr.startswith(f"ci/comment: {message}")


def test_reports_that_are_not_there_are_a_usage_error(tmp_path: Path) -> None:
    done = run("write", str(tmp_path / "missing"), "--base", BASE)
    assert done.returncode == 4
    assert "No such file or directory; run ci/pull-request first" in done.stderr
