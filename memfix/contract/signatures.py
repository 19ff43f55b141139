"""Read what a form takes: its tensors, and the dims and choices that it gets by name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of ``function``; for ``apply`` of an autograd function, those of ``forward`` after ``ctx``.

    Depending on the version of torch, ``apply`` itself takes anything or is a builtin without a signature.
    """
    owner: Any = getattr(function, "__self__", None)
    is_apply = isinstance(owner, type) and function.__name__ == "apply" and hasattr(owner, "setup_context")
    if not is_apply:
        return list(signature_of(function).parameters.values())
    parameters = list(signature_of(owner.forward).parameters.values())
    definer = next(cls for cls in owner.__mro__ if "setup_context" in vars(cls))
    if definer.__module__ != "torch.autograd.function":  # it defines setup_context itself, so its forward has no ctx
        return parameters
    # apply takes keywords only where setup_context is defined
    return [
        parameter.replace(kind=parameter.POSITIONAL_ONLY)
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        else parameter
        for parameter in parameters[1:]
    ]


def keywords_of(function: Callable[..., Any], num_inputs: int) -> set[str]:
    """Return the names of the parameters that ``function`` takes after its tensors."""
    after_tensors = parameters_of(function)[num_inputs:]
    return {p.name for p in after_tensors if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature, even if an annotation names nothing that exists: Python 3.14 would evaluate it here."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(function)
