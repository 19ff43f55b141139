"""What a check says. Imports no torch, so that findings can be judged, stored and compared anywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import EXIT_NOT_MEASURED, EXIT_PASS, EXIT_REGRESSION

Status = Literal["pass", "fail", "error", "note"]
"""``error``: it could not be found out. ``note``: said, but not judged."""


@dataclass(frozen=True)
class Finding:
    """One check of one form. ``message`` is a whole sentence's worth on one line; ``details`` come below it.

    ``figures`` are the numbers of the message, for machines. ``source`` is the line behind it, as
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
    figures: Mapping[str, float] = field(default_factory=dict)
    source: str = ""

    @property
    def subject(self) -> str:
        """``linear_cross_entropy/recompute [incident, train]``"""
        place = ", ".join(part for part in (self.case, self.phase) if part)
        name = f"{self.op}/{self.form}" if self.form else self.op
        return f"{name} [{place}]" if place else name

    def text(self) -> str:
        """All of it, for a terminal or a test report."""
        lines = [f"{self.subject}: {self.message}", *self.details]
        if self.reproduce:
            lines.append(f"  reproduce: {self.reproduce}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "subject": self.subject}


def exit_code_of(findings: Iterable[Finding]) -> int:
    """A regression outweighs what could not be measured; a pass needs neither."""
    statuses = {finding.status for finding in findings}
    if "fail" in statuses:
        return EXIT_REGRESSION
    return EXIT_NOT_MEASURED if "error" in statuses else EXIT_PASS
