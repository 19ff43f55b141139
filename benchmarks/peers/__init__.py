"""What an op is compared with: functions of public packages, and the tables that are kept. One file an op.

``benchmarks/peers/<op>.py`` declares a ``COMPARISON``. An op without such a file is compared form against form.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memfix.contract import Form
from memfix.errors import out_of_memory
from memfix.provenance import installed_version

Tensors = dict[str, torch.Tensor]


class Unavailable(Exception):
    """Why a peer cannot run here, in words for the table."""


@dataclass(frozen=True)
class Peer:
    """A function of another package that computes what the op computes.

    ``load`` imports it and returns it with the call signature of a form: the contract's inputs in order, then its
    choices by name. A choice or an optional input that it cannot honour is ignored; its error then shows that.
    """

    distribution: str
    load: Callable[[], Callable[..., Any]]
    packages: tuple[str, ...] = ()
    """What must be importable; the kernels of other packages need a GPU. Empty for torch's own functions."""

    @property
    def source(self) -> str:
        return f"{self.distribution} {installed_version(self.distribution)}"

    def loaded(self, device: str) -> Callable[..., Any]:
        absent = not_installed(self.packages)
        if absent is not None:
            raise Unavailable(absent)
        if self.packages and device == "cpu":
            raise Unavailable("its kernels need a GPU")
        try:
            return self.load()
        except Unavailable:
            raise
        except Exception as error:  # a package for another torch or triton fails in its own way
            raise Unavailable(f"cannot be loaded: {trouble_of(error)}") from error


@dataclass(frozen=True)
class Entry:
    """One shape of a table: a case of the contract by name, or a new name, with ``settings`` such as ``T=8192``.

    A new name starts from the contract's first case. Without ``forms`` or ``peers`` all of them run.
    """

    name: str
    settings: str = ""
    forms: Sequence[str] | None = None
    peers: Sequence[str] | None = None


@dataclass(frozen=True)
class Table:
    """The shapes that one command measures. ``values`` names the input values, those of the timed steps first."""

    entries: Sequence[Entry]
    phases: Sequence[str] = ("train",)
    values: Sequence[str] = ()
    rounds: int | None = None
    calls: int = 1
    """Of a timed step, before its one backward, as layers of a model: where a call is short, the start of a backward
    would be most of what is timed."""
    simulated: bool = False
    """Whether the simulated meter predicts the peaks too. It does in any case on a CPU, to refuse what is too large."""


@dataclass(frozen=True)
class Comparison:
    """All that ``benchmarks.compare`` knows of an op beside its contract."""

    peers: Mapping[str, Peer] = field(default_factory=dict)
    tables: Mapping[str, Table] = field(default_factory=dict)
    forms: Mapping[str, Callable[..., Any] | Form] = field(default_factory=dict)
    """Forms as users call them, where that is not how the contract calls them, and forms that only a table has."""
    values: Mapping[str, Callable[[Tensors, torch.Generator], None]] = field(default_factory=dict)
    """Functions that change the drawn inputs in place; without any, inputs are as the contract draws them."""
    floors: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """By phase, where that is not the one of the contract's floor: the work that no form can be without."""
    gradient_of: Sequence[int] | None = None
    """The outputs through which a gradient comes in; all of them where it is None."""
    error_at: Mapping[str, int] | None = None
    """Sizes that dims are cut to where errors are taken, since naive runs there in float64; where it is None, those
    of the contract's equality draws."""
    parts: Callable[[Tensors, Tensors], Tensors] | None = None
    """Parts of an answer whose error is shown on its own, from the inputs and the answer."""


def comparison_of(op: str) -> Comparison:
    name = f"{__name__}.{op}"
    if importlib.util.find_spec(name) is None:
        return Comparison()
    found: Comparison = importlib.import_module(name).COMPARISON
    return found


def not_installed(packages: Sequence[str]) -> str | None:
    """Which of ``packages`` cannot be imported here, in words, or None."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} not installed" if absent else None


def fla_operators(package: str) -> Any:
    """A package of flash-linear-attention's ``fla.ops``. Its layers and models, which need transformers, stay out."""
    for name in ("fla.layers", "fla.models"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    return importlib.import_module(f"fla.ops.{package}")


def trouble_of(error: Exception) -> str:
    """An error on one line; of a lack of memory, what was asked for."""
    if isinstance(error, torch.OutOfMemoryError):
        return out_of_memory(error)
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
