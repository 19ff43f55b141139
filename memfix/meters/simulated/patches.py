"""Patches attributes for the duration of a block, and restores them also after an error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Patch = tuple[Any, str, Any]
"""An object, the name of its attribute, and the temporary value."""

_INHERITED = object()


class Patches:
    """A context manager that applies patches, and that can take them off for a while.

    Some builds of torch lack an attribute: it is left out, or with ``adds`` it is there inside.
    """

    def __init__(self, patches: Iterable[Patch], *, adds: bool = False) -> None:
        self._patches, self._adds = [*patches], adds
        self._before: list[Patch] = []

    def __enter__(self) -> None:
        for owner, name, value in self._patches:
            if self._adds or hasattr(owner, name):
                # not by getattr, which unwraps static methods and finds inherited attributes
                self._before.append((owner, name, vars(owner).get(name, _INHERITED)))
                setattr(owner, name, value)

    def __exit__(self, *exception: object) -> None:
        while self._before:
            owner, name, value = self._before.pop()
            if value is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, value)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, the attributes are as they were before."""
        is_applied = bool(self._before)
        self.__exit__()
        try:
            yield
        finally:
            if is_applied:
                self.__enter__()


@contextlib.contextmanager
def applied(patches: Iterable[Patch], *, adds: bool = False) -> Iterator[None]:
    with Patches(patches, adds=adds):
        yield


def nothing(*args: Any, **kwargs: Any) -> None:
    return None


def always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value
