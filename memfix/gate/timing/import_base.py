"""Another commit's package beside this one, in the same process, under a name of its own.

A copy in a folder of another name is another package, with its own functions, kernels and caches. What it imports of
itself by its own name is renamed as it is loaded, so that it meets no code of today's. What copies would share is a
``torch.library`` namespace: the later one would silently replace the operators of the earlier, and a form be timed
against itself.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from pathlib import Path
from typing import Any

from ...errors import MeasurementError
from ...registry import Source
from .base_checkout import AT_BASE


class NotAtBase(Exception):
    """Why a form has no time at the base: it, or its op, is new."""


def form_at_base(folder: Path, source: Source, op: str, form: str) -> Callable[..., Any]:
    """The function of that name in the copy."""
    _make_importable(folder)
    declared, namespaces_in_common = _declared_at_base(source)
    if namespaces_in_common:
        raise MeasurementError(
            f"both copies register operators in the torch.library namespace {', '.join(sorted(namespaces_in_common))}: "
            "the base would run today's code; derive the namespace from __name__"
        )
    contract = next((contract for contract in declared if contract.name == op), None)
    if contract is None:
        raise NotAtBase("the op is new")
    if form not in contract.forms:
        raise NotAtBase("the form is new")
    return contract.function(form)


@functools.cache
def _declared_at_base(source: Source) -> tuple[list[Any], set[str]]:
    """And where the copy registers operators though this package does. Remembered: a module is run only once."""
    top, dot, rest = source.module.partition(".")
    module = f"{top}{AT_BASE}{dot}{rest}"
    with _namespaces_watched() as met:
        try:
            return Source(module, source.attribute, source.spelled).declared(), met
        except ModuleNotFoundError as error:
            if error.name is not None and f"{module}.".startswith(f"{error.name}."):
                return [], met
            raise


def _make_importable(folder: Path) -> None:
    if str(folder) in sys.path:
        return
    everywhere = FileFinder.path_hook((_Renaming, SOURCE_SUFFIXES))

    def in_the_folder(path: str) -> Any:
        if not Path(path).is_relative_to(folder):
            raise ImportError
        return everywhere(path)

    sys.path_hooks.insert(0, in_the_folder)
    sys.path.append(str(folder))


class _Renaming(SourceFileLoader):
    """Loads a module of the copy. ``import package.part`` in it means the copy's part."""

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:  # type: ignore[override]
        top = self.name.partition(".")[0]
        tree = _Renamed(top.removesuffix(AT_BASE), top).visit(ast.parse(data, path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True, optimize=_optimize)


class _Renamed(ast.NodeTransformer):
    def __init__(self, name: str, other: str) -> None:
        self._name, self._other = name, other

    def _renamed(self, module: str) -> str:
        is_ours = f"{module}.".startswith(f"{self._name}.")
        return self._other + module.removeprefix(self._name) if is_ours else module

    def visit_Import(self, node: ast.Import) -> ast.Import:
        names = []
        for alias in node.names:
            renamed = self._renamed(alias.name)
            names.append(ast.alias(renamed, alias.asname))
            if renamed != alias.name and alias.asname is None:  # which binds the package's own name
                names.append(ast.alias(self._other, self._name))
        node.names = names
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        if node.level == 0 and node.module is not None:
            node.module = self._renamed(node.module)
        return node


@contextmanager
def _namespaces_watched() -> Iterator[set[str]]:
    """Those in which operators were before, and to which more are added inside."""
    import torch

    original, taken = torch.library.Library.__init__, _namespaces_of_operators()
    met: set[str] = set()

    def watched(self: Any, namespace: str, kind: str, *arguments: Any, **keywords: Any) -> None:
        if kind in ("DEF", "FRAGMENT") and namespace in taken:
            met.add(namespace)
        original(self, namespace, kind, *arguments, **keywords)

    torch.library.Library.__init__ = watched  # type: ignore[assignment, method-assign]
    try:
        yield met
    finally:
        torch.library.Library.__init__ = original  # type: ignore[method-assign]


def _namespaces_of_operators() -> set[str]:
    import torch

    return {name.split("::")[0] for name in torch._C._dispatch_get_all_op_names()}
