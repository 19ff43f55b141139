"""Patches attributes for the duration of a block, and restores them when it ends or raises."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Patch = tuple[Any, str, Any]
"""An object, the name of its attribute, and the temporary value."""

_INHERITED = object()


class Patches:
    """A context manager that applies patches. :func:`suspended` takes them off for a while.

    An attribute that this build of torch lacks is skipped, or with ``adds`` it exists inside the block.
    """

    def __init__(self, patches: Iterable[Patch], *, adds: bool = False) -> None:
        self._patches, self._adds = [*patches], adds
        self._before: list[Patch] = []

    def __enter__(self) -> None:
        _APPLIED.append(self)
        for owner, name, value in self._patches:
            if self._adds or hasattr(owner, name):
                # not by getattr, which unwraps static methods and finds inherited attributes
                self._before.append((owner, name, vars(owner).get(name, _INHERITED)))
                setattr(owner, name, value)

    def __exit__(self, *exception: object) -> None:
        if self in _APPLIED:
            _APPLIED.remove(self)
        while self._before:
            owner, name, value = self._before.pop()
            if value is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


_APPLIED: list[Patches] = []
"""The active patches, in the order in which they were applied."""


@contextlib.contextmanager
def suspended(*some: Patches) -> Iterator[None]:
    """Inside, the given patches are off; without arguments, all active patches are."""
    were_on = [patches for patches in _APPLIED if not some or patches in some]
    for patches in reversed(were_on):
        patches.__exit__()
    try:
        yield
    finally:
        for patches in were_on:
            patches.__enter__()


@contextlib.contextmanager
def applied(patches: Iterable[Patch], *, adds: bool = False) -> Iterator[None]:
    with Patches(patches, adds=adds):
        yield


def nothing(*args: Any, **kwargs: Any) -> None:
    return None


def always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value
