"""The draw that fixes one call of an op, and the input tensors that are made of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ..contract import LAYOUTS, PATTERNS, WORKING_DTYPES, Case, Contract, Layout, Pattern
from ..errors import UsageError, did_you_mean
from .values import make_input

Upstream = Literal["dense", "expanded", "transposed", "masked", "partial"]
UPSTREAMS: tuple[Upstream, ...] = ("dense", "expanded", "transposed", "masked", "partial")
Mode = Literal["plain", "autocast", "twice"]
MODES: tuple[Mode, ...] = ("plain", "autocast", "twice")


@dataclass(frozen=True)
class Draw:
    """A case with everything else that fixes a call: values, their patterns, layouts, frozen inputs, and the gradient
    that arrives for its results (``gradients.py``).

    ``share`` is the share of elements that a ``sometimes`` value replaces, and of a mask that is True. Without one, as
    at the cases, nothing is replaced: a meter that knows no values and one that does then measure the same step.
    ``magnitude`` multiplies ``Normal`` inputs. ``LogUniform`` ones it moves within their range: to ``low`` where it is
    large, to ``high`` where it is small.
    """

    case: Case
    seed: int = 0
    share: float | None = None
    magnitude: float = 1.0
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    patterns: Mapping[str, Pattern] = field(default_factory=dict)
    upstream: Upstream = "dense"
    spoiled: str | None = None
    """An input that has a NaN in every row."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Dtypes of inputs that differ from the declared ones (``TensorSpec.also_in``)."""
    mode: Mode = "plain"
    """``autocast``: the call is made under bfloat16 autocast. ``twice``: its gradients are differentiated again."""

    def spelled(self) -> str:
        """Return the draw as one line, which ``parsed`` reads back."""
        parts = [self.case.spelled(), f"seed={self.seed}"]
        parts += [f"share={self.share:g}"] if self.share is not None else []
        parts += [f"magnitude={self.magnitude:g}"] if self.magnitude != 1 else []
        parts += [f"layout.{name}={layout}" for name, layout in self.layouts.items() if layout != "contiguous"]
        parts += [f"pattern.{name}={pattern}" for name, pattern in self.patterns.items() if pattern != "even"]
        parts += [f"frozen={name}" for name in sorted(self.frozen)]
        parts += [f"upstream={self.upstream}"] if self.upstream != "dense" else []
        parts += [f"spoiled={self.spoiled}"] if self.spoiled is not None else []
        parts += [f"dtype.{name}={dtype}" for name, dtype in self.dtypes.items()]
        parts += [f"mode={self.mode}"] if self.mode != "plain" else []
        return ",".join(parts)

    @staticmethod
    def parsed(contract: Contract, text: str) -> Draw:
        """Read the draw that ``--at`` names, as ``spelled`` writes it."""
        settings: dict[str, Any] = {}
        own: dict[str, Any] = {}
        of_inputs: dict[str, dict[str, Any]] = {"layout": {}, "pattern": {}, "dtype": {}}
        frozen: set[str] = set()
        present: list[str] = []
        names = {spec.name for spec in contract.inputs}
        for part in re.split(r",(?![^(]*\))", text):  # a choice may be a tuple
            key, equals, value = part.strip().partition("=")
            if not equals:
                raise UsageError(f"--at is a list of name=value, got {part!r}")
            kind, dot, of_input = key.partition(".")
            named = of_input if dot else value if key in ("frozen", "present", "absent", "spoiled") else None
            if named is not None and named not in names:
                raise UsageError(f"--at: {contract.name} has no input {named!r}{did_you_mean(named, names)}")
            try:
                if dot and kind in of_inputs:
                    of_inputs[kind][of_input] = _READERS[f"{kind}."](value)
                elif key == "frozen":
                    frozen.add(value)
                elif key == "present":
                    present.append(value)
                elif key == "absent":  # an input that the case has
                    present.remove(value)
                elif key in _READERS:
                    own[key] = _READERS[key](value)
                elif key in contract.choices:
                    settings[key] = next(v for v in contract.choices[key] if str(v) == value)
                else:
                    settings[key] = value if key == "dtype" else int(value)
            except (ValueError, StopIteration):
                raise UsageError(f"--at: cannot read {part!r}") from None
        case = contract.case_of("drawn", {**settings, "present": present})
        own |= {f"{kind}s": values for kind, values in of_inputs.items()}
        return Draw(case, **own, frozen=frozenset(frozen))


def _one_of(known: Sequence[Any]) -> Callable[[str], Any]:
    return lambda value: known[known.index(value)]


_READERS: dict[str, Callable[[str], Any]] = {
    "seed": int, "share": float, "magnitude": float, "spoiled": str,
    "upstream": _one_of(UPSTREAMS), "mode": _one_of(MODES),
    "layout.": _one_of(LAYOUTS), "pattern.": _one_of(PATTERNS), "dtype.": _one_of(WORKING_DTYPES),
}  # fmt: skip


def make_inputs(contract: Contract, draw: Draw, device: str, *, values: bool = True) -> dict[str, Any]:
    """Return the inputs by name, without the optional ones that the case leaves out.

    Without ``values`` they are only laid out, which is all that a fake device needs. ``Cuts`` have their values either
    way, because shapes follow from them, and lie on the CPU.
    """
    generator = torch.Generator(device).manual_seed(draw.seed) if values else None
    present = (spec for spec in contract.inputs if not spec.optional or spec.name in draw.case.present)
    return {spec.name: make_input(spec, draw, device, generator) for spec in present}
