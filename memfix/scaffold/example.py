"""Reads a contract from an example call: its inputs, its dims, and one case with the example's sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..contract import Contract, Dim, Integers, TensorSpec, Uniform, Values, parameters_of
from ..contract.dtypes import INTEGER_DTYPES, WORKING, WORKING_DTYPES
from ..errors import MeasurementError, UsageError

CASE = "example"
_NAMES = "N D V K M P Q R S T U W X Y Z".split()
DRAWN_UP_TO = 70
"""The largest size drawn for equality: enough for a few chunks and for sizes around their ends."""


def arguments_of(example: Callable[..., Any], reference: str, naive: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments of a call by name: ``example()`` gives them as a dict, or as a tuple in naive's order."""
    try:
        given = example()
    except Exception as error:
        raise MeasurementError(f"--example: {reference} raises {type(error).__name__}: {error}") from error
    if isinstance(given, torch.Tensor):
        given = (given,)
    if isinstance(given, (tuple, list)):
        names = [parameter.name for parameter in parameters_of(naive)]
        if len(given) > len(names):
            raise UsageError(f"--example: {reference} returns {len(given)} arguments, and naive takes {len(names)}")
        given = dict(zip(names, given, strict=False))
    if not isinstance(given, Mapping) or not any(isinstance(value, torch.Tensor) for value in given.values()):
        got = type(given).__name__
        raise UsageError(f"--example: {reference} must return the arguments, a dict or a tuple with tensors, got {got}")
    return dict(given)


def contract_of_example(
    name: str,
    naive: Callable[..., Any],
    forms: Mapping[str, Callable[..., Any]],
    arguments: Mapping[str, Any],
    dtypes: Sequence[str] = WORKING_DTYPES,
) -> Contract:
    """Return a contract without laws. Integers are bounded by the smallest dim that fits; ``probing`` tries others."""
    tensors = _inputs_in_order(naive, arguments)
    settings = {key: value for key, value in arguments.items() if key not in tensors}
    options = {key: value for key, value in settings.items() if type(value) is int}
    axes = _axes(tensors, taken={*settings, "e"})
    sizes = {
        axis: size
        for key, tensor in tensors.items()
        for axis, size in zip(axes[key], tensor.shape, strict=True)
        if not axis.isdigit()
    }
    working = working_dtype(tensors)
    return Contract(
        name,
        naive=naive,
        forms=forms,
        dims={key: Dim(1, max(size, DRAWN_UP_TO)) for key, size in {**sizes, **options}.items()},
        inputs=[_spec(key, tensor, axes[key], {**sizes, **options}, working) for key, tensor in tensors.items()],
        choices={key: (value,) for key, value in settings.items() if key not in options},
        cases={CASE: {**sizes, **settings, "dtype": working}},
        dtypes=tuple(dtypes),
    )


def working_dtype(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the dtype of the first floating input that requires a gradient, or else of the first floating input."""
    floating = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    by_grad = sorted(floating, key=lambda tensor: not tensor.requires_grad)
    return _spelled(by_grad[0]) if by_grad else "float32"


def candidates_for(tensor: torch.Tensor, sizes: Mapping[str, int]) -> Iterator[Integers]:
    """Yield possible ranges of an integer input: below each dim that is larger than all its values, smallest first."""
    values = [] if tensor.is_meta else tensor.unique().tolist()
    values = [value for value in values if value != only_negative_value(tensor)] or [0]
    low, high = min(0, *values), max(values) + 1
    for dim, size in sorted(sizes.items(), key=lambda item: item[1]):
        if size >= high:
            yield Integers(low, dim) if low else Integers(dim)
    yield Integers(low, high)


def only_negative_value(tensor: torch.Tensor) -> int | None:
    """Return the only negative value of an integer tensor, such as an ignore index; None if it has none or several."""
    below = [] if tensor.is_meta else tensor[tensor < 0].unique().tolist()
    return below[0] if len(below) == 1 else None


def _inputs_in_order(naive: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors in the order of naive's parameters."""
    names = [parameter.name for parameter in parameters_of(naive)]
    for key, value in arguments.items():
        if isinstance(value, torch.Tensor) and key not in names:
            raise UsageError(f"--example: naive takes no {key!r}; it takes {', '.join(names)}")
    return {key: arguments[key] for key in names if isinstance(arguments.get(key), torch.Tensor)}


def _axes(tensors: Mapping[str, torch.Tensor], taken: set[str]) -> dict[str, list[str]]:
    """Name each tensor's axes: by its suffix as in ``hidden_TD``, else with one name per size, and "1" for size 1."""
    by_suffix = {key: match[1] for key in tensors if (match := re.search(r"_([A-Z]+)$", key))}
    names: dict[int, str] = {}
    axes: dict[str, list[str]] = {}
    for key, tensor in tensors.items():
        own = by_suffix.get(key, "")
        if len(own) == tensor.dim():
            axes[key] = list(own)
            names |= {size: letter for size, letter in zip(tensor.shape, own, strict=True) if size not in names}
    for key, tensor in tensors.items():
        if key not in axes:
            for size in tensor.shape:
                if size > 1 and size not in names:
                    names[size] = next(name for name in _NAMES if name not in {*names.values(), *taken})
            axes[key] = [names[size] if size > 1 else str(size) for size in tensor.shape]
    return axes


def _spec(key: str, tensor: torch.Tensor, axes: list[str], sizes: Mapping[str, int], working: str) -> TensorSpec:
    own = _spelled(tensor)
    values: Values | None = None
    sometimes = None
    if own in INTEGER_DTYPES:
        values, sometimes = next(candidates_for(tensor, sizes)), only_negative_value(tensor)
    elif tensor.is_floating_point() and not tensor.is_meta and tensor.numel():
        low, high = float(tensor.detach().min()), float(tensor.detach().max())
        if low >= 0 and high > 0:  # such as probabilities: a normal number could be below zero
            values = Uniform(0.0, float(f"{high * 1.01:.2g}"))
    dtype = WORKING if own == working else own
    return TensorSpec(key, " ".join(axes), dtype=dtype, grad=tensor.requires_grad, values=values, sometimes=sometimes)


def _spelled(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
