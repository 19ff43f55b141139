"""Incidents: reports of memory that ran out, replayed. One folder each."""

from __future__ import annotations

import pkgutil

from ..errors import UsageError, did_you_mean


def incident_names() -> list[str]:
    """Every incident, by the name of its folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)


def require_incident(name: str) -> str:
    known = incident_names()
    if name not in known:
        raise UsageError(f"no incident {name!r}{did_you_mean(name, known)}")
    return name
