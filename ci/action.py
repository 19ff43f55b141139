"""The program of ``action.yml`` in another repository: runs ``memfix gate`` on its contracts, or its tests with pytest.

It reads environment variables: MEMFIX_ARGUMENTS (of memfix gate) or MEMFIX_TESTS (of pytest), MEMFIX_BASE (for the
gate), MEMFIX_INSTALL (what pip installs beside memfix), MEMFIX_PYTHON (an interpreter that has everything already:
nothing is installed). It uses only the standard library, and runs on any Python from 3.8 on.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

HOME = Path(__file__).resolve().parents[1]
COULD_NOT, USAGE = 2, 4


def words(text: str) -> list[str]:
    """Split ``text``, which may have several lines, as a shell does, with quotes and comments. Nothing is evaluated."""
    # a backslash at the end of a line joins it with the next
    stream = io.StringIO(re.sub(r"(\\\\)|\\\r?\n", r"\1", text))
    lexer = shlex.shlex(stream, posix=True, punctuation_chars=False)
    lexer.whitespace_split = True
    lexer.commenters = ""  # shlex would start a comment at a # inside a word; a shell does not
    found: list[str] = []
    while True:
        _skip_comments(stream)
        word = lexer.get_token()
        if word is None:
            return found
        found.append(word)


def _skip_comments(stream: io.StringIO) -> None:
    """Skip blanks and comments (to the end of their line), up to the next word."""
    while letter := stream.read(1):
        if letter == "#":
            stream.readline()
        elif not letter.isspace():
            stream.seek(stream.tell() - 1)
            return


def input_words(name: str) -> list[str]:
    try:
        return words(os.environ.get(f"MEMFIX_{name.upper()}", ""))
    except ValueError as error:
        fail(
            USAGE, f"the input '{name}' cannot be split into words: {str(error).lower()}; close it, or escape it by \\"
        )


def fail(code: int, message: str) -> NoReturn:
    print(f"ci/action: {message}", file=sys.stderr)
    sys.exit(code)


def installed(folder: Path, packages: list[str]) -> str:
    """Make a virtual environment with memfix and ``packages``; return its interpreter."""
    python = str(folder / "venv/bin/python")
    constraints = str(HOME / "ci/constraints.txt")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints]
    # torch is pinned exactly: a looser requirement would install gigabytes of CUDA packages
    venv = [sys.executable, "-m", "venv", "--clear", str(folder / "venv")]
    if any(subprocess.run(step).returncode for step in (venv, [*pip, "-r", constraints, f"{HOME}[gate]"])):
        fail(COULD_NOT, "memfix could not be installed; see what pip says above")
    if packages and subprocess.run([*pip, *packages]).returncode:
        fail(COULD_NOT, f"pip install {shlex.join(packages)} failed; see what pip says above")
    return python


def main() -> None:
    arguments, tests, install = map(input_words, ("arguments", "tests", "install"))
    base = os.environ.get("MEMFIX_BASE", "")
    if bool(arguments) == bool(tests):
        fail(USAGE, "give either 'arguments' (the ops and options of memfix gate) or 'tests' (the arguments of pytest)")
    if tests and base:
        fail(USAGE, "'base' is for memfix gate, and 'tests' runs pytest: leave one of them out")
    folder = Path(os.environ.get("RUNNER_TEMP") or tempfile.gettempdir()) / "memfix-report"
    folder.mkdir(parents=True, exist_ok=True)
    outputs = {"report": folder / "report.md", "json": folder / "report.json", "sarif": folder / "report.sarif"}
    for path in outputs.values():
        path.unlink(missing_ok=True)
    python = os.environ.get("MEMFIX_PYTHON") or installed(folder, install)
    report, data, sarif = map(str, outputs.values())
    if tests:
        command = ["pytest", *tests, "--memfix-md", report, "--memfix-json", data]
    else:
        # the gate itself writes the job summary and the annotations
        reports = ["--md", report, "--json", data, "--sarif", sarif]
        command = ["memfix", "gate", *arguments, *([f"--base={base}"] if base else []), *reports]
    code = subprocess.run([python, "-m", *command]).returncode
    code = code if code >= 0 else 128 - code  # a signal's number, as a shell gives it
    if tests and outputs["report"].is_file():
        append_to("GITHUB_STEP_SUMMARY", outputs["report"].read_text(encoding="utf-8"))
    written = {name: path for name, path in outputs.items() if path.is_file()}
    append_to("GITHUB_OUTPUT", "".join(f"{name}={value}\n" for name, value in {**written, "exit-code": code}.items()))
    sys.exit(code)


def append_to(variable: str, text: str) -> None:
    """Append to the runner's file that an environment variable names, if it is set."""
    if path := os.environ.get(variable):
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    main()
