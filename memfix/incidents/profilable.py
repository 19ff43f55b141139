"""What an incident brings to ``memfix profile`` and ``memfix fit``: settings, a profile, and what fits."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from ..fit import Fit
from . import incident_names, require_incident
from .profile import Profile


@dataclass(frozen=True)
class Profilable:
    """``profilable`` in ``memfix/incidents/<incident>/profilable.py``.

    ``settings`` makes what the other two take, from ``options`` by name, and refuses what is not there.
    ``profile(settings, meter=, gpu=, say=)`` measures one train step by stages.
    ``fit(settings, capacities, gpu=, high=, say=)`` finds how large ``fitted`` can be in each, counted in ``unit``.
    """

    settings: Callable[..., Any]
    options: frozenset[str]
    profile: Callable[..., Profile]
    fit: Callable[..., list[Fit]]
    fitted: str
    unit: str


def chosen_settings(incident: str, profilable: Profilable, chosen: Mapping[str, Any]) -> Any:
    """Settings as chosen on the command line; options that this incident does not have are refused."""
    given = {name: value for name, value in chosen.items() if value not in (None, ())}
    for name in given:
        if name not in profilable.options:
            known = ", ".join(_spelled(option) for option in sorted(profilable.options))
            raise UsageError(f"{incident} does not take {_spelled(name)}; it takes {known}")
    return profilable.settings(**given)


def _spelled(option: str) -> str:
    return "SECTION.KEY=VALUE" if option == "overrides" else f"--{option.replace('_', '-')}"


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
