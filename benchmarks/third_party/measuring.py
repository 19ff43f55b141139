"""The peaks of third-party steps: predicted, and measured on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memfix.provenance import installed_version

from ..predicted_rows import measured
from . import SUBJECTS

_DISTRIBUTION = {"liger_kernel": "liger-kernel", "fla": "flash-linear-attention"}


def rows_of(subject: str, chosen: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the rows of a subject's chosen steps."""
    rows: dict[str, dict[str, Any]] = {}
    for name in chosen:
        package, build = SUBJECTS[subject][name]
        row = {"package": package, "version": installed_version(_DISTRIBUTION.get(package, package))}
        rows[name] = row | measured(build)
    return rows
