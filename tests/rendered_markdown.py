"""Markdown as GitHub shows it: its elements, and the prose in which mentions and references are found."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

from markdown_it import MarkdownIt

# what GitHub's filters look for in prose: mentions, issues, commits, addresses, emoji, formulas
REFERENCE = re.compile(
    r"@\w|#\d|\bgh-\d|\b[a-z]+-\d|\b[0-9a-f]{7,40}\b|://|www\.|:[\w+-]+:|\$\S|\S@\S|mailto:", re.IGNORECASE
)
_PARSER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


@dataclass
class Rendered:
    """Names of the elements in order, where links and images lead, and the text outside of code."""

    elements: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    prose: list[str] = field(default_factory=list)

    def references(self) -> list[str]:
        return [text for text in self.prose if REFERENCE.search(text)]


class _Html(HTMLParser):
    def __init__(self, rendered: Rendered) -> None:
        super().__init__()
        self._rendered, self._in_code = rendered, False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._rendered.elements.append(tag)
        self._rendered.targets += [value or "" for name, value in attrs if name not in ("open",)]
        self._in_code |= tag == "code"

    def handle_endtag(self, tag: str) -> None:
        self._in_code &= tag != "code"

    def handle_data(self, data: str) -> None:
        if not self._in_code and data.strip():
            self._rendered.prose.append(data)


def rendered(markdown: str) -> Rendered:
    page = Rendered()
    inside = _Html(page)
    for block in _PARSER.parse(markdown):
        if block.type == "html_block":
            inside.feed(block.content)
        elif block.nesting == 1 or block.type in ("fence", "hr", "code_block"):
            page.elements.append(block.tag)
        for token in block.children or ():
            if token.type == "html_inline":
                inside.feed(token.content)
            elif token.type == "image" or token.nesting == 1:
                page.elements.append(token.tag)
                page.targets += [str(token.attrs[name]) for name in ("href", "src") if name in token.attrs]
            elif token.type == "text" and token.content.strip():
                page.prose.append(token.content)
    return page
