"""The verdict as JUnit XML for CI systems: one test case for each finding."""

from __future__ import annotations

from xml.etree import ElementTree

from ..judge import Verdict


def as_junit(verdict: Verdict) -> str:
    suites = ElementTree.Element("testsuites")
    counts = {
        "tests": len(verdict.findings),
        "failures": len(verdict.with_status("fail")),
        "errors": len(verdict.with_status("error")),
        "skipped": len(verdict.with_status("note")),
    }
    attributes = {"name": "memfix gate", **{key: str(count) for key, count in counts.items()}}
    suite = ElementTree.SubElement(suites, "testsuite", attributes)
    for finding in verdict.findings:
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"memfix.{finding.op}", name=f"{finding.check}: {finding.subject}"
        )
        file, _, line = finding.source.rpartition(":")
        if file:
            case.attrib |= {"file": file, "line": line}
        tag = {"fail": "failure", "error": "error", "note": "skipped"}.get(finding.status)
        if tag is not None:
            ElementTree.SubElement(case, tag, message=_printable(finding.message)).text = _printable(finding.text())
    ElementTree.indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suites, encoding="unicode")


def _printable(text: str) -> str:
    """``text`` without what XML cannot hold, such as the escape codes of a coloured message."""
    return "".join(letter for letter in text if letter.isprintable() or letter in "\n\t")
