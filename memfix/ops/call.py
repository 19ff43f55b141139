"""A decorator for forms with many keywords: callers give tensors and options, and the form gets two checked objects."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol, Self, TypeVar

Result = TypeVar("Result")


class Tensors(Protocol):
    """The tensors of a call: a class whose constructor has the parameter names and defaults that callers see."""

    @classmethod
    def checked(cls, *tensors: Any, **by_name: Any) -> Self:
        """Return the tensors; refuse what cannot be computed, before anything is allocated."""


Given = TypeVar("Given", bound=Tensors)
Chosen = TypeVar("Chosen")


def takes(
    tensors: type[Given], options: type[Chosen]
) -> Callable[[Callable[[Given, Chosen], Result]], Callable[..., Result]]:
    """Decorate ``form(tensors, options)``, so that callers pass the fields of both instead.

    ``options`` is a dataclass with keyword-only fields that refuses wrong values itself. The decorated form has the
    signature that a contract reads: the fields of ``tensors``, then those of ``options``.
    """
    of_tensors, of_options = inspect.signature(tensors).parameters, inspect.signature(options).parameters
    signature = inspect.Signature([*of_tensors.values(), *of_options.values()])

    def decorate(form: Callable[[Given, Chosen], Result]) -> Callable[..., Result]:
        @functools.wraps(form)
        def called(*given: Any, **keywords: Any) -> Result:
            by_name = {name: keywords.pop(name) for name in of_tensors if name in keywords}
            chosen = options(**keywords)
            return form(tensors.checked(*given, **by_name), chosen)

        called.__signature__ = signature  # type: ignore[attr-defined]
        return called

    return decorate
