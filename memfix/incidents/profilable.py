"""What an incident brings to ``memfix profile`` and ``memfix fit``: settings, a profile, and what fits."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from ..fit import Fit
from . import incident_names, require_incident
from .profile import Profile


@dataclass(frozen=True)
class Profilable:
    """``profilable`` in ``memfix/incidents/<incident>/profilable.py``.

    ``settings`` makes what the other two take, and refuses what is not there. ``profile(settings, meter=, gpu=, say=)``
    measures one train step by stages. ``fit(settings, capacities, gpu=, high=, say=)`` finds the longest context that
    fits in each.
    """

    settings: Callable[..., Any]
    profile: Callable[..., Profile]
    fit: Callable[..., list[Fit]]


def get_profilable(incident: str) -> Profilable:
    """What the incident of this name brings."""
    module = _module_of(require_incident(incident))
    if importlib.util.find_spec(module) is None:
        known = [name for name in incident_names() if importlib.util.find_spec(_module_of(name)) is not None]
        raise UsageError(f"incident {incident} has no step to profile; those that have: {', '.join(known)}")
    found: Profilable = importlib.import_module(module).profilable
    return found


def _module_of(incident: str) -> str:
    return f"{__package__}.{incident}.profilable"
