"""memfix proves memory fixes: every memory-saving PyTorch op beside its naive reference, equal, small and fast.

Names are loaded when first used, so ``import memfix`` and its pytest plugin cost no import of torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .contract import (
        BadInput,
        Case,
        Contract,
        Cuts,
        Dim,
        Form,
        Integers,
        LogUniform,
        Mask,
        Normal,
        ObjectSpec,
        TensorSpec,
        Uniform,
    )
    from .errors import MemfixError
    from .fit import Fit, fit, fit_world_size
    from .laws import Budget, Scaling, SpeedBudget, Tolerance
    from .measure import peak
    from .meters.base import Reading
    from .ranks import RankReadings, peak_of_ranks
    from .suite import suite
    from .watch import Watch, WatchReport, watch

_HOME = {
    "contract": "BadInput Case Contract Cuts Dim Form Integers LogUniform Mask Normal ObjectSpec TensorSpec Uniform",
    "errors": "MemfixError",
    "fit": "Fit fit fit_world_size",
    "laws": "Budget Scaling SpeedBudget Tolerance",
    "measure": "peak",
    "meters.base": "Reading",
    "ranks": "RankReadings peak_of_ranks",
    "suite": "suite",
    "watch": "Watch WatchReport watch",
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names.split()}

__all__ = [  # noqa: RUF022 - in the order a newcomer meets them
    "Contract", "Dim", "TensorSpec", "Normal", "Uniform", "LogUniform", "Integers", "Mask", "Cuts", "ObjectSpec",
    "Case", "Form", "Tolerance", "Budget", "Scaling", "SpeedBudget", "BadInput", "suite", "peak", "Reading",
    "peak_of_ranks", "RankReadings", "fit", "fit_world_size", "Fit", "watch", "Watch", "WatchReport", "MemfixError",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'memfix' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value  # the function, also where a submodule has the same name
    return value


class _Package(ModuleType):
    """Keeps public names: importing a submodule such as ``memfix.fit`` must not replace the function of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
