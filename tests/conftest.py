"""Hypothesis profiles for the tests, under the same names and the same variable as the checks' own."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import settings

from memfix.checks.effort import PROFILES, get_effort

pytest_plugins = ["pytester"]

for name, effort in PROFILES.items():
    settings.register_profile(name, max_examples=effort.equality_examples, deadline=None, derandomize=name == "ci")
settings.load_profile(get_effort().name)

# pytester moves the home folder; the self-test of the fake device, which takes seconds, is remembered where it was
os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))
