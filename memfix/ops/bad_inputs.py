"""Bad inputs that many ops share: invalid chunk sizes, and tensors whose dtypes or devices do not fit."""

from __future__ import annotations

from typing import Any

import torch

from ..contract import BadInput, setting


def refused(what: str, message: str, error: type[Exception] = ValueError, /, **values: Any) -> BadInput:
    """A call with some arguments replaced: by a value, or by what a function returns for the original argument."""
    return BadInput(what, setting(**values), message, error)


def bad_chunk_sizes(name: str) -> list[BadInput]:
    """Bad values of a keyword that :func:`memfix.ops.arguments.require_at_least_one` checks."""
    return [
        BadInput("zero chunk", setting(**{name: 0}), f"{name} must be at least 1, got 0"),
        BadInput("negative chunk", setting(**{name: -3}), f"{name} must be at least 1, got -3"),
        BadInput("fractional chunk", setting(**{name: 1.5}), f"{name} must be an int, got 1.5", TypeError),
        BadInput("boolean chunk", setting(**{name: True}), f"{name} must be an int, got True", TypeError),
    ]


def not_floating(*names: str) -> list[BadInput]:
    """An integer tensor in place of each of these floating inputs."""
    return [
        BadInput(
            f"integer {name}",
            setting(**{name: lambda t: t.detach().int()}),
            f"{name} must be floating, got torch.int32",
        )
        for name in names
    ]


def not_integer(name: str, *, rule: str = "int64 or int32") -> list[BadInput]:
    """A float tensor in place of an integer input; ``rule`` names the dtypes that the error asks for."""
    message = f"{name} must be {rule}, got torch.float32"
    return [BadInput(f"floating {name}", setting(**{name: lambda t: t.float()}), message)]


def not_classes(name: str) -> list[BadInput]:
    """Targets outside the vocabulary, for calls with five classes and five targets."""
    rule = f"{name} must be at least 0 and below the vocabulary of 5, or ignore_index -100"
    targets = {"target above the vocabulary": 7, "negative target": -1}
    return [
        BadInput(what, setting(**{name: torch.tensor([0, 1, value, 2, 3])}), f"{rule}; got {value} at index 2")
        for what, value in targets.items()
    ]


def mixed(what: str, *names: str) -> list[BadInput]:
    """Inputs that must have the same ``dtype`` or ``device``, where the last one differs."""
    changes = {"dtype": lambda t: t.double(), "device": lambda t: t.to("meta")}
    message = f"{' and '.join(names)} must have the same {what}, got"
    return [BadInput(f"two {what}s", setting(**{names[-1]: changes[what]}), message)]
