"""Copies a function's source into a file of its own, with the parts of its module that it uses and their imports."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

from ..errors import UsageError


def standalone_source(function: Callable[..., Any], name: str) -> str:
    """Return the source of ``function``, renamed to ``name``, after the functions and constants that it uses."""
    module = inspect.getmodule(function)
    if module is None or not inspect.isfunction(function):
        raise UsageError(f"{function!r} must be a function of a module, so that its source can be copied")
    text = inspect.getsource(module)
    body = ast.parse(text).body
    defined = {target: node for node in body for target in _targets(node)}
    if function.__name__ not in defined:
        raise UsageError(
            f"{function.__name__} must be defined at the top of {module.__name__}, not made by another call"
        )
    needed: dict[str, ast.stmt] = {}
    waiting = [function.__name__]
    while waiting:
        target = waiting.pop()
        if target in defined and target not in needed:
            needed[target] = defined[target]
            waiting += [node.id for node in ast.walk(defined[target]) if isinstance(node, ast.Name)]
    lines = text.splitlines()
    parts = []
    for node in body:
        if node in needed.values():
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            parts.append("\n".join(lines[first - 1 : node.end_lineno]))
    used = {node.id for some in needed.values() for node in ast.walk(some) if isinstance(node, ast.Name)}
    imports = [ast.unparse(node) for node in body if _bound_by(node) & used]
    own = "\n\n\n".join(parts).replace(f"def {function.__name__}(", f"def {name}(")
    head = "\n\n".join(filter(None, ["from __future__ import annotations", "\n".join(imports)]))
    return f"{head}\n\n\n{own}"


def _targets(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _bound_by(node: ast.stmt) -> set[str]:
    """Return the names that an import statement binds."""
    if not isinstance(node, (ast.Import, ast.ImportFrom)) or getattr(node, "module", "") == "__future__":
        return set()
    return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
