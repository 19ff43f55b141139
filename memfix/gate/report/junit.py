"""The verdict as JUnit XML for CI systems: one test case for each finding."""

from __future__ import annotations

from xml.etree import ElementTree

from ...checks.finding import Finding
from ..judge import Verdict
from .text import printable


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
        case = ElementTree.SubElement(suite, "testcase", classname=f"memfix.{finding.op}", name=_name(finding))
        file, _, line = finding.source.rpartition(":")
        if file:
            case.attrib |= {"file": file, "line": line}
        tag = {"fail": "failure", "error": "error", "note": "skipped"}.get(finding.status)
        if tag is not None:
            text = "\n".join([finding.text(), *([f"  at {finding.source}"] if finding.source else [])])
            ElementTree.SubElement(case, tag, message=printable(finding.message)).text = printable(text)
    ElementTree.indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suites, encoding="unicode")


def _name(finding: Finding) -> str:
    """``loss/chunked/lock [big, train]``: the same in every run."""
    what = "/".join(part for part in (finding.op, finding.form, finding.check) if part)
    place = ", ".join(part for part in (finding.case, finding.phase) if part)
    return f"{what} [{place}]" if place else what
