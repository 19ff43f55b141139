"""Find the lines that define forms and contracts, for findings without a better line."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checks.finding import Finding
from ..contract import Contract
from ..errors import ContractError
from ..meters.timeline import Line
from ..registry import Source, source_of
from .judge import Verdict
from .module_graph import find_module


def definition_of(function: Callable[..., Any]) -> tuple[str, str]:
    """Return the module and the name of a form's function; for ``apply`` of an autograd function, ``forward``."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type):
        return owner.__module__, "forward"
    function = _unwrapped(function)
    return getattr(function, "__module__", "") or "", getattr(function, "__name__", "")


def with_definitions(verdict: Verdict, contracts: Iterable[Contract]) -> Verdict:
    """Return ``verdict``; each failure without a line gets that of the failed form, or else of its contract."""
    by_name = {contract.name: contract for contract in contracts}

    def placed(finding: Finding) -> Finding:
        contract = by_name.get(finding.op)
        if finding.source or finding.status not in ("fail", "error") or contract is None:
            return finding
        return replace(finding, source=_line_of(contract, finding.form))

    return replace(verdict, findings=tuple(map(placed, verdict.findings)))


def _line_of(contract: Contract, form: str) -> str:
    """Return ``loss.py:41``; empty where neither the form nor the contract is in a file."""
    try:
        function = contract.function(form)
        code = getattr(_unwrapped(getattr(getattr(function, "__self__", None), "forward", function)), "__code__", None)
    except ContractError:  # a finding about the whole op
        code = None
    if code is not None and Path(code.co_filename).is_file():
        return Line(code.co_filename, code.co_firstlineno, code.co_name).place
    try:
        return _line_of_contract(source_of(contract.name), contract.name)
    except (StopIteration, KeyError):  # it is not registered
        return ""


def _line_of_contract(source: Source, op: str) -> str:
    """Return the line of ``Contract("op", ...)`` in its module, or else the first line."""
    spec = find_module(source.module)
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return ""
    tree = ast.parse(Path(spec.origin).read_bytes())
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    named = (call.lineno for call in calls if op in map(_constant, [*call.args[:1], *(k.value for k in call.keywords)]))
    return Line(spec.origin, min(named, default=1), "").place


def _constant(node: ast.expr) -> Any:
    return node.value if isinstance(node, ast.Constant) else None


def _unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.unwrap(function)
