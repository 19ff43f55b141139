"""Writes a contract as Python source."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from string import Template
from typing import Any

from ..contract import WORKING_DTYPES, Contract, Dim, TensorSpec
from ..laws import Budget, Scaling
from .references import Reference


def contract_source(contract: Contract, functions: Mapping[str, str]) -> str:
    """Return ``contract = Contract(...)``. ``functions`` has the names of naive and the forms in the written file."""
    case = next(iter(contract.cases.values()))
    fields: dict[str, Any] = {
        "naive": functions["naive"],
        "forms": _dict((name, functions[name]) for name in contract.forms),
        "dims": _dict((name, _dim(dim)) for name, dim in contract.dims.items()),
        "inputs": _list(map(_call, contract.inputs)),
        "choices": _dict((name, _text(tuple(values))) for name, values in contract.choices.items()),
        "cases": _dict([(case.name, _dict((k, _text(v)) for k, v in {**case.settings, "dtype": case.dtype}.items()))]),
        "dtypes": _text(tuple(contract.dtypes)) if tuple(contract.dtypes) != WORKING_DTYPES else "",
        "budgets": _list(map(_call, contract.budgets)),
        "scaling": _list(map(_call, contract.scaling)),
    }
    given = [f"    {name}={value}," for name, value in fields.items() if value not in ("", "{}", "[]")]
    return "\n".join(["contract = Contract(", f'    "{contract.name}",', *given, ")"])


def names_used(source: str) -> list[str]:
    """Return the public names of memfix that a contract's source uses, for its import."""
    return [name for name in ("Budget", "Contract", "Dim", "Integers", "Scaling", "TensorSpec", "Uniform")
            if f"{name}(" in source]  # fmt: skip


def import_lines(references: Iterable[Reference]) -> str:
    names: dict[str, set[str]] = {}
    for reference in references:
        names.setdefault(reference.module, set()).add(reference.name)
    return "\n".join(f"from {module} import {', '.join(sorted(some))}" for module, some in sorted(names.items()))


def filled_template(template: str, **values: str) -> str:
    """Return a file of ``templates`` with its ``$names`` filled in."""
    from importlib.resources import files

    text = files(__package__).joinpath("templates", template).read_text(encoding="utf-8")
    return Template(text).substitute(values)


def _dim(dim: Dim) -> str:
    return f"Dim({dim.low}, {dim.high}{f', multiple_of={dim.multiple_of}' if dim.multiple_of > 1 else ''})"


def _call(value: TensorSpec | Budget | Scaling) -> str:
    """Return the call that makes a dataclass: its first field by position, others by name unless at their default."""
    (first, *_), *rest = [(field.name, field.default) for field in dataclasses.fields(value)]
    parts = [_text(getattr(value, first))]
    for name, default in rest:
        given = getattr(value, name)
        if name == "shape":
            parts.append(_text(given))
        elif name == "phase" or (given != default and repr(given) not in ("Normal()", "Mask()")):
            parts.append(f"{name}={_text(given)}")
    return f"{type(value).__name__}({', '.join(parts)})"


def _text(value: Any) -> str:
    return repr(value).replace("'", '"')


def _dict(items: Iterable[tuple[str, str]]) -> str:
    return "{" + ", ".join(f'"{key}": {value}' for key, value in items) + "}"


def _list(items: Iterable[str]) -> str:
    lines = [f"        {item}," for item in items]
    return "\n".join(["[", *lines, "    ]"]) if lines else "[]"
