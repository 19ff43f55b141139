"""Measure how the compared calls cover kernels: each branch taken, each loop run twice, each mask partly true.

If all drawn shapes have one tile only, no loop runs twice and no mask hides an element, so equality does not test them.
The interpreter runs kernels as Python functions, where coverage is counted.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memfix.checks import interpreter as checks
from memfix.checks.interpreter import _Interpreter

Place = tuple[str, int]
"""File and line."""


@dataclass
class Coverage:
    """What has run so far, by place."""

    loops: dict[Place, int] = field(default_factory=dict)
    """The most rounds in one execution of the loop."""
    branches: dict[Place, set[bool]] = field(default_factory=dict)
    """Truth values that the condition has not had. False is not required where no code runs only then."""
    masks: dict[Place, bool] = field(default_factory=dict)
    """Whether it masked some elements and not others."""

    def missing(self) -> list[str]:
        """Return what no call has covered, as sentences in the order of the source."""
        found = [(place, "no call comes round this loop twice") for place, rounds in self.loops.items() if rounds < 2]
        found += [(place, "no call takes this branch") for place, left in self.branches.items() if True in left]
        found += [(place, "every call takes this branch") for place, left in self.branches.items() if False in left]
        found += [(place, "this mask is all true or all false") for place, cuts in self.masks.items() if not cuts]
        return [f"{Path(file).name}:{line}: {what}" for (file, line), what in sorted(found)]


@dataclass
class Watch:
    """Coverage in this process: replace ``now`` to count anew."""

    now: Coverage = field(default_factory=Coverage)


WATCH = Watch()


class CoverageInterpreter(_Interpreter):
    """A child that interprets kernels, as the checks do, and counts their coverage."""

    def __init__(self) -> None:
        super().__init__("spawn")
        self.call(watch)


def watch() -> None:
    """Count coverage in a process that interprets kernels. Called before the first one."""
    from triton.runtime import interpreter as module

    interpreter: Any = module
    interpreter.memfix_rounds, interpreter.memfix_taken = _rounds, _taken
    not_kernels = (str(Path(checks.__file__).parent), str(Path(interpreter.__file__).parents[1]))
    rewrite, watching = interpreter.FunctionRewriter._transform_ast, _watching(interpreter.ASTTransformer)()

    def rewritten(rewriter: Any, source: str) -> Any:
        if not rewriter.filename.startswith(not_kernels):
            rewriter.ast_transformer = watching
        return rewrite(rewriter, source)

    interpreter.FunctionRewriter._transform_ast = rewritten
    builder = interpreter.InterpreterBuilder
    builder.create_masked_load = _noting_masks(builder.create_masked_load, 1, not_kernels)
    builder.create_masked_store = _noting_masks(builder.create_masked_store, 2, not_kernels)


def _watching(transformer: Any) -> Any:
    """The interpreter's own rewriting of a kernel, which also counts every loop and every condition."""

    class Watching(transformer):
        def visit_For(self, node: ast.For) -> ast.For:
            node.iter = _called("memfix_rounds", node.iter)
            return _visited(self, node)

        def visit_If(self, node: ast.If | ast.While) -> ast.If | ast.While:
            leaves = isinstance(node, ast.If) and isinstance(node.body[-1], (ast.Return, ast.Break, ast.Continue))
            node.test = _called("memfix_taken", node.test, ast.Constant(bool(node.orelse) or leaves))
            return _visited(self, node)

        visit_While = visit_If

    return Watching


def _visited(transformer: Any, node: Any) -> Any:
    transformer.generic_visit(node)
    return node


def _called(function: str, *arguments: ast.expr) -> ast.expr:
    call = ast.Call(ast.Name(function, ast.Load()), [*arguments], [])
    return ast.copy_location(call, arguments[0])


def _rounds(every: Iterable[Any]) -> Iterator[Any]:
    caller = sys._getframe(1)
    return _counted(every, (caller.f_code.co_filename, caller.f_lineno))


def _counted(every: Iterable[Any], place: Place) -> Iterator[Any]:
    number = 0
    for number, item in enumerate(every, 1):  # noqa: B007 - it is read below
        yield item
    WATCH.now.loops[place] = max(number, WATCH.now.loops.get(place, 0))


def _taken(condition: Any, has_other: bool) -> bool:
    caller = sys._getframe(1)
    taken, place = bool(condition), (caller.f_code.co_filename, caller.f_lineno)
    WATCH.now.branches.setdefault(place, {True, False} if has_other else {True}).discard(taken)
    return taken


def _noting_masks(function: Any, position: int, not_kernels: tuple[str, ...]) -> Any:
    import numpy

    def noted(builder: Any, *args: Any, **kwargs: Any) -> Any:
        frame: Any = sys._getframe(1)
        if frame.f_code.co_name not in ("create_load", "create_store"):  # these have no mask, and make one of their own
            while frame.f_code.co_filename.startswith(not_kernels):
                frame = frame.f_back
            place = (frame.f_code.co_filename, frame.f_lineno)
            if not WATCH.now.masks.get(place):
                mask = numpy.asarray(args[position].data)
                WATCH.now.masks[place] = bool(mask.any() and not mask.all())
        return function(builder, *args, **kwargs)

    return noted
