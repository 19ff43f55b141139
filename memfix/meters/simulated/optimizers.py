"""Patches for what an optimizer decides by its parameters' classes, and a GradScaler by values."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from .patches import Patch
from .tracking import StorageTracker

_OF_A_SUBCLASS = "memfix_of_a_subclass"
_USUAL_SCALE = 2.0**16
"""The scale with which a GradScaler begins by default."""


def patches(tracker: StorageTracker) -> list[Patch]:
    return [(torch.nn.Parameter, "__new__", _made_parameter()), *_implementations(), *_scaling(tracker)]


def remember_class(tensor: torch.Tensor, kind: type) -> None:
    """Record that a fake tensor stands for a parameter of this class, if optimizers treat that differently."""
    of_lazy_module = issubclass(kind, (UninitializedParameter, UninitializedBuffer))
    is_own = issubclass(kind, torch.nn.Parameter) and kind is not torch.nn.Parameter and not of_lazy_module
    if is_own and isinstance(tensor, FakeTensor):
        setattr(tensor, _OF_A_SUBCLASS, True)


def _made_parameter() -> Any:
    """``Parameter.__new__``, which drops the class of a parameter that it makes of a fake tensor."""
    real: Callable[..., Any] = torch.nn.Parameter.__new__

    def make(cls: type, *args: Any, **kwargs: Any) -> Any:
        made = real(cls, *args, **kwargs)
        remember_class(made, cls)
        return made

    return staticmethod(make)


def _implementations() -> list[Patch]:
    """Choose as on a GPU between one kernel for all parameters and a loop: torch loops over those of a subclass."""

    def choosing(real: Callable[..., Any]) -> Callable[..., Any]:
        def choose(parameters: list[Any], *args: Any, **kwargs: Any) -> tuple[bool, bool]:
            if any(hasattr(parameter, _OF_A_SUBCLASS) for parameter in parameters):
                return False, False
            fused, foreach = real(parameters, *args, **kwargs)
            return fused, foreach

        return choose

    name = "_default_to_fused_or_foreach"
    modules = [module for key, module in sys.modules.items() if key.startswith("torch.optim.")]
    return [(module, name, choosing(getattr(module, name))) for module in modules if hasattr(module, name)]


def _scaling(tracker: StorageTracker) -> list[Patch]:
    """Add a note if a scaler begins with so large a scale that its first steps are likely to overflow."""
    real: Callable[..., Any] = torch.amp.GradScaler.step

    def step(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if scaler.is_enabled() and scaler._init_scale > _USUAL_SCALE:
            scale = f"{scaler._init_scale:,.0f}"
            tracker.note(f"a GradScaler begins with a scale of {scale}: assumed that no gradient overflows by it")
        return real(scaler, *args, **kwargs)

    return [(torch.amp.GradScaler, "step", step)]
