"""Hypothesis profiles for the tests, under the same names and the same variable as the checks' own."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

from memfix.checks.effort import PROFILES, get_effort

pytest_plugins = ["pytester"]

# imports and collection leave nothing to free, and the collector would look at all of torch again and again meanwhile
gc.disable()

for name, effort in PROFILES.items():
    settings.register_profile(name, max_examples=effort.equality_examples, deadline=None, derandomize=name == "ci")
settings.load_profile(get_effort().name)

# pytester moves the home folder; the self-test of the fake device, which takes seconds, is remembered where it was
os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))


def pytest_configure(config: pytest.Config) -> None:
    """Import memfix as every other process does: pytest rewrites the assertions of every package that brings a plugin,
    which takes a worker eight seconds in a new checkout, and leaves no compiled modules for others."""
    hook = config.pluginmanager.rewrite_hook
    with contextlib.suppress(AttributeError):
        hook._must_rewrite.discard("memfix")
        hook._marked_for_rewrite_cache.clear()


def pytest_collection_finish() -> None:
    """Collect garbage automatically from here on: the tests begin."""
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First the tests that compile kernels for up to a minute: started last, the other workers would wait for them."""
    items.sort(key=lambda item: "-triton-" not in item.name)
