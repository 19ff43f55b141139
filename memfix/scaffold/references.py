"""Imports the function of a reference: ``package.module:function`` or ``path/to/file.py:function``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UsageError, did_you_mean


class Reference(NamedTuple):
    """A function by the module or file that defines it, and its name."""

    place: str
    name: str

    @staticmethod
    def parse(text: str) -> Reference:
        place, _, name = text.rpartition(":")
        return Reference(place, name)

    @property
    def is_file(self) -> bool:
        return self.place.endswith(".py")

    @property
    def module(self) -> str:
        return Path(self.place).stem if self.is_file else self.place


def function_named(option: str, reference: str) -> Callable[..., Any]:
    """Return the function that ``option`` names. The working directory and its ``src`` are added to ``sys.path``."""
    parsed = Reference.parse(reference)
    place, name = parsed
    if not place or not name:
        raise UsageError(f"{option} must be package.module:function or path/to/file.py:function, got {reference!r}")
    folders = [Path.cwd() / "src", Path.cwd()]
    if parsed.is_file:
        if not Path(place).is_file():
            raise UsageError(f"{option}: there is no file {place}")
        folders.append(Path(place).resolve().parent)
    for folder in folders:
        if folder.is_dir() and str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(parsed.module)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{option}: {place} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UsageError(f"{option}: {place} has no function {name!r}{did_you_mean(name, known)}")
    return function
