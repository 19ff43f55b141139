"""Incidents: reproductions of reports about running out of memory. Each is a folder with an ``incident.py``."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from .incident import Incident


def incident_names() -> list[str]:
    """The names of all incidents, which are their folders' names."""
    return sorted(file.parent.name for folder in __path__ for file in Path(folder).glob("*/incident.py"))


def require_incident(name: str) -> str:
    known = incident_names()
    if name not in known:
        raise UsageError(f"no incident {name!r}{did_you_mean(name, known)}")
    return name


def get_incident(name: str) -> Incident:
    """The incident called ``name``."""
    return importlib.import_module(f"{__package__}.{require_incident(name)}.incident").incident
