"""Patches attributes for the duration of a block, and restores them also after an error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Patch = tuple[Any, str, Any]
"""An object, the name of its attribute, and the temporary value."""


@contextlib.contextmanager
def applied(patches: Iterable[Patch]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            if hasattr(owner, name):  # some versions of torch lack the attribute
                is_inherited = isinstance(owner, type) and name not in vars(owner)
                undo = (delattr, owner, name) if is_inherited else (setattr, owner, name, getattr(owner, name))
                stack.callback(*undo)
                setattr(owner, name, value)
        yield


def nothing(*args: Any, **kwargs: Any) -> None:
    return None


def always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value
