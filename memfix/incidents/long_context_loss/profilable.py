"""What this incident brings to ``memfix profile`` and ``memfix fit``."""

from __future__ import annotations

import dataclasses

from ..profilable import Profilable
from .longest import longest_contexts
from .profile import profile
from .step import StepSettings, settings_of

profilable = Profilable(
    settings=settings_of,
    options=frozenset(field.name for field in dataclasses.fields(StepSettings)),
    profile=profile,
    fit=longest_contexts,
    fitted="context_length",
    unit="tokens",
)
