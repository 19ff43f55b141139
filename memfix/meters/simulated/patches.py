"""Patches attributes for the duration of a block, and restores them also after an error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Patch = tuple[Any, str, Any]
"""An object, the name of its attribute, and the temporary value."""


@contextlib.contextmanager
def applied(patches: Iterable[Patch], *, adds: bool = False) -> Iterator[None]:
    """Some builds of torch lack an attribute: it is left out, or with ``adds`` it is there for the block."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            if adds or hasattr(owner, name):
                is_its_own = name in vars(owner)
                undo = (setattr, owner, name, getattr(owner, name)) if is_its_own else (delattr, owner, name)
                stack.callback(*undo)
                setattr(owner, name, value)
        yield


def nothing(*args: Any, **kwargs: Any) -> None:
    return None


def always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value
