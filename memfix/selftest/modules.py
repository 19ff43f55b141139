"""Which modules the forms of an op live in, and a second load of them with changed source, in memory only."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from ..contract import Contract
from ..errors import UsageError
from ..registry import Source, all_contracts, source_of
from .text import Text


def home_of(function: Callable[..., Any]) -> tuple[str, str]:
    """The module in which a form is written, and the name of its function there; of an ``apply``, its ``forward``."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type):
        return owner.__module__, "forward"
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    return getattr(function, "__module__", "") or "", getattr(function, "__name__", "")


def texts_of(contract: Contract, source: Source, forms: Sequence[str]) -> list[Text]:
    """The modules that ``forms`` are written in, and those that they import from the same package.

    Contracts and naive are left out, unless forms stand in the same file.
    """
    homes = dict.fromkeys(home_of(contract.forms[form].function)[0] for form in forms)
    packages = {home.rpartition(".")[0] for home in homes}
    contracts = {source_of(op).module for op in all_contracts()}
    law = {source.module, home_of(contract.naive)[0], *contracts} - homes.keys()
    found: dict[str, Text] = {}
    waiting = list(homes)
    while waiting:
        name = waiting.pop(0)
        if name in found or name in law:
            continue
        found[name] = _text(contract, name)
        inside = [n for n in imported_by(found[name]) if n.rpartition(".")[0] in packages and n.rpartition(".")[0]]
        waiting += [n for n in inside if _is_module(n)]
    return list(found.values())


def _text(contract: Contract, name: str) -> Text:
    spec = importlib.util.find_spec(name) if name and name != "__main__" else None
    if spec is None or not isinstance(spec.origin, str) or not spec.origin.endswith(".py"):
        where = f"the module {name}" if name else "a function without a module"
        raise UsageError(f"{contract.name}: a form is in {where}, whose source cannot be read; put it in a .py file")
    return Text.read(name, spec.origin)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a name in a module, not in a package
        return False


def imported_by(text: Text) -> Iterator[str]:
    """Absolute names of what a module imports anywhere; ``from a import b`` may mean ``a`` or ``a.b``."""
    is_package = text.path.endswith("__init__.py")
    parts = text.module.split(".")
    for node in ast.walk(text.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = parts[: len(parts) - node.level + is_package] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def spans_of_naive(contract: Contract, text: Text) -> list[tuple[int, int]]:
    """The lines of naive where it stands in the same file as a form."""
    module, name = home_of(contract.naive)
    if module != text.module:
        return []
    functions = (function.node for function in text.functions() if function.name == name)
    return [(node.lineno, node.end_lineno or node.lineno) for node in functions]


def using(texts: Sequence[Text]) -> list[Contract]:
    """The contracts that would notice a change of one of these modules."""
    changed, homes = {text.module for text in texts}, {name: source_of(name).module for name in all_contracts()}
    noticing = _importing(changed, {*changed, *homes.values()})
    return [contract for name, contract in all_contracts().items() if homes[name] in noticing]


# ---------------------------------------------------------------- loading again
def loaded_again(contract: Contract, source: Source, changed: Mapping[str, str]) -> Contract:
    """``contract`` as its modules declare it with ``changed`` source, held against the naive that was there before."""
    stale = _stale(contract, source, set(changed))
    for name in stale:
        del sys.modules[name]
        parent, _, child = name.rpartition(".")
        if parent in sys.modules and vars(sys.modules[parent]).get(child) is not None:
            delattr(sys.modules[parent], child)
    sys.meta_path.insert(0, _Changed(changed))
    again = next(found for found in source.declared() if found.name == contract.name)
    return replace(again, naive=contract.naive)


def _stale(contract: Contract, source: Source, changed: set[str]) -> set[str]:
    """Loaded modules that must be loaded again: those that import a changed one, directly or through others."""
    must_go = {*changed, source.module}
    return _importing(must_go, must_go) - ({home_of(contract.naive)[0]} - must_go)


def _importing(changed: set[str], near: set[str]) -> set[str]:
    """Loaded modules among ``changed``, and those that import one of them, in the packages of ``near``."""
    roots = tuple({f"{_root(name)}." for name in near})
    inside = {
        name: set(imported_by(Text(name, path, linecache_text(path))))
        for name, module in list(sys.modules.items())
        if f"{name}.".startswith(roots) and (path := getattr(module, "__file__", None)) and path.endswith(".py")
    }
    stale = changed & sys.modules.keys()
    while more := {name for name, imports in inside.items() if name not in stale and imports & stale}:
        stale |= more
    return stale


@functools.cache
def linecache_text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _root(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "memfix" else parts[0]


class _Changed:
    """Finds changed modules. Triton reads the source of its kernels: it is told the changed lines, too."""

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
    """Do two texts compile to the same instructions?"""
    return _instructions(compile(one, "", "exec")) == _instructions(compile(other, "", "exec"))


def _instructions(code: CodeType) -> tuple[Any, ...]:
    constants = tuple(
        _instructions(const) if isinstance(const, CodeType) else (type(const), const) for const in code.co_consts
    )
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants
