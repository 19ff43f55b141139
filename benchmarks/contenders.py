"""Who is compared: our forms of an op by the function that users call, and public packages where they are installed.

A package that is not installed, or needs a GPU where there is none, is left out by name with the reason.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import click
import torch

import memfix
from memfix.errors import did_you_mean
from memfix.laws import NAIVE
from memfix.provenance import installed_version
from memfix.registry import contracts

from .rounds import trouble_of


@dataclass(frozen=True)
class Contender:
    name: str
    source: str
    """The package and version that it comes from."""
    function: Callable[..., Any]


class Unavailable(Exception):
    """Why a peer cannot run here, in words for the table."""


@dataclass(frozen=True)
class Peer:
    distribution: str
    load: Callable[[], Callable[..., Any]]
    package: str | None = None
    """What must be importable, beside triton; None for torch itself."""

    @property
    def version(self) -> str:
        return torch.__version__ if self.package is None else installed_version(self.distribution)

    def loaded(self, device: str) -> Callable[..., Any]:
        if self.package is not None:
            absent = [name for name in (self.package, "triton") if importlib.util.find_spec(name) is None]
            if absent:
                raise Unavailable(f"{' and '.join(absent)} not installed")
            if device == "cpu":
                raise Unavailable("its kernels need a GPU")
        return self.load()


def forms_of(op: str, product: Callable[..., Any], offered: Collection[str]) -> list[Contender]:
    """Naive and every form of the contract, by ``product``, which users call, where it has the form on offer."""
    (contract,) = contracts([op])
    source = f"memfix {memfix.__version__}"
    return [
        Contender(form, source, functools.partial(product, form=form) if form in offered else contract.function(form))
        for form in (NAIVE, *contract.forms)
    ]


def those_that_load(peers: Mapping[str, Peer], device: str) -> tuple[list[Contender], dict[str, str]]:
    """The peers that run on ``device``, and for each that does not, why."""
    found, left_out = [], {}
    for name, peer in peers.items():
        try:
            found.append(Contender(name, f"{peer.distribution} {peer.version}", peer.loaded(device)))
        except Unavailable as reason:
            left_out[name] = str(reason)
        except Exception as error:  # a package for another torch or triton fails in its own way
            left_out[name] = f"cannot be loaded: {trouble_of(error)}"
    return found, left_out


def chosen(found: list[Contender], only: str | None, left_out: Mapping[str, str]) -> list[Contender]:
    """Those named in ``only``; a name that nobody has is refused, one that is left out here is simply not there."""
    if only is None:
        return found
    known = [*(contender.name for contender in found), *left_out]
    names = only.split(",")
    for name in names:
        if name not in known:
            raise click.BadParameter(f"nobody is called {name!r}{did_you_mean(name, known)}", param_hint="--only")
    return [contender for contender in found if contender.name in names]


def relative_error(found: torch.Tensor, true: torch.Tensor) -> float:
    """In norm, against a ``true`` that is float64."""
    return float((found.double() - true).norm() / true.norm())
