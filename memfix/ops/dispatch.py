"""Chooses the form of an op: the one that the caller names, or for ``form="auto"`` the one that suits the tensors.

An op declares its forms once, in the ``__init__.py`` of its package; so does an op outside of memfix::

    DISPATCHER = Dispatcher("kda", __name__, forms=("streamed", "wy", "triton"), otherwise="wy", kernels="triton")
    FORMS = DISPATCHER.names

    def kda(q, k, v, *, form="auto"):
        return DISPATCHER.function(form, q)(q, k, v)

The form ``wy`` of that op is the function ``wy_kda`` in the module ``wy`` of the package. A module is imported when its
form is first called, so a kernel's compiler is loaded only where it is used.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .arguments import require_one_of

AUTO = "auto"


@dataclass(frozen=True)
class Dispatcher:
    """The forms of an op. ``auto`` is ``kernels`` on a GPU where Triton is installed, and ``otherwise`` elsewhere.

    ``not_for`` are the dtypes that the kernels do not support.
    """

    op: str
    package: str
    forms: tuple[str, ...]
    otherwise: str
    kernels: str | None = None
    not_for: tuple[torch.dtype, ...] = ()

    def __post_init__(self) -> None:
        require_one_of("otherwise", self.otherwise, self.forms)
        if self.kernels is not None:
            require_one_of("kernels", self.kernels, self.forms)

    @property
    def names(self) -> tuple[str, ...]:
        """The values that ``form=`` may have."""
        return (AUTO, *self.forms)

    def chosen(self, form: str, tensor: torch.Tensor | None = None) -> str:
        """Return ``form`` itself, or for ``auto`` the form that suits ``tensor``; refuse an unknown form."""
        require_one_of("form", form, self.names)
        if form != AUTO:
            return form
        if self.kernels is None or tensor is None or not tensor.is_cuda or tensor.dtype in self.not_for:
            return self.otherwise
        return self.kernels if triton_is_installed() else self.otherwise

    def function(self, form: str, tensor: torch.Tensor | None = None) -> Callable[..., Any]:
        """Return the function of the chosen form. An op that runs on the host gives no ``tensor``."""
        name = self.chosen(form, tensor)
        function: Callable[..., Any] = getattr(importlib.import_module(f"{self.package}.{name}"), f"{name}_{self.op}")
        return function


@functools.cache
def triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    from .kernels import INTERPRETED

    return bool(INTERPRETED.value)


def require_kernels(tensor: torch.Tensor, *, instead: str) -> None:
    """Refuse the form ``triton`` where its kernels cannot run on ``tensor``; ``instead`` is the form that can."""
    if not triton_is_installed():
        raise RuntimeError(f"form 'triton' needs the package triton, which is not installed; take form='{instead}'")
    if tensor.device.type == "cpu" and not is_interpreted():
        raise RuntimeError(
            f"form 'triton' runs on a GPU, and the tensors are on the CPU; take form='{instead}', or set "
            "TRITON_INTERPRET=1 before Python starts"
        )
