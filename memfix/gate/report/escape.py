"""Escape untrusted text in Markdown and logs: names, messages and paths from the code that is judged.

GitHub acts on such text in two passes. Its Markdown parser knows emphasis, links, images, HTML and tables; filters that
run on the parsed text then find mentions, issues, commits, addresses, emoji and formulas, however these were escaped.
Neither touches a code span, so text that is not plainly harmless becomes one.
"""

from __future__ import annotations

import html
import re

_LONGEST = 1000
_PLAIN = re.compile(r"[A-Za-z0-9 _.,;:%()\[\]+=/-]*")
_ACTIVE = re.compile(
    r":\S"  # https://, :emoji:, the definition of a link
    r"|\][(\[:]"  # a link
    r"|//|www\."
    r"|\b_|_\b"  # emphasis, except within a word
    r"|[a-z]-\d"  # GH-1, or a ticket of another system
    r"|[0-9a-f]{7}",  # a commit
    re.IGNORECASE,
)


def escaped(text: str) -> str:
    """``text`` on one line, for a paragraph or a table's cell: as it is where it is harmless, else as code."""
    line = _one_line(text)
    return line if _is_plain(line) else code(line)


def code(text: str) -> str:
    """``text`` on one line as code. A bar would end a table's cell even there, so it stands between two code spans."""
    return "&#124;".join(_span(part) if part else "" for part in _one_line(text).split("|"))


def escaped_html(text: str) -> str:
    """``text`` on one line, for an HTML element that Markdown does not look into, such as a fold's summary."""
    line = _one_line(text)
    return line if _is_plain(line) else f"<code>{html.escape(line)}</code>"


def fenced(text: str) -> list[str]:
    """The lines of a code block that holds ``text``, which cannot end it."""
    fence = _longer_than_any_in(text, at_least=3)
    return [f"{fence}text", *map(_printable, text.splitlines()), fence]


def without_commands(text: str) -> str:
    """``text`` for a log of GitHub's: no line of it is one of the runner's commands, such as ``::error::``."""
    return re.sub(r"^(\s*:)(?=:)|(##)(?=\[)", r"\g<0> ", text, flags=re.MULTILINE)


def _is_plain(line: str) -> bool:
    return _PLAIN.fullmatch(line) is not None and _ACTIVE.search(line) is None


def _span(text: str) -> str:
    ticks = _longer_than_any_in(text)
    pad = " " if "`" in (text[0], text[-1]) else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"


def _longer_than_any_in(text: str, *, at_least: int = 1) -> str:
    return "`" * max([at_least, *(len(run) + 1 for run in re.findall("`+", text))])


def _one_line(text: str) -> str:
    return " ".join(_printable(text).split())[:_LONGEST]


def _printable(text: str) -> str:
    """Replace unprintable characters by spaces, such as line ends and marks that turn the direction of text."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
