"""What this incident brings to ``memfix profile`` and ``memfix fit``."""

from __future__ import annotations

from ..profilable import Profilable
from .most_layers import most_layers
from .profile import profile
from .settings import settings_of

profilable = Profilable(
    settings=settings_of,
    options=frozenset({"config", "overrides", "capacity"}),
    profile=profile,
    fit=most_layers,
    fitted="layers",
    unit="layers",
)
