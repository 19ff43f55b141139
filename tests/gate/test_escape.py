"""Text of others in Markdown: it stays on its line, in its cell and in its fence, and GitHub acts on none of it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from rendered_markdown import rendered

from memfix.checks.finding import Finding
from memfix.gate.judge import Verdict
from memfix.gate.report.escape import code, escaped, escaped_html, fenced, without_commands
from memfix.gate.report.markdown import as_markdown

HOSTILE = [
    "@everyone look", "see #1", "owner/repo#12", "GH-7", "TICKET-7", "https://evil.example", "www.evil.example",
    "[click](https://evil.example)", "[click][1]", "[1]: https://evil.example", "![x](https://evil.example/x.png)",
    "<img src=x>", "<a href=//evil.example>x</a>", "</details><h1>merged</h1>", "<!-- hidden", "a|b", "a\\|b", "|`|",
    "\\", "`", "``` x ```", "a`b``c", "` @me `", "*bold* _it_ ~~no~~", "# heading", "> [!WARNING]", ":shipit:",
    "$x$ $$y$$", "0123456789abcdef0123456789abcdef01234567", "a@b.example", "mailto:a@b.example", "&commat;me",
    "&#64;me", "\u202eevil", "one\r\n\r\n# two", "a\x85# b", "a\u2028# b", "\x00", "\ud800", "x" * 5000 + "@me",
    "$(touch x) `touch y`", "\n::set-output name=x::y",
]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["linear_cross_entropy", "loss/chunked [big, train]", "+1,024 B (+50.0 %)", "1.052x [1.048, 1.061]", "2.0x over",
     "below the lock: run memfix gate --update", "memfix gate: pass: 1 op, 2 forms", ""],
)  # fmt: skip
def test_harmless_text_stays_as_it_is(text: str) -> None:
    assert escaped(text) == escaped_html(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("@me", "`@me`"),
        ("a|b\n| c", "`a`&#124;`b `&#124;` c`"),
        ("||", "&#124;&#124;"),
        ("a`b", "``a`b``"),
        ("`x`", "`` `x` ``"),
        ("_x_", "`_x_`"),
    ],
)
def test_other_text_is_a_code_span_on_one_line(text: str, shown: str) -> None:
    assert escaped(text) == shown


def test_a_summary_is_code_too() -> None:
    assert escaped_html("<b> & @me") == "<code>&lt;b&gt; &amp; @me</code>"


def test_a_fence_is_longer_than_any_run_of_ticks_in_it() -> None:
    assert fenced("a\n````\n\x1b[31mred") == ["`````text", "a", "````", " [31mred", "`````"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\n::error::x", "a\n: :error::x"),
        ("  ::add-mask::x", "  : :add-mask::x"),
        ("x\r\n\t::stop-commands::x", "x\r\n\t: :stop-commands::x"),
        ("see ##[error]x", "see ## [error]x"),
        ("test_loss.py::test_one", "test_loss.py::test_one"),
    ],
)
def test_no_line_of_a_log_is_a_command_of_the_runner(text: str, shown: str) -> None:
    assert without_commands(text) == shown


def mixtures(number: int) -> list[str]:
    """Hostile texts cut and joined at random, always the same."""
    chance = random.Random(25)
    return ["".join(text[: chance.randint(1, 12)] for text in chance.choices(HOSTILE, k=4)) for _ in range(number)]


CONTEXTS: dict[str, tuple[Callable[[str], str], list[str]]] = {
    "paragraph": (lambda text: f"before {escaped(text)} after", ["p"]),
    "start of a line": (escaped, ["p"]),
    "bold": (lambda text: f"- **{escaped(text)}** after", ["ul", "li", "p", "strong"]),
    "cell": (lambda text: f"| a | b |\n|---|---|\n| {escaped(text)} | {code(text)} |", "table thead tr th th".split()),
    "summary": (lambda text: f"<details><summary>{escaped_html(text)}</summary>\n\nx\n\n</details>", ["details"]),
    "fence": (lambda text: "\n".join([*fenced(text), "", "after"]), ["code", "p"]),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_github_acts_on_no_hostile_text(context: str) -> None:
    place, elements = CONTEXTS[context]
    for text in filter(escaped, HOSTILE + mixtures(300)):
        page = rendered(place(text))
        allowed = {*elements, "tbody", "td", "summary", "code", "p"}
        assert page.elements[: len(elements)] == elements, text
        assert set(page.elements) <= allowed, text
        assert page.elements.count("td") in (0, 2), text
        assert page.targets == [], text
        assert page.references() == [], text


@pytest.mark.parametrize("text", HOSTILE)
def test_a_report_of_hostile_names_has_only_its_own_elements(text: str) -> None:
    finding = Finding(text, text, text, "fail", text, text, text, (text,), text, None, text, text)
    findings = (finding, Finding("law", text, text, "note", text), Finding("memory", text, text, "error", text))
    page = rendered(as_markdown(Verdict((), findings, text, (text,))))
    own = {"h3", "h4", "blockquote", "p", "table", "thead", "tbody", "tr", "th", "td", "ul", "li", "strong", "code"}
    assert set(page.elements) <= own | {"details", "summary"}
    assert page.elements.count("details") == page.elements.count("summary") == 2
    assert page.elements.count("th") == 9
    assert page.elements.count("td") == 18
    assert page.targets == []
    assert page.references() == []
