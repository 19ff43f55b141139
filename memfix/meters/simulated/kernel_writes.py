"""Finds in a Triton kernel's source the arguments it writes into: no kernel runs, so these values become unknown."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

Names = frozenset[str]
_NONE: Names = frozenset()


def written_arguments(kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> list[Any]:
    """The arguments that a kernel may write into; all of them if its source is not available."""
    function = _function_of(kernel)
    source = None if function is None else _source_of(function)
    return [*arguments, *options.values()] if source is None else source.written_of(arguments, options)


def written_by_source(source: str) -> Callable[[Sequence[Any]], list[Any]]:
    """Return a function that picks, of a call's arguments, those that the last function in ``source`` writes into."""
    *_, tree = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    return _Source(tree, {}).written_of


def _function_of(kernel: Any) -> Any:
    """The Python function of a kernel, without the autotuners and heuristics around it."""
    while not inspect.isfunction(kernel):
        if not hasattr(kernel, "fn"):
            return None
        kernel = kernel.fn
    return kernel


@functools.cache
def _source_of(function: Any) -> _Source | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):  # it has no file, or is a lambda in the middle of an expression
        return None
    return _Source(tree, function.__globals__) if isinstance(tree, ast.FunctionDef) else None


class _Source:
    """The parsed source of a kernel. ``_behind`` maps each name to the parameters that its address may come from."""

    def __init__(self, tree: ast.FunctionDef, functions: Mapping[str, Any]) -> None:
        """``functions`` are the globals of the kernel's module, with the functions that it may call."""
        self._tree = tree
        self._functions = functions
        arguments = (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)
        self._parameters = [argument.arg for argument in arguments]
        self._behind: dict[str, Names] = {name: frozenset((name,)) for name in self._parameters}

    def written_of(self, arguments: Sequence[Any], options: Mapping[str, Any] = MappingProxyType({})) -> list[Any]:
        """The arguments that the kernel writes into."""
        named = {**dict(zip(self._parameters, arguments, strict=False)), **options}
        return [value for name, value in named.items() if name in self._written]

    @functools.cached_property
    def _written(self) -> Names:
        before = None
        while before != self._behind:  # repeat: in a loop, an address may reach a name that is assigned earlier
            before = {**self._behind}
            for target, value in self._assignments():
                for name in (node.id for node in ast.walk(target) if isinstance(node, ast.Name)):
                    self._behind[name] = self._behind.get(name, _NONE) | self._addresses(value)
        calls = (node for node in ast.walk(self._tree) if isinstance(node, ast.Call))
        return _NONE.union(*(self._written_in(call) for call in calls))

    def _assignments(self) -> Iterator[tuple[ast.expr, ast.expr]]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Assign):
                yield from ((target, node.value) for target in node.targets)
            elif isinstance(node, (ast.AugAssign, ast.NamedExpr)) or (isinstance(node, ast.AnnAssign) and node.value):
                yield node.target, node.value  # type: ignore[misc]

    def _addresses(self, value: ast.AST) -> Names:
        """The parameters that the addresses in an expression come from. A loaded value counts as no address."""
        if isinstance(value, ast.Name):
            return self._behind.get(value.id, _NONE)
        if isinstance(value, ast.Call) and _callee_name(value) == "load":
            return _NONE
        return _NONE.union(*map(self._addresses, ast.iter_child_nodes(value)))

    def _written_in(self, call: ast.Call) -> Names:
        name = _callee_name(call)
        if name.endswith("store") or name.startswith("atomic_"):
            # tl.store(address, ...), or the method of a descriptor
            return self._addresses(call.func) | _NONE.union(*map(self._addresses, call.args[:1]))
        function = _function_of(self._functions.get(name)) if isinstance(call.func, ast.Name) else None
        if function is None:
            return _NONE
        named = {word.arg: word.value for word in call.keywords if word.arg}
        return _NONE.union(*map(self._addresses, written_arguments(function, call.args, named)))


def _callee_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
