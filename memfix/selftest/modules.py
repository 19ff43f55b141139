"""Finds the modules that define the forms of an op, and reloads them in memory with changed source."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from ..contract import Contract
from ..errors import UsageError
from ..gate.definitions import definition_of
from ..gate.module_graph import imported_by
from ..registry import Source, all_contracts, source_of
from .source import SourceFile


def source_files_of(contract: Contract, source: Source, forms: Sequence[str]) -> list[SourceFile]:
    """Return the modules that define ``forms``, and the modules that they import from the same package.

    Contracts and naive are left out, unless a form is defined in the same file.
    """
    waiting = list(dict.fromkeys(definition_of(contract.forms[form].function)[0] for form in forms))
    packages = {name.rpartition(".")[0] for name in waiting} - {""}
    contracts = {source_of(op).module for op in all_contracts()}
    left_out = {source.module, definition_of(contract.naive)[0], *contracts} - {*waiting}
    found: dict[str, SourceFile] = {}
    for name in waiting:  # the loop appends to the list
        if name not in found and name not in left_out:
            found[name] = _source_file(contract, name)
            waiting += [n for n in _imports(found[name]) if n.rpartition(".")[0] in packages and _is_module(n)]
    return list(found.values())


def _source_file(contract: Contract, name: str) -> SourceFile:
    spec = importlib.util.find_spec(name) if name and name != "__main__" else None
    if spec is None or not isinstance(spec.origin, str) or not spec.origin.endswith(".py"):
        where = f"the module {name}" if name else "a function without a module"
        raise UsageError(f"{contract.name}: a form is in {where}, whose source cannot be read; put it in a .py file")
    return SourceFile.read(name, spec.origin)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent is a module, not a package
        return False


def _imports(file: SourceFile) -> Iterator[str]:
    return imported_by(file.tree, file.module, is_package=file.path.endswith("__init__.py"))


def naive_lines(contract: Contract, file: SourceFile) -> list[tuple[int, int]]:
    """Return the first and last line of naive, if ``file`` defines it."""
    module, name = definition_of(contract.naive)
    found = [function.node for function in file.functions if (file.module, function.name) == (module, name)]
    return [(node.lineno, node.end_lineno or node.lineno) for node in found]


def contracts_using(files: Sequence[SourceFile]) -> list[Contract]:
    """Return the contracts whose modules import one of these files, directly or through others."""
    changed, modules = {file.module for file in files}, {name: source_of(name).module for name in all_contracts()}
    importing = _importing(changed, {*changed, *modules.values()})
    return [contract for name, contract in all_contracts().items() if modules[name] in importing]


# ---------------------------------------------------------------- reloading


def reload_contract(contract: Contract, source: Source, changed: Mapping[str, str]) -> Contract:
    """Return ``contract`` as its modules declare it with ``changed`` source, but with the original naive function."""
    must_reload = {*changed, source.module}
    for name in _importing(must_reload, must_reload) - ({definition_of(contract.naive)[0]} - must_reload):
        del sys.modules[name]
        parent, _, child = name.rpartition(".")
        if parent in sys.modules and vars(sys.modules[parent]).get(child) is not None:
            delattr(sys.modules[parent], child)
    sys.meta_path.insert(0, _ChangedFinder(changed))
    again = next(found for found in source.declared() if found.name == contract.name)
    return replace(again, naive=contract.naive)


def _importing(changed: set[str], near: set[str]) -> set[str]:
    """Return the loaded modules of ``changed``, and the modules in the packages of ``near`` that import one of them,
    directly or through others."""
    packages = tuple(f"{_package(name)}." for name in near)
    imports = {
        name: _imports_of(name, path)
        for name, module in list(sys.modules.items())
        if f"{name}.".startswith(packages) and (path := getattr(module, "__file__", None)) and path.endswith(".py")
    }
    found = changed & sys.modules.keys()
    while more := {name for name, imported in imports.items() if name not in found and imported & found}:
        found |= more
    return found


@functools.cache
def _imports_of(name: str, path: str) -> frozenset[str]:
    return frozenset(_imports(SourceFile.read(name, path)))


def _package(name: str) -> str:
    """Return the top-level package of a module; for memfix's own modules, the package directly inside memfix."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "memfix" else parts[0]


class _ChangedFinder:
    """A finder of changed modules. Triton reads kernels' source from ``linecache``, so it updates that cache too."""

    def __init__(self, changed: Mapping[str, str]) -> None:
        self._changed = changed

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._changed:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)))
        assert spec.origin is not None
        text = self._changed[name]
        linecache.cache[spec.origin] = (len(text), None, text.splitlines(keepends=True), spec.origin)
        spec.loader = _FromMemory(name, spec.origin, text)
        return spec


class _FromMemory(SourceFileLoader):
    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = compile(self._text, self.path, "exec", dont_inherit=True)
        return code


def same_code(one: str, other: str) -> bool:
    """Whether two texts compile to the same instructions."""
    return _instructions(compile(one, "", "exec")) == _instructions(compile(other, "", "exec"))


def _instructions(code: CodeType) -> tuple[Any, ...]:
    constants = tuple(
        _instructions(const) if isinstance(const, CodeType) else (type(const), const) for const in code.co_consts
    )
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants
