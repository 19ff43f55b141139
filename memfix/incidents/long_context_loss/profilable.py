"""What this incident brings to ``memfix profile`` and ``memfix fit``."""

from __future__ import annotations

from ..profilable import Profilable
from .longest import longest_contexts
from .profile import profile
from .step import settings_of

profilable = Profilable(settings=settings_of, profile=profile, fit=longest_contexts)
