"""Finds the sizes at which an op runs by trial calls: of naive for axes of inputs, of the forms for their options."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ..checks.form_call import FormCall
from ..checks.inputs import Draw
from ..contract import Contract, Dim
from ..contract.dtypes import INTEGER_DTYPES
from ..errors import MeasurementError
from ..laws import NAIVE
from .example import CASE, DRAWN_UP_TO, candidates_for

_CAPS = (16, 64, None)
"""Axes are reduced to the first of these sizes at which naive runs, to make probing quick; None keeps the example's."""
_MULTIPLES = (1, 2, 4, 8, 16, 32, 64)
_MOST_RANGES = 12


def with_sizes_that_run(contract: Contract, tensors: Mapping[str, torch.Tensor]) -> Contract:
    """Return the contract with ranges of integers and dims at which naive and the forms run."""
    sizes = contract.cases[CASE].dims
    ranges = [
        [replace(spec, values=values) for values in candidates_for(tensors[spec.name], sizes)]
        if spec.dtype in INTEGER_DTYPES
        else [spec]
        for spec in contract.inputs
    ]
    running: list[Contract] = []
    for inputs in itertools.islice(itertools.product(*ranges), _MOST_RANGES):
        tried = replace(contract, inputs=inputs)
        if _fault(tried, NAIVE, sizes) is None:
            running.append(_with_dims(tried))
            if all(_fault(running[-1], NAIVE, extreme) is None for extreme in _extremes(running[-1])):
                return running[-1]
    if not running:
        fault = _fault(contract, NAIVE, sizes)
        raise MeasurementError(f"naive raises {fault} where its inputs have the example's shapes and random values")
    return running[0]  # the gate will report what is wrong with it


def _with_dims(contract: Contract) -> Contract:
    """Return the contract with a range for each dim; a dim that runs only at the example's size has only that size."""
    sizes = contract.cases[CASE].dims
    axes = contract.shape_dims()
    base = next(
        (small for cap in _CAPS if _fault(contract, NAIVE, small := _cut(sizes, axes, cap)) is None), dict(sizes)
    )
    dims = {dim: _range(contract, [NAIVE], dim, base, sizes[dim]) for dim in axes}
    for dim in contract.dims.keys() - {*axes}:
        forms = [form for form in contract.forms if dim in contract.options(form, contract.cases[CASE])]
        dims[dim] = _range(contract, forms, dim, base, sizes[dim])
    return replace(contract, dims={dim: dims[dim] for dim in contract.dims})


def _cut(sizes: Mapping[str, int], axes: Sequence[str], cap: int | None) -> dict[str, int]:
    return {dim: min(size, cap) if cap and dim in axes else size for dim, size in sizes.items()}


def _range(contract: Contract, forms: Sequence[str], dim: str, base: Mapping[str, int], size: int) -> Dim:
    for multiple in _MULTIPLES:
        tried = [{**base, dim: multiple}, {**base, dim: 3 * multiple}]
        if size % multiple == 0 and all(_fault(contract, form, sizes) is None for form in forms for sizes in tried):
            return Dim(multiple, max(DRAWN_UP_TO // multiple, 4) * multiple, multiple_of=multiple)
    return Dim(size, size)


def _extremes(contract: Contract) -> list[dict[str, int]]:
    """Return sizes with one axis large and the others small: an index of the wrong dim is out of range there."""
    low = {dim: spec.low for dim, spec in contract.dims.items()}
    return [{**low, dim: contract.dims[dim].high} for dim in contract.shape_dims()]


def _fault(contract: Contract, form: str, sizes: Mapping[str, int]) -> str | None:
    """Return the error that a form raises at these sizes, or None."""
    case = contract.cases[CASE]
    call = FormCall(contract, form, Draw(replace(case, dims=dict(sizes))))
    try:
        with torch.no_grad():
            call.result(call.inputs("cpu"))
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return None
