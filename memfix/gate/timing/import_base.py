"""Import the base commit's copy of a package beside today's, in the same process, under another name.

A copy under another name is another package, with its own functions, kernels and caches. Its absolute imports of
itself are renamed while it is loaded, so that it uses none of today's code. The two copies must not share a
``torch.library`` namespace: the later one would silently replace the operators of the earlier, and a form would be
timed against itself.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from pathlib import Path
from typing import Any

from ...errors import ContractError, MeasurementError
from ...registry import Source, in_a_folder_of_its_own
from .base_checkout import AT_BASE


class NotAtBase(Exception):
    """The base lacks the form or its op, which are new, or has a contract that this memfix cannot read."""


def form_at_base(folder: Path, source: Source, op: str, form: str) -> Callable[..., Any]:
    """Return the function of ``form`` in the base's copy of the package, which is in ``folder``."""
    contract = contract_at_base(folder, source, op)
    if form not in contract.forms:
        raise NotAtBase("the form is new")
    function: Callable[..., Any] = contract.function(form)
    return function


def ops_at_base(folder: Path, source: Source) -> list[str]:
    """Return the ops that ``source`` declares in the base's copy of the package."""
    _make_importable(folder)
    return [contract.name for contract in _declared_at_base(folder, source)]


def contract_at_base(folder: Path, source: Source, op: str) -> Any:
    """Return the contract of ``op`` in the base's copy of the package, which is in ``folder``.

    The op may have had a folder of its own there.
    """
    _make_importable(folder)
    declared = _declared_at_base(folder, source)
    if not any(contract.name == op for contract in declared):
        declared = _declared_at_base(folder, in_a_folder_of_its_own(op))
    if shared := _SHARED_NAMESPACES[folder]:
        raise MeasurementError(
            f"both copies register operators in the torch.library namespace {', '.join(sorted(shared))}: "
            "the base would run today's code; derive the namespace from __name__"
        )
    contract = next((contract for contract in declared if contract.name == op), None)
    if contract is None:
        raise NotAtBase("the op is new")
    return contract


@functools.cache
def _declared_at_base(folder: Path, source: Source) -> list[Any]:
    """Return the copy's contracts. Cached, since a module is executed only once."""
    top, dot, rest = source.module.partition(".")
    module = f"{top}{AT_BASE}{dot}{rest}"
    with _recorded_namespaces(_SHARED_NAMESPACES[folder]):
        try:
            return replace(source, module=module).declared()
        except ModuleNotFoundError as error:
            if error.name is not None and f"{module}.".startswith(f"{error.name}."):
                return []
            raise
        except ContractError as error:  # another package's contract, written for an earlier memfix
            raise NotAtBase(f"this memfix cannot read the contract at the base: {error}") from None


def _make_importable(folder: Path) -> None:
    if str(folder) in sys.path:
        return
    hook_of_any_folder = FileFinder.path_hook((_RenamingLoader, SOURCE_SUFFIXES))

    def hook(path: str) -> Any:
        if not Path(path).is_relative_to(folder):
            raise ImportError
        return hook_of_any_folder(path)

    sys.path_hooks.insert(0, hook)
    sys.path.append(str(folder))


class _RenamingLoader(SourceFileLoader):
    """Loads a module of the copy and makes ``import package.part`` in it import the copy's part."""

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:  # type: ignore[override]
        top = self.name.partition(".")[0]
        tree = _RenameImports(top.removesuffix(AT_BASE), top).visit(ast.parse(data, path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True, optimize=_optimize)


class _RenameImports(ast.NodeTransformer):
    """Makes imports of the package ``old`` imports of the package ``new``."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new

    def _renamed(self, module: str) -> str:
        is_ours = f"{module}.".startswith(f"{self._old}.")
        return self._new + module.removeprefix(self._old) if is_ours else module

    def visit_Import(self, node: ast.Import) -> ast.Import:
        names = []
        for alias in node.names:
            renamed = self._renamed(alias.name)
            names.append(ast.alias(renamed, alias.asname))
            if renamed != alias.name and alias.asname is None:  # an import without "as" binds the package's name
                names.append(ast.alias(self._new, self._old))
        node.names = names
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        if node.level == 0 and node.module is not None:
            node.module = self._renamed(node.module)
        return node


_SHARED_NAMESPACES: defaultdict[Path, set[str]] = defaultdict(set)
"""By the folder of a copy, the ``torch.library`` namespaces that it shares with today's package."""


@contextmanager
def _recorded_namespaces(shared: set[str]) -> Iterator[None]:
    """Add to ``shared`` the namespaces that have operators before the ``with`` block and get more in it."""
    import torch

    original, taken = torch.library.Library.__init__, _namespaces_of_operators()

    def recorded(self: Any, namespace: str, kind: str, *arguments: Any, **keywords: Any) -> None:
        if kind in ("DEF", "FRAGMENT") and namespace in taken:
            shared.add(namespace)
        original(self, namespace, kind, *arguments, **keywords)

    torch.library.Library.__init__ = recorded  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.library.Library.__init__ = original  # type: ignore[method-assign]


def _namespaces_of_operators() -> set[str]:
    import torch

    return {name.split("::")[0] for name in torch._C._dispatch_get_all_op_names()}
