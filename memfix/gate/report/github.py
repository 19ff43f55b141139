"""What the gate says on GitHub: an annotation for each failure, and the table in the job summary."""

from __future__ import annotations

import os
import sys

from ..judge import Verdict
from .markdown import as_markdown


def on_github() -> bool:
    return os.environ.get("GITHUB_ACTIONS") == "true"


def announce(verdict: Verdict) -> None:
    for level, status in (("error", "fail"), ("error", "error"), ("warning", "note")):
        for finding in verdict.with_status(status):
            if status != "note" or finding.check in ("law", "lock"):
                print(
                    f"::{level} title={_property(f'memfix {finding.check}')}::{_data(finding.text())}",
                    file=sys.stderr,
                )
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        try:
            with open(summary, "a", encoding="utf-8") as file:
                file.write(as_markdown(verdict) + "\n")
        except OSError as error:  # the verdict stands without it
            print(f"memfix: no job summary at {summary}: {error.strerror}", file=sys.stderr)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
