"""Imports the function of a reference: ``package.module:function`` or ``path/to/file.py:function``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import UsageError, did_you_mean


def function_named(option: str, reference: str) -> Callable[..., Any]:
    """Return the function that ``option`` names. The working directory and its ``src`` are added to ``sys.path``."""
    place, colon, name = reference.rpartition(":")
    if not colon or not name:
        raise UsageError(f"{option} must be package.module:function or path/to/file.py:function, got {reference!r}")
    module_name = place
    folders = [Path.cwd() / "src", Path.cwd()]
    if place.endswith(".py"):
        file = Path(place)
        if not file.is_file():
            raise UsageError(f"{option}: there is no file {place}")
        module_name, folders = file.stem, [*folders, file.resolve().parent]
    for folder in folders:
        if folder.is_dir() and str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{option}: {place} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UsageError(f"{option}: {place} has no function {name!r}{did_you_mean(name, known)}")
    return function
