"""The reports of ``ci/pull-request`` as one comment on the pull request.

``write FOLDER`` makes ``comment.md`` of the folder's reports, beside the code that is judged. ``post FILE`` puts it on
the pull request, in a workflow of its own that has a token and runs no code of a fork: it takes the file for text,
and learns from GitHub which pull request it belongs to. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import urllib.parse
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

MARK = "<!-- memfix pull request -->"
LIMIT = 65_000  # GitHub refuses a comment of more than 65,536 characters
SHOWN_TESTS = 20
COMMANDS = {
    "test": "ci/test",
    "benchmarks": "ci/test tests/benchmarks",
    "bytes": "ci/gate --base {base}",
    "time": "ci/gate --time --device cpu --base {base}",
    "asv": "ci/asv-smoke",
}
VERDICTS = {0: "pass", 1: "regression", 2: "could not measure", 4: "usage"}


def written(folder: Path, base: str) -> str:
    """Verdict, one row a step, then what the steps say themselves."""
    steps = [line.split("\t") for line in (folder / "steps.tsv").read_text(encoding="utf-8").splitlines()]
    codes = {int(code) for _, code, _ in steps}
    worst = next((code for code in (4, 1) if code in codes), 2 if codes - {0} else 0)
    lines = [f"## memfix: {VERDICTS[worst]}", "", f"Against `{base[:12]}`.", ""]
    lines += ["| step | verdict | took | on a laptop |", "|---|---|---:|---|"]
    for name, code, seconds in steps:
        verdict = VERDICTS.get(int(code), f"exit {code}")
        command = COMMANDS.get(name, f"ci/pull-request {name}").format(base=base[:12])
        lines.append(f"| {name} | {verdict if code == '0' else f'**{verdict}**'} | {int(seconds)} s | `{command}` |")
    failed = [name for step in ("test", "benchmarks") for name in _failed_tests(folder / f"{step}.xml")]
    if failed:
        lines += ["", "#### Failed tests", "", *(f"- `{name}`" for name in failed[:SHOWN_TESTS])]
        lines += [f"- and {len(failed) - SHOWN_TESTS} more"] if len(failed) > SHOWN_TESTS else []
    ran = {name: code for name, code, _ in steps}
    for name in ("bytes", "time"):
        report = folder / f"{name}.md"
        if report.is_file():
            lines += ["", report.read_text(encoding="utf-8").rstrip()]
        elif ran.get(name, "0") != "0":
            lines += ["", f"### {name}: no report", "", *_tail(folder / f"{name}.log")]
    if ran.get("asv", "0") != "0":
        lines += ["", "### asv", "", *_tail(folder / "asv.log")]
    return "\n".join(lines)


def _failed_tests(report: Path) -> list[str]:
    try:
        cases = ElementTree.parse(report).iter("testcase")
    except (OSError, ElementTree.ParseError):
        return []
    broken = (case for case in cases if case.find("failure") is not None or case.find("error") is not None)
    return [f"{case.get('classname', '')}::{case.get('name', '')}" for case in broken]


def _tail(log: Path, lines: int = 15) -> list[str]:
    text = log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:] if log.is_file() else []
    return ["```text", *(line.replace("```", "'''") for line in text), "```"] if text else []


def cut(text: str) -> str:
    """As much as a comment holds, and how much that leaves out."""
    body = f"{MARK}\n{text}"
    if len(body) <= LIMIT:
        return body
    kept = body[: LIMIT - 200].rsplit("\n", 1)[0]
    folds = "\n</details>" * (kept.count("<details") - kept.count("</details>"))
    fence = "\n```" if kept.count("\n```") % 2 else ""
    return f"{kept}{fence}{folds}\n\n_{len(body) - len(kept):,} more characters left out: the run's artifact has them._"


class GitHub:
    """The few calls that are needed, through ``gh``."""

    def __init__(self, repository: str) -> None:
        self._repository = repository

    def get(self, path: str, **query: str) -> Any:
        return self._call("GET", f"{path}?{urllib.parse.urlencode(query)}")

    def send(self, method: str, path: str, data: dict[str, str]) -> Any:
        return self._call(method, path, data)

    def _call(self, method: str, path: str, data: dict[str, str] | None = None) -> Any:
        command = ["gh", "api", "--method", method, f"repos/{self._repository}/{path}"]
        if data is not None:
            command += ["--input", "-"]
        try:
            done = subprocess.run(
                command, input=json.dumps(data) if data else None, capture_output=True, encoding="utf-8", check=True
            )
        except FileNotFoundError:
            sys.exit("ci/comment: posting needs GitHub's command line, gh; --dry-run does not")
        except subprocess.CalledProcessError as error:
            sys.exit(f"ci/comment: {' '.join(command[:5])}: {error.stderr.strip()}")
        return json.loads(done.stdout)


def pull_request(github: GitHub, owner: str, branch: str, commit: str) -> int | None:
    """The open pull request that is at this commit now. A run of a fork does not name its pull request."""
    found = github.get("pulls", state="open", head=f"{owner}:{branch}", per_page="100")
    return next((pull["number"] for pull in found if pull["head"]["sha"] == commit), None)


def own_comment(github: GitHub, number: int) -> int | None:
    """The comment that an earlier run left. Anybody can write the mark, so it must be a bot's."""
    page = 1
    while comments := github.get(f"issues/{number}/comments", per_page="100", page=str(page)):
        for comment in comments:
            if comment["user"]["type"] == "Bot" and comment["body"].startswith(MARK):
                return comment["id"]
        page += 1
    return None


def post(body: str, *, repository: str, owner: str, branch: str, commit: str) -> str:
    github = GitHub(repository)
    number = pull_request(github, owner, branch, commit)
    if number is None:
        return f"no open pull request is at {commit}: it has moved on, or is closed; nothing is posted"
    comment = own_comment(github, number)
    if comment is None:
        github.send("POST", f"issues/{number}/comments", {"body": body})
        return f"commented on pull request {number}"
    github.send("PATCH", f"issues/comments/{comment}", {"body": body})
    return f"updated the comment on pull request {number}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="ci/comment", description="The reports of ci/pull-request as one comment.")
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write", help="make comment.md of a folder of reports")
    write.add_argument("folder", type=Path)
    write.add_argument("--base", default="", help="the commit that was compared with")
    send = commands.add_parser("post", help="put it on the pull request; HEAD_OWNER, HEAD_BRANCH, HEAD_SHA say which")
    send.add_argument("file", type=Path)
    send.add_argument("--dry-run", action="store_true", help="print it instead")
    arguments = parser.parse_args()
    try:
        if arguments.command == "write":
            text = written(arguments.folder, arguments.base)
            (arguments.folder / "comment.md").write_text(text + "\n", encoding="utf-8")
            return
        body = cut(arguments.file.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        print(f"ci/comment: cannot read {error.filename}: {error.strerror}; run ci/pull-request first", file=sys.stderr)
        sys.exit(4)
    if arguments.dry_run:
        print(body)
        return
    names = ("GITHUB_REPOSITORY", "HEAD_OWNER", "HEAD_BRANCH", "HEAD_SHA")
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        print(f"ci/comment: posting needs {', '.join(missing)}; --dry-run does not", file=sys.stderr)
        sys.exit(4)
    repository, owner, branch, commit = (os.environ[name] for name in names)
    print(f"ci/comment: {post(body, repository=repository, owner=owner, branch=branch, commit=commit)}")


if __name__ == "__main__":
    main()
