"""The tree of errors; the class of an error decides the exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_PASS = 0
EXIT_REGRESSION = 1
EXIT_NOT_MEASURED = 2
EXIT_USAGE = 4


class MemfixError(Exception):
    """The base of all errors about memfix's input or surroundings. ``exit_code`` is what the CLI ends with."""

    exit_code = EXIT_NOT_MEASURED


class UsageError(MemfixError):
    """The caller asked for something that does not exist or cannot be combined."""

    exit_code = EXIT_USAGE


class ContractError(UsageError, ValueError):
    """A contract contradicts itself."""


class FormulaError(ContractError):
    """A budget formula cannot be parsed, or names something the contract does not have."""


class LockError(UsageError):
    """The lock file cannot be read, or does not say what a lock file says."""


class LockConflict(LockError):
    """The lock file has the marks of a merge conflict."""


class CorpusError(UsageError, ValueError):
    """A text or a file of token ids cannot be read, or is not what it must be."""


class MeterUnavailable(MemfixError):
    """A meter cannot run here; the message says why and what to use instead."""


class MeasurementError(MemfixError):
    """A meter ran and could not give a figure."""


ON_A_GPU = 'measure it on a GPU, by memfix.peak(build, meter="cuda") or --meter=cuda'
"""What to do about a step that cannot be simulated."""


def out_of_memory(error: BaseException) -> str:
    """Shorten torch's paragraph about its allocator to ``out of memory, asked for 2.00 GiB``."""
    asked = " ".join(str(error).partition("Tried to allocate ")[2].split()[:2]).rstrip(".")
    return f"out of memory, asked for {asked}" if asked else "out of memory"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"``, or the list of known names, for the end of an error message."""
    known = list(known)
    return nearest(name, known) or (f"; known: {', '.join(sorted(known))}" if known else "")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"``, or nothing where no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
