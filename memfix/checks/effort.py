"""Profiles of how many calls the checks draw, the same for the gate, pytest and the command line."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..errors import UsageError, did_you_mean

ENVIRONMENT_VARIABLE = "MEMFIX_PROFILE"


@dataclass(frozen=True)
class Effort:
    """Drawn calls per form and dtype for equality, and drawn shapes per form and budget for memory."""

    name: str
    equality_examples: int
    memory_examples: int
    shrinks: int = 200
    """The most tries to find the smallest call at which a form is unequal."""
    seed: int = 0
    """Another seed draws other calls."""


PROFILES = {
    effort.name: effort
    for effort in (
        Effort("dev", equality_examples=10, memory_examples=2),
        Effort("ci", equality_examples=32, memory_examples=8),
        Effort("thorough", equality_examples=1000, memory_examples=100),
    )
}


def get_effort(name: str | None = None) -> Effort:
    """Return the profile called ``name``; without a name, the environment's, or ``ci``."""
    chosen = name or os.environ.get(ENVIRONMENT_VARIABLE) or "ci"
    if chosen not in PROFILES:
        raise UsageError(f"unknown profile {chosen!r}{did_you_mean(chosen, PROFILES)}")
    return PROFILES[chosen]
