"""The text of a module, its functions, and edits of it that leave every other character as it was."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ..errors import UsageError

TensorNames = Mapping[tuple[int, str], bool]
"""Local names that held a tensor, by the first line of their function; and whether it was floating."""

_COMPOUND = (ast.For, ast.While, ast.If, ast.With, ast.Try)
Scope = ast.FunctionDef | ast.ClassDef | ast.Lambda


@dataclass(frozen=True)
class Edit:
    """Replaces the bytes from ``start`` to ``stop``."""

    start: int
    stop: int
    new: str


@dataclass(frozen=True)
class Text:
    """One module: where it is, what stands in it, and which of its local names held tensors, where that is known."""

    module: str
    path: str
    text: str
    tensors: TensorNames | None = None

    @staticmethod
    def read(module: str, path: str) -> Text:
        try:
            text = Path(path).read_text(encoding="utf-8")
            ast.parse(text)
        except (OSError, UnicodeDecodeError, SyntaxError, ValueError) as error:
            raise UsageError(f"the source of {module} cannot be read: {path}: {error}") from None
        return Text(module, path, text)

    @cached_property
    def data(self) -> bytes:
        return self.text.encode()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def _line_starts(self) -> list[int]:
        starts = [0]
        for line in self.data.split(b"\n"):
            starts.append(starts[-1] + len(line) + 1)
        return starts

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: parent for parent in ast.walk(self.tree) for child in ast.iter_child_nodes(parent)}

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self._line_starts[node.lineno - 1] + node.col_offset

    def stop(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._line_starts[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: ast.expr | ast.stmt) -> str:
        return self.data[self.start(node) : self.stop(node)].decode()

    def operand(self, node: ast.expr) -> str:
        """The text of ``node`` so that a method may be called on it, or a factor put beside it."""
        closed = (ast.Call, ast.Name, ast.Attribute, ast.Subscript, ast.Constant)
        return self.of(node) if isinstance(node, closed) else f"({self.of(node)})"

    def statement(self, node: ast.AST) -> ast.stmt:
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def functions(self) -> Iterator[Function]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef):
                yield Function(self, node)

    # ---------------------------------------------------------------- edits
    def instead(self, node: ast.expr | ast.stmt, new: str) -> Edit:
        return Edit(self.start(node), self.stop(node), new)

    def before(self, statement: ast.stmt, *lines: str) -> Edit:
        at = self._line_starts[statement.lineno - 1]
        indent = " " * statement.col_offset
        return Edit(at, at, "".join(f"{indent}{line}\n" for line in lines))

    def after(self, statement: ast.stmt, line: str) -> Edit:
        assert statement.end_lineno is not None
        at = self._line_starts[statement.end_lineno]
        return Edit(at, at, f"{' ' * statement.col_offset}{line}\n")

    def without(self, statement: ast.stmt) -> Edit:
        """Delete a statement; where it is the only one of its block, ``pass`` stands for it."""
        parent = self.parents[statement]
        blocks = [getattr(parent, name, None) for name in ("body", "orelse", "finalbody")]
        if [statement] in blocks:
            return self.instead(statement, "pass")
        assert statement.end_lineno is not None
        return Edit(self._line_starts[statement.lineno - 1], self._line_starts[statement.end_lineno], "")

    def edited(self, edits: Sequence[Edit]) -> str:
        data = self.data
        for edit in sorted(edits, key=lambda edit: -edit.start):
            data = data[: edit.start] + edit.new.encode() + data[edit.stop :]
        return data.decode()

    def diff(self, changed: str) -> str:
        """A unified diff with one line of context."""
        name = "/".join(Path(self.path).parts[-4:])
        lines = difflib.unified_diff(self.text.splitlines(), changed.splitlines(), name, name, lineterm="", n=1)
        return "\n".join(lines)


@dataclass(frozen=True)
class Function:
    """A function of a module, with its own statements: those of functions inside it are theirs."""

    text: Text
    node: ast.FunctionDef
    _nodes: list[ast.AST] = field(default_factory=list, compare=False)

    def nodes(self) -> list[ast.AST]:
        if not self._nodes:
            waiting: list[ast.AST] = list(self.node.body)
            while waiting:
                node = waiting.pop(0)
                self._nodes.append(node)
                if not isinstance(node, Scope):
                    waiting += ast.iter_child_nodes(node)
        return self._nodes

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def parameters(self) -> list[ast.arg]:
        arguments = self.node.args
        return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]

    @property
    def defaults(self) -> dict[str, ast.expr]:
        arguments = self.node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        given = positional[len(positional) - len(arguments.defaults) :]
        found = {argument.arg: value for argument, value in zip(given, arguments.defaults, strict=True)}
        named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        return found | {argument.arg: value for argument, value in named if value is not None}

    @property
    def is_kernel(self) -> bool:
        return any("jit" in ast.unparse(decorator) for decorator in self.node.decorator_list)

    @property
    def has_context(self) -> bool:
        """Is it a method of a ``torch.autograd.Function``?"""
        return bool(self.parameters) and self.parameters[0].arg == "ctx"

    @property
    def first_statement(self) -> ast.stmt:
        first, *others = self.node.body
        is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        return others[0] if is_docstring and others else first

    def is_tensor(self, name: str, *, floating: bool = False) -> bool:
        """Did ``name`` hold a tensor when the forms ran? Where nobody looked, it may."""
        if self.is_kernel or name in ("ctx", "self", "cls"):
            return False
        tensors = self.text.tensors
        if tensors is None:
            return True
        first_line = min([self.node.lineno, *(decorator.lineno for decorator in self.node.decorator_list)])
        held = tensors.get((first_line, name))
        return held is not None and (held or not floating)

    def tensor_parameters(self, *, floating: bool = False) -> list[str]:
        return [p.arg for p in self.parameters if self.is_tensor(p.arg, floating=floating)]

    def assignments(self) -> Iterator[tuple[ast.Assign, str]]:
        """Statements that give one name the value of an expression, a tensor."""
        for node in self.nodes():
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if self.is_tensor(name) and not isinstance(node.value, (ast.Name, ast.Constant)):
                    yield node, name

    def calls(self, *names: str) -> Iterator[tuple[ast.Call, str]]:
        """Calls of functions or methods with one of these last names."""
        for node in self.nodes():
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in names:
                    yield node, name

    def loop_around(self, node: ast.AST) -> ast.For | ast.While | None:
        parents = self.text.parents
        while node is not self.node:
            node = parents[node]
            if isinstance(node, (ast.For, ast.While)):
                return node
        return None


def header_lines(statement: ast.stmt) -> tuple[int, int]:
    """The first and the last line of a statement, or of what stands before the block of a compound one."""
    assert statement.end_lineno is not None
    last = statement.body[0].lineno - 1 if isinstance(statement, _COMPOUND) else statement.end_lineno
    return statement.lineno, max(statement.lineno, last)
