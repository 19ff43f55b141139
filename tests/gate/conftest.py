"""Checkouts that are made once in a session, and copied for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkouts import make_checkout, make_toy_checkout
from their_repository import Theirs, make_repository


@pytest.fixture(scope="session")
def _checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkout(tmp_path_factory.mktemp("memfix") / "checkout")


@pytest.fixture(scope="session")
def _toy_checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_checkout(tmp_path_factory.mktemp("toy") / "checkout")


@pytest.fixture
def checkout(_checkout: Path, tmp_path: Path) -> Path:
    """A git checkout of this memfix with its lock, for one test to break."""
    return shutil.copytree(_checkout, tmp_path / "checkout")


@pytest.fixture
def toy(_toy_checkout: Path, tmp_path: Path) -> Path:
    """A git checkout of a memfix whose only op is a toy, for one test to break."""
    return shutil.copytree(_toy_checkout, tmp_path / "checkout")


@pytest.fixture(scope="session")
def _their_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_repository(tmp_path_factory.mktemp("theirs") / "repository")


@pytest.fixture
def theirs(_their_repository: Path, _toy_checkout: Path, tmp_path: Path) -> Theirs:
    """Somebody else's repository, for one test to break."""
    return Theirs(shutil.copytree(_their_repository, tmp_path / "theirs"), _toy_checkout)
