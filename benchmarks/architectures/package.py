"""What a module of this folder provides: the architectures of one package, and steps of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from memfix.meters.base import StepBuilder

Attempt = Callable[[], StepBuilder]
"""Makes the builder of a step, or raises why this configuration is impossible."""


@dataclass(frozen=True)
class Package:
    """The architectures of a package. Modules of this folder import the package only inside functions."""

    module: str
    """What is imported."""
    architectures: Callable[[], Mapping[str, tuple[str, str]]]
    """Return the task and the class, or another name in the package, of every architecture by its name here."""
    attempts: Callable[[str, str], Iterable[Attempt]]
    """Return the configurations of a task and a class to try in turn."""
    runs_on_cpu: bool = True
    """Whether a step may be tried on the CPU where there is no GPU. Otherwise it is only simulated."""
