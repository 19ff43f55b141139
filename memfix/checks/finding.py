"""The result of a check. Imports no torch, so that findings can be judged, stored and compared anywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import EXIT_NOT_MEASURED, EXIT_PASS, EXIT_REGRESSION
from .measured import Measured, from_figures

Status = Literal["pass", "fail", "error", "note"]
"""``error``: the check could not run. ``note``: reported, but not judged."""


@dataclass(frozen=True)
class Finding:
    """The result of one check of one form. ``message`` is one line for people; ``details`` are the lines below it.

    Reports read ``measured`` and ``known``, never the message. ``known`` says what a contract declares to be wrong with
    a reported form, such as ``breaks its budget``. ``source`` is the line behind the finding, as
    ``memfix/ops/loss/chunked.py:41``, where one is known.
    """

    check: str
    op: str
    form: str
    status: Status
    message: str
    case: str | None = None
    phase: str | None = None
    details: tuple[str, ...] = ()
    reproduce: str = ""
    measured: Measured | None = None
    source: str = ""
    known: str = ""

    @property
    def subject(self) -> str:
        """``linear_cross_entropy/recompute [incident, train]``"""
        place = ", ".join(part for part in (self.case, self.phase) if part)
        name = f"{self.op}/{self.form}" if self.form else self.op
        return f"{name} [{place}]" if place else name

    def text(self) -> str:
        """The whole finding, for a terminal or a test report."""
        lines = [f"{self.subject}: {self.message}", *self.details]
        if self.reproduce:
            lines.append(f"  reproduce: {self.reproduce}")
        return "\n".join(lines)

    @property
    def figures(self) -> dict[str, float]:
        """The numbers of ``measured``, as JSON names them."""
        return self.measured.figures() if self.measured else {}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Finding:
        """Read a finding of a JSON report; an earlier memfix's may lack keys that have a default."""
        fields = {field.name: data[field.name] for field in dataclasses.fields(cls) if field.name in data}
        return cls(**{**fields, "details": tuple(data["details"]), "measured": from_figures(data["figures"])})

    def as_dict(self) -> dict[str, Any]:
        data = {**dataclasses.asdict(self), "figures": self.figures, "subject": self.subject}
        del data["measured"]
        return data


def exit_code_of(findings: Iterable[Finding]) -> int:
    """Return a regression's exit code if anything failed, else that of an error, else a pass."""
    statuses = {finding.status for finding in findings}
    if "fail" in statuses:
        return EXIT_REGRESSION
    return EXIT_NOT_MEASURED if "error" in statuses else EXIT_PASS
