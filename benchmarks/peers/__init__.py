"""The peers of each op, functions of public packages that compute the same, and the tables to measure.

``benchmarks/peers/<op>.py`` declares a ``COMPARISON``. Without such a file only the op's forms are compared.
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
    """A peer cannot run here; the message is the reason, as shown in the table."""


@dataclass(frozen=True)
class Peer:
    """A function of another package that computes what the op computes.

    ``load`` imports it and returns it with the call signature of a form: the contract's inputs in order, then its
    choices by name. It may ignore a choice or an optional input that it does not support: its error then shows that.
    """

    distribution: str
    load: Callable[[], Callable[..., Any]]
    packages: tuple[str, ...] = ()
    """Modules that must be importable, whose kernels need a GPU. Empty for torch's own functions."""

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
        except Exception as error:  # a package made for another torch or triton may raise anything
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
    """The shapes that one command measures. ``values`` names sets of input values; the first one is timed."""

    entries: Sequence[Entry]
    phases: Sequence[str] = ("train",)
    values: Sequence[str] = ()
    rounds: int | None = None
    calls: int = 1
    """The number of calls in a timed step, before its one backward, like the layers of a model. With one short call,
    the start of backward would take most of the time."""
    simulated: bool = False
    """Whether the simulated meter predicts the peaks too. On a CPU it always does, to refuse too large steps."""


@dataclass(frozen=True)
class Comparison:
    """All that ``benchmarks.compare`` needs for an op beside its contract."""

    peers: Mapping[str, Peer] = field(default_factory=dict)
    tables: Mapping[str, Table] = field(default_factory=dict)
    forms: Mapping[str, Callable[..., Any] | Form] = field(default_factory=dict)
    """Forms called as users do, if the contract calls them otherwise, and forms that only a table has."""
    values: Mapping[str, Callable[[Tensors, torch.Generator], None]] = field(default_factory=dict)
    """Functions that change the drawn inputs in place; without any, inputs are as the contract draws them."""
    floors: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """By phase, the work that every form must do, for phases other than that of the contract's floor."""
    gradient_of: Sequence[int] | None = None
    """Indices of the outputs that get an upstream gradient; None for all."""
    error_at: Mapping[str, int] | None = None
    """Upper bounds of dims when errors are computed, since naive runs in float64 there; None for the sizes of the
    contract's equality draws."""
    parts: Callable[[Tensors, Tensors], Tensors] | None = None
    """A function of the inputs and the answer that returns parts of the answer, whose errors are shown separately."""


def comparison_of(op: str) -> Comparison:
    name = f"{__name__}.{op}"
    if importlib.util.find_spec(name) is None:
        return Comparison()
    return importlib.import_module(name).COMPARISON


def not_installed(packages: Sequence[str]) -> str | None:
    """Return a text that names the ``packages`` that cannot be imported here, or None."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} not installed" if absent else None


def fla_operators(package: str) -> Any:
    """Import a package of ``fla.ops`` without fla's layers and models, which need transformers."""
    for name in ("fla.layers", "fla.models"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    return importlib.import_module(f"fla.ops.{package}")


def trouble_of(error: Exception) -> str:
    """Return an error as one line; for an out-of-memory error, the requested size."""
    if isinstance(error, torch.OutOfMemoryError):
        return out_of_memory(error)
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
