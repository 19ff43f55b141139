"""Find the files of a checkout on which a module depends, by reading source: nothing is imported."""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Set
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def package_of(module: str) -> Path | None:
    """Return the folder of ``module``'s top-level package, or the file of a single module; None if it is not found."""
    spec = find_module(module.partition(".")[0])
    if spec is None:
        return None
    places = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.has_location and spec.origin else [])]
    return Path(places[0]).resolve() if places else None


def find_module(name: str) -> ModuleSpec | None:
    """Return the spec of a module, without importing the packages above it."""
    return _found(name, tuple(sys.path))


@functools.cache
def _found(name: str, _: tuple[str, ...]) -> ModuleSpec | None:
    parent = name.rpartition(".")[0]
    try:
        if not parent:
            return importlib.util.find_spec(name)
        above = find_module(parent)
        folders = above.submodule_search_locations if above else None
        return PathFinder.find_spec(name, list(folders)) if folders else None
    except (ImportError, ValueError):  # raised by a broken finder, or for __main__
        return None


def files_used(
    modules: Iterable[str], is_ours: Callable[[str], bool], not_through: Set[str] = frozenset()
) -> set[Path]:
    """Return the files of ``modules`` and of all modules of our packages that they import, directly or indirectly.

    The ``__init__.py`` of a folder on the way counts as well, but not what it imports, which is often everything. A
    module that is imported and missing counts as the files where it could be, since one may have been deleted. Modules
    in ``not_through`` are not followed.
    """
    waiting, seen, files = [*modules], {*not_through}, set[Path]()
    for name in waiting:  # the loop appends to the list
        if name in seen or not is_ours(name.partition(".")[0]):
            continue
        seen.add(name)
        path = _source_of(name)
        if path is None:
            files |= _where_it_could_be(name)
            continue
        files |= {path, *_files_of_parents(name)}
        waiting += _imports_of(name, path)
    return files


@functools.cache
def _imports_of(name: str, path: Path) -> tuple[str, ...]:
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (OSError, SyntaxError, ValueError):  # the file itself counts, and running the op reports the error
        return ()
    return tuple(dict.fromkeys(imported_by(tree, name, is_package=path.name == "__init__.py")))


def imported_by(tree: ast.Module, module: str, *, is_package: bool) -> Iterator[str]:
    """Yield the absolute names of all imports of a module; ``from a import b`` may mean ``a`` or ``a.b``."""
    parts = module.split(".")
    depth = len(parts) + is_package
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = parts[: depth - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def _source_of(name: str) -> Path | None:
    spec = find_module(name)
    return Path(spec.origin).resolve() if spec and spec.origin and spec.origin.endswith(".py") else None


def _files_of_parents(name: str) -> set[Path]:
    parts = name.split(".")
    above = (_source_of(".".join(parts[:number])) for number in range(1, len(parts)))
    return {path for path in above if path is not None}


def _where_it_could_be(name: str) -> set[Path]:
    """Return the paths that a missing module could have; none where ``name`` is a name in a module."""
    parent, _, last = name.rpartition(".")
    spec = find_module(parent) if parent else None
    folders = [Path(folder).resolve() for folder in (spec.submodule_search_locations or ())] if spec else []
    return {folder / file for folder in folders for file in (f"{last}.py", f"{last}/__init__.py")}
