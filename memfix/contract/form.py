"""The forms of an op, and the calls that they must refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..laws import Tolerance

FLOOR = "floor"  # selected by name like a form, but not compared with naive


@dataclass(frozen=True)
class Form:
    """A memory-saving way to compute what naive computes.

    ``reported``: an incident report shipped it as its fix. The budgets that it is known to break are kept, and the
    gate checks that it still breaks them.
    ``tolerance`` and ``repeats_backward``: given where they differ from the contract's. A form that does not repeat
    its backward must refuse the second one by the name of the op.
    ``known_unequal``: for a reported form that gives a wrong answer, the dtypes in which it does and why, such as
    ``{"bfloat16": "positions above 256 are rounded"}``. The gate checks that it still does; its memory is not judged.
    ``has_kernels``: it launches kernels, which need a GPU. Without one they are compiled for the GPU that is simulated,
    and compared on the CPU: those in the ``language`` ``triton`` are interpreted, those in ``cuda``
    (``memfix.cuda_kernels``) are emulated.
    ``compared_with``: constants of its modules, by their dotted names, and the values they have while it is compared on
    the CPU. With smaller tiles and thresholds, such as ``{"package.kernels.BLOCK": 16}``, small calls cross them too.
    """

    function: Callable[..., Any]
    reported: bool = False
    tolerance: Tolerance | None = None
    known_unequal: Mapping[str, str] = field(default_factory=dict)
    repeats_backward: bool | None = None
    has_kernels: bool = False
    language: Literal["triton", "cuda"] = "triton"
    compared_with: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_interpreted(self) -> bool:
        """Whether its kernels run in Triton's interpreter where there is no GPU."""
        return self.has_kernels and self.language == "triton"

    def spelled(self) -> str:
        own = f", tolerance {self.tolerance.spelled()}" if self.tolerance else ""
        unequal = "; ".join(f"{dtype}: {why}" for dtype, why in self.known_unequal.items())
        own += "" if self.repeats_backward is None else f", repeats backward {str(self.repeats_backward).lower()}"
        own += "".join(f", compared with {name}={value!r}" for name, value in self.compared_with.items())
        return ("reported" if self.reported else "saves memory") + own + (unequal and f", known unequal in {unequal}")


@dataclass(frozen=True)
class BadInput:
    """A call that must be refused. ``change`` edits the arguments by name; the error must contain ``message``."""

    name: str
    change: Callable[[dict[str, Any]], None]
    message: str
    error: type[Exception] = ValueError


def setting(**values: Any) -> Callable[[dict[str, Any]], None]:
    """Return a ``change`` that sets arguments to new values; a callable is applied to the old value instead."""

    def change(arguments: dict[str, Any]) -> None:
        for name, value in values.items():
            arguments[name] = value(arguments.get(name)) if callable(value) else value

    return change
