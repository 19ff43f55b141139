"""Makes one comment on a pull request from the JSON reports of its run.

``write FOLDER`` writes ``comment.md`` in the run that judges the code, from ``ci/pull-request``'s reports or the
action's ``report.json``. ``post`` makes the same text from the run's artifact and posts it on the pull request. It runs
in a separate workflow, which has a write token and no code of the pull request. A fork's run can upload anything, so
every report is validated and printed again, nothing is unpacked to disk, and the number of the pull request comes from
GitHub. Only the standard library and memfix are used.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import urllib.parse
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

if sys.version_info < (3, 11):  # noqa: UP036 - the python3 of the machine, whatever it is
    print(f"ci/comment: needs Python 3.11 or later, python3 is {sys.version.split()[0]}", file=sys.stderr)
    sys.exit(2)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from memfix.errors import MemfixError, UsageError
from memfix.gate.judge import Verdict
from memfix.gate.report.escape import code
from memfix.gate.report.markdown import LIMIT, as_markdown
from memfix.gate.report.received import received_verdict
from memfix.gate.report.schema import MOST_BYTES, checked, parsed

MARK = "<!-- memfix pull request -->"
MOST_ZIPPED_BYTES = 32 << 20
REPORTS_LIMIT = 55_000  # GitHub refuses a comment of more than 65,536 characters
SHOWN_TESTS = 20
COMMANDS = {
    "test": "ci/test",
    "benchmarks": "ci/test tests/benchmarks",
    "docs": "ci/docs",
    "bytes": "ci/gate --base {base}",
    "time": "ci/gate --time --device cpu --base {base}",
    "asv": "ci/asv-smoke",
}
GATES = ("report", "bytes", "time")
FILES = ("steps.json", *(f"{name}.json" for name in GATES))
VERDICTS = {0: "pass", 1: "regression", 2: "could not measure", 4: "usage"}


@dataclass(frozen=True)
class Step:
    """The result of one step of ``ci/pull-request``."""

    name: Literal["test", "benchmarks", "docs", "bytes", "time", "asv"]
    exit_code: int
    seconds: int
    failed_tests: tuple[str, ...] = ()


@dataclass(frozen=True)
class Steps:
    """The results of all steps, and the commit with which they compare."""

    base: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Run:
    """A completed workflow run, as GitHub describes it."""

    repository: str
    number: int
    commit: str
    branch: str
    head_repository: str

    @classmethod
    def of_event(cls, event: Mapping[str, Any]) -> Run:
        run = event["workflow_run"]
        head = (run["head_repository"] or {}).get("full_name", "")  # a fork can be deleted
        return cls(event["repository"]["full_name"], run["id"], run["head_sha"], run["head_branch"] or "", head)

    def described(self) -> str:
        server = os.environ.get("GITHUB_SERVER_URL") or "https://github.com"
        link = f"[workflow run {self.number}]({server}/{self.repository}/actions/runs/{self.number})"
        if self.head_repository == self.repository:
            return f"From {link} at {code(self.commit)}."
        head = f"{code(self.head_repository)}, branch {code(self.branch)}, at {code(self.commit)}"
        claim = "The fork's code wrote this report. It is its author's claim until a maintainer has run it."
        return f"From a fork's own {link}: {head}. {claim}"


# ---------------------------------------------------------------- the text
def gathered(folder: Path, base: str) -> Steps:
    """Return the steps that ``ci/pull-request`` ran, with the tests that failed in them."""
    rows = [line.split("\t") for line in (folder / "steps.tsv").read_text(encoding="utf-8").splitlines()]
    steps = (Step(name, int(ended), int(took), _failed_tests(folder / f"{name}.xml")) for name, ended, took in rows)
    return Steps(base, tuple(steps))


def _failed_tests(report: Path) -> tuple[str, ...]:
    try:
        cases = ElementTree.parse(report).iter("testcase")
    except (OSError, ElementTree.ParseError):
        return ()
    broken = (case for case in cases if case.find("failure") is not None or case.find("error") is not None)
    return tuple(f"{case.get('classname', '')}::{case.get('name', '')}" for case in broken)


def text_of(files: Mapping[str, bytes], run: Run | None) -> str:
    """Return the comment: the verdict, the run and its commit, one row per step, then the reports of the gates."""
    steps = _received(files, "steps.json", _steps) if "steps.json" in files else None
    verdicts = {name: _received(files, f"{name}.json", received_verdict) for name in GATES if f"{name}.json" in files}
    ends = {one.exit_code for one in (*(steps.steps if steps else ()), *verdicts.values())}
    worst = next((end for end in (4, 1) if end in ends), 2 if ends - {0} else 0)
    lines = [f"## memfix: {VERDICTS[worst]}", "", *([run.described(), ""] if run else [])]
    lines += _steps_table(steps, verdicts) if steps else []
    limit = min(LIMIT, REPORTS_LIMIT // max(len(verdicts), 1))
    return "\n".join([*lines, *(as_markdown(verdict, limit=limit) + "\n" for verdict in verdicts.values())])


def _received(files: Mapping[str, bytes], name: str, read: Callable[[Any], Any]) -> Any:
    try:
        return read(parsed(files[name]))
    except UsageError as error:
        raise UsageError(f"{name} is refused: {error}") from None


def _steps(data: Any) -> Steps:
    steps = checked(data, Steps)
    if not re.fullmatch("[0-9a-f]{40}", steps.base):
        raise UsageError(f"base must be a commit, got {steps.base[:40]!r}")
    if len(steps.steps) > len(COMMANDS):
        raise UsageError(f"steps must be at most {len(COMMANDS)}, got {len(steps.steps):,}")
    return steps


def _steps_table(steps: Steps, verdicts: Mapping[str, Verdict]) -> list[str]:
    lines = [f"Against {code(steps.base[:12])}.", "", "| step | verdict | took | on a laptop |", "|---|---|---:|---|"]
    for step in steps.steps:
        verdict = VERDICTS.get(step.exit_code, f"exit {step.exit_code}")
        word = f"**{verdict}**" if step.exit_code else verdict
        command = COMMANDS[step.name].format(base=steps.base[:12])
        lines.append(f"| {step.name} | {word} | {step.seconds} s | `{command}` |")
    silent = [step.name for step in steps.steps if step.exit_code and step.name in GATES and step.name not in verdicts]
    lines += [line for name in silent for line in ("", f"{name} left no report: the log of the run says why.")]
    failed = [name for step in steps.steps for name in step.failed_tests]
    if failed:
        lines += ["", "#### Failed tests", "", *(f"- {code(name[:200])}" for name in failed[:SHOWN_TESTS])]
        lines += [f"- and {len(failed) - SHOWN_TESTS} more"] if len(failed) > SHOWN_TESTS else []
    return [*lines, ""]


# ---------------------------------------------------------------- GitHub
class GitHub:
    """The GitHub API calls that are needed, through ``gh``."""

    def __init__(self, repository: str) -> None:
        self._repository = repository

    def get(self, path: str, **query: str) -> Any:
        return json.loads(self._call("GET", f"{path}?{urllib.parse.urlencode(query)}"))

    def download(self, path: str) -> bytes:
        return self._call("GET", path)

    def send(self, method: str, path: str, data: dict[str, str]) -> None:
        self._call(method, path, data)

    def _call(self, method: str, path: str, data: dict[str, str] | None = None) -> bytes:
        command = ["gh", "api", "--method", method, f"repos/{self._repository}/{path}"]
        if data is not None:
            command += ["--input", "-"]
        try:
            sent = json.dumps(data).encode() if data else None
            return subprocess.run(command, input=sent, capture_output=True, check=True).stdout
        except FileNotFoundError:
            raise MemfixError("posting needs GitHub's command line, gh, and there is none on the PATH") from None
        except subprocess.CalledProcessError as error:
            said = " ".join(error.stderr.decode("utf-8", "replace").split())
            raise MemfixError(f"{' '.join(command[:5])}: {said}") from None


def artifact_files(github: GitHub, run: int, name: str) -> dict[str, bytes]:
    """Return the reports in the newest artifact of that name. They are read from the zip file in memory."""
    found = github.get(f"actions/runs/{run}/artifacts", name=name, per_page="100")["artifacts"]
    if not found:
        raise MemfixError(f"workflow run {run} kept no artifact {name}; upload the action's output json by that name")
    newest = max(found, key=lambda artifact: artifact["id"])
    if newest["size_in_bytes"] > MOST_ZIPPED_BYTES:
        raise UsageError(f"the artifact {name} must have at most {MOST_ZIPPED_BYTES:,} bytes, and has more")
    content = github.download(f"actions/artifacts/{newest['id']}/zip")
    files = {}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for member in set(FILES) & set(archive.namelist()):
                with archive.open(member) as file:
                    files[member] = file.read(MOST_BYTES + 1)  # one byte over the limit, so that parsed() refuses it
    except Exception as error:  # zipfile raises many kinds of errors for a forged file
        raise UsageError(f"the artifact {name} is no zip file that can be read: {str(error)[:100]!r}") from None
    if not files:
        raise UsageError(f"the artifact {name} has none of {', '.join(FILES)}; upload the action's output json")
    return files


def pull_request(github: GitHub, run: Run) -> int | None:
    """Return the open pull request that is at this commit now. GitHub does not name it in the run of a fork."""
    head = f"{run.head_repository.split('/')[0]}:{run.branch}"
    found = github.get("pulls", state="open", head=head, per_page="100")
    return next((pull["number"] for pull in found if pull["head"]["sha"] == run.commit), None)


def own_comment(github: GitHub, number: int) -> int | None:
    """Return the comment of an earlier run. Anybody can write the mark, so the author must be a bot."""
    page = 1
    while comments := github.get(f"issues/{number}/comments", per_page="100", page=str(page)):
        for comment in comments:
            if comment["user"]["type"] == "Bot" and comment["body"].startswith(MARK):
                return comment["id"]
        page += 1
    return None


def post(run: Run, artifact: str) -> str:
    github = GitHub(run.repository)
    number = pull_request(github, run)
    if number is None:
        return f"no open pull request is at {run.commit}: it has moved on, or is closed; nothing is posted"
    body = f"{MARK}\n{text_of(artifact_files(github, run.number, artifact), run)}"
    comment = own_comment(github, number)
    if comment is None:
        github.send("POST", f"issues/{number}/comments", {"body": body})
        return f"commented on pull request {number}"
    github.send("PATCH", f"issues/comments/{comment}", {"body": body})
    return f"updated the comment on pull request {number}"


# ---------------------------------------------------------------- the command
def write(folder: Path, base: str) -> None:
    """Write ``comment.md`` from a folder of reports, with the same checks as for posting."""
    try:
        if base:
            (folder / "steps.json").write_text(json.dumps(asdict(gathered(folder, base))), encoding="utf-8")
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name in FILES}
        (folder / "comment.md").write_text(text_of(files, None) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}; run ci/pull-request first") from None


def triggering_run() -> Run:
    path = os.environ.get("GITHUB_EVENT_PATH")
    if not path:
        raise UsageError("posting needs GITHUB_EVENT_PATH, as in a workflow; ci/comment write makes the text anywhere")
    event = json.loads(Path(path).read_text(encoding="utf-8"))
    if "workflow_run" not in event:
        raise UsageError("posting needs the event workflow_run: another one's job may run a pull request's own code")
    return Run.of_event(event)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="ci/comment", description="The reports of a pull request's run as one comment."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="make comment.md of a folder of reports")
    writing.add_argument("folder", type=Path)
    writing.add_argument("--base", default="", help="the commit that ci/pull-request compared with")
    posting = commands.add_parser("post", help="put it on the pull request of the run that GITHUB_EVENT_PATH names")
    posting.add_argument("--artifact", default="memfix-report", help="the run's artifact")
    arguments = parser.parse_args()
    try:
        if arguments.command == "write":
            write(arguments.folder, arguments.base)
        else:
            print(f"ci/comment: {post(triggering_run(), arguments.artifact)}")
    except MemfixError as error:
        print(f"ci/comment: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
