"""Attributes of torch that are something else for a while, and are put back whatever happens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Patch = tuple[Any, str, Any]
"""An owner, the name of an attribute, and what it is meanwhile."""


@contextlib.contextmanager
def applied(patches: Iterable[Patch]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            if hasattr(owner, name):  # not every torch has every one
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
        yield


def nothing(*args: Any, **kwargs: Any) -> None:
    return None


def always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value
