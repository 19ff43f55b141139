"""Which arguments a Triton kernel writes into, by its source. Kernels do not run, so what they write is not known."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

Names = frozenset[str]
_NONE: Names = frozenset()


def written_arguments(kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> list[Any]:
    """The arguments that a kernel may write into; all, if its source is not to be had."""
    function = _function_of(kernel)
    written = None if function is None else _written_by(function)
    if written is None:
        return [*arguments, *options.values()]
    return _chosen(written, inspect.signature(function).parameters, arguments, options)


def written_by_source(source: str) -> Callable[[Sequence[Any]], list[Any]]:
    """The same for the last function of a source."""
    *_, tree = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    kernel = _Kernel(tree, {})
    written = kernel.written()
    return lambda arguments: _chosen(written, kernel.parameters, arguments, {})


def _chosen(
    written: Names, parameters: Iterable[str], arguments: Sequence[Any], options: Mapping[str, Any]
) -> list[Any]:
    named = {**dict(zip(parameters, arguments, strict=False)), **options}
    return [value for name, value in named.items() if name in written]


def _function_of(kernel: Any) -> Any:
    """The Python function below autotuners and heuristics."""
    while not inspect.isfunction(kernel):
        if not hasattr(kernel, "fn"):
            return None
        kernel = kernel.fn
    return kernel


@functools.cache
def _written_by(function: Any) -> Names | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):  # it has no file, or is a lambda in the middle of an expression
        return None
    return _Kernel(tree, function.__globals__).written() if isinstance(tree, ast.FunctionDef) else None


class _Kernel:
    """A kernel's source. A name stands for the parameters that an address in it may come from."""

    def __init__(self, tree: ast.FunctionDef, functions: Mapping[str, Any]) -> None:
        self._tree = tree
        self._functions = functions
        self.parameters = [argument.arg for argument in (*tree.args.posonlyargs, *tree.args.args)]
        self._behind: dict[str, Names] = {name: frozenset((name,)) for name in self.parameters}

    def written(self) -> Names:
        before = None
        while before != self._behind:  # a loop may carry an address on
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
        """The parameters that the addresses in an expression come from; what is loaded from one is none."""
        if isinstance(value, ast.Name):
            return self._behind.get(value.id, _NONE)
        if isinstance(value, ast.Call) and _called(value) == "load":
            return _NONE
        return _NONE.union(*map(self._addresses, ast.iter_child_nodes(value)))

    def _written_in(self, call: ast.Call) -> Names:
        name = _called(call)
        if name.endswith("store") or name.startswith("atomic_"):
            # tl.store(address, ...), or the method of a descriptor
            return self._addresses(call.func) | _NONE.union(*map(self._addresses, call.args[:1]))
        function = _function_of(self._functions.get(name)) if isinstance(call.func, ast.Name) else None
        if function is None:
            return _NONE
        written = _written_by(function)
        named = dict(zip(inspect.signature(function).parameters, call.args, strict=False))
        named |= {word.arg: word.value for word in call.keywords if word.arg}
        return _NONE.union(
            *(self._addresses(value) for name, value in named.items() if written is None or name in written)
        )


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
