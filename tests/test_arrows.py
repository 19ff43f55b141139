"""The structure of the design: imports point down only, some rooms do not know each other, functions are short."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "memfix"

# from the top floor down; an import may only go to a lower floor, or within a room
FLOORS = [
    {"__main__"},
    {"cli", "pytest_plugin"},
    {"suite", "selftest", "scaffold", "integrations"},
    {"gate", "calibration", "incidents"},
    {"registry"},
    {"fit"},
    {"ranks"},
    {"checks", "measure", "watch", "ops", "pictures"},
    {"meters", "contract"},
    {"laws"},
    {"formula", "provenance", "orphans", "versions", "cuda_kernels"},
    {"atomic_write"},
    {"units", "errors", "progress"},
]
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
NEVER = [
    ("checks", "registry"),
    ("checks", "ops"),
    ("meters", "ops"),
    ("meters", "contract"),
    ("measure", "contract"),
    ("watch", "contract"),
]


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Dotted names below ``memfix`` that a module imports at its top, inside a function or for types."""
    package = path.relative_to(PACKAGE.parent).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            target = ".".join([*base[1:], *(node.module or "").split(".")]).strip(".")
            yield from ([target] if target else [alias.name for alias in node.names])


def room(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down_only(path: Path) -> None:
    here = room(path)
    if here == "__init__":
        return
    for name in imports(path):
        there = name.split(".")[0]
        if there in ("", here) or there not in FLOOR_OF:
            continue
        assert FLOOR_OF[there] > FLOOR_OF[here], f"{here} must not import {name}"
        assert (here, there) not in NEVER, f"{here} must not know {there}"


def test_every_room_has_a_floor() -> None:
    assert {room(path) for path in modules()} - {"__init__"} == FLOOR_OF.keys()


@pytest.mark.parametrize("path", sorted((PACKAGE / "ops").rglob("*.py")), ids=lambda path: "/".join(path.parts[-2:]))
def test_forms_and_naive_do_not_know_each_other(path: Path) -> None:
    own = set(imports(path))
    op = f"ops.{path.parent.name}"
    if path.name == "naive.py":
        assert not own, "naive is the law: it imports nothing of ours"
    elif not path.name.endswith("contract.py"):
        assert f"{op}.naive" not in own, "only the contract imports naive"


def imported_files(path: Path) -> Iterator[Path]:
    """The files of ``memfix`` that a module imports at its top or for types; imports inside functions do not count."""
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom) and node.level:
            target = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            for alias in node.names:
                inside = target / alias.name
                files = inside.with_suffix(".py"), inside / "__init__.py", target.with_suffix(".py")
                yield next((file for file in files if file.is_file()), target / "__init__.py")


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {path: set(imported_files(path)) for path in modules()}
    graphlib.TopologicalSorter(graph).prepare()  # raises a CycleError that names the files of a circle


def test_no_function_is_longer_than_a_screen() -> None:
    lengths = {
        f"{path.relative_to(PACKAGE)}: {node.name}": node.end_lineno - node.lineno + 1
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None
    }
    assert {name: lines for name, lines in lengths.items() if lines >= 60} == {}
