"""The code on the pages of the manual: finds its blocks, and checks command lines without running them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import click

from memfix.cli import cli
from memfix.pytest_plugin import _FLAGS, _OPTIONS

ROOT = Path(__file__).resolve().parents[1]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))
]}  # fmt: skip
_BLOCK = re.compile(r"(?:^<!-- file: (?P<file>\S+) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.S | re.M)
_INLINE = re.compile(r"`((?:memfix|ci/[\w-]+) [^`\n]+)`")
_TOOLS = {"pip", "git", "pytest", "asv", "python", "python3"}
_ELSEWHERE = {"--benchmark-only", "--quick", "-e", "--bench", "-m", "-k", "-q", "-n"}
"""Options of other people's tools on our pages."""


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    file: str | None
    """The file of the reader that the block is."""


def blocks(page: str, *languages: str) -> list[Block]:
    found = [Block(match["language"], match["text"], match["file"]) for match in _BLOCK.finditer(PAGES[page])]
    return [block for block in found if block.language in languages]


def command_lines(page: str) -> list[str]:
    """The command lines in the blocks of a page, to be pasted."""
    return [line[2:] for block in blocks(page, "console") for line in block.text.splitlines() if line.startswith("$ ")]


def commands_in_prose(page: str) -> list[str]:
    """Commands that the text of a page speaks of: ``memfix fit INCIDENT [--over section.key]``."""
    return [match[1].replace("\\|", "|") for match in _INLINE.finditer(_BLOCK.sub("", PAGES[page]))]


def fault_of(line: str, *, whole: bool = True) -> str | None:
    """What is wrong with a command line: a command or an option that does not exist, or if it is ``whole`` a value."""
    words = [word for word in shlex.split(line, comments=True) if word not in "[]"]
    while words and re.fullmatch(r"\w+=\S*", words[0]):
        del words[0]
    name, arguments = Path(words[0]).name, [word.strip("[]") for word in words[1:]]
    if words[0].startswith("ci/"):
        script = ROOT / words[0]
        if not script.is_file():
            return f"there is no {words[0]}"
        forwarded = {"gate": ["gate", *arguments], "test": None}.get(name, [])
        if forwarded:
            return _fault_of_memfix(forwarded, whole)
        if forwarded is None:
            return _unknown(arguments, pytest_options(), "ci/test")
        return next((f"{words[0]} has no {o}" for o in _options(arguments) if o not in script.read_text()), None)
    if name == "memfix":
        return _fault_of_memfix(arguments, whole)
    if name not in _TOOLS:
        return f"{words[0]} is no command that the manual may use; see tests/snippets.py"
    if name == "pytest":
        return _unknown(arguments, pytest_options(), "pytest")
    if arguments[:1] == ["-m"] and arguments[1].startswith("benchmarks."):
        module = ROOT.joinpath(*arguments[1].split(".")).with_suffix(".py")
        if not module.is_file():
            return f"there is no module {arguments[1]}"
        return next(
            (f"{arguments[1]} has no {o}" for o in _options(arguments[2:]) if o not in module.read_text()), None
        )
    return None


def _fault_of_memfix(arguments: list[str], whole: bool) -> str | None:
    command = cli.commands.get(arguments[0])
    if command is None:
        return None if arguments[0] in ("--version", "--help") else f"memfix has no command {arguments[0]}"
    known = {"-h", "--help"}
    for parameter in command.params:
        known |= {*parameter.opts, *parameter.secondary_opts}
    if unknown := _unknown(arguments, known, f"memfix {arguments[0]}"):
        return unknown
    if not whole:
        return None
    try:
        with command.make_context(arguments[0], arguments[1:]):
            pass  # what an option sets ends with its context
    except click.ClickException as error:
        return error.format_message()
    return None


def _unknown(arguments: list[str], known: set[str], command: str) -> str | None:
    return next((f"{command} has no option {o}" for o in _options(arguments) if o not in known), None)


def _options(arguments: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in arguments if re.match(r"--?[a-z]", word)]


def pytest_options() -> set[str]:
    return {f"--memfix-{name}" for name in (*_OPTIONS, *_FLAGS)} | _ELSEWHERE
