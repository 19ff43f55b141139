"""The source file of a module, its functions, and edits that keep all other characters unchanged."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ..errors import UsageError

TensorNames = Mapping[tuple[int, str], bool]
"""Whether a local name held a floating tensor, by the first line of its function and the name."""

Node = ast.expr | ast.stmt
Scope = ast.FunctionDef | ast.ClassDef | ast.Lambda
_COMPOUND = (ast.For, ast.While, ast.If, ast.With, ast.Try)
_NEEDS_NO_PARENTHESES = (ast.Call, ast.Name, ast.Attribute, ast.Subscript, ast.Constant)


class Edit(NamedTuple):
    """An edit that replaces the bytes from ``start`` up to, not including, ``stop``."""

    start: int
    stop: int
    new: str


@dataclass(frozen=True)
class SourceFile:
    """One module: its name, its path, its text, and, if known, which of its local names held tensors."""

    module: str
    path: str
    text: str
    tensors: TensorNames | None = None

    @staticmethod
    def read(module: str, path: str) -> SourceFile:
        try:
            text = Path(path).read_text(encoding="utf-8")
            ast.parse(text)
        except (OSError, UnicodeDecodeError, SyntaxError, ValueError) as error:
            raise UsageError(f"the source of {module} cannot be read: {path}: {error}") from None
        return SourceFile(module, path, text)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: parent for parent in ast.walk(self.tree) for child in ast.iter_child_nodes(parent)}

    @cached_property
    def functions(self) -> list[Function]:
        return [Function(self, node) for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)]

    @cached_property
    def _data(self) -> bytes:
        return self.text.encode()

    @cached_property
    def _line_starts(self) -> list[int]:
        starts = [0]
        for line in self._data.split(b"\n"):
            starts.append(starts[-1] + len(line) + 1)
        return starts

    def span(self, node: Node) -> tuple[int, int]:
        """Return the first byte of ``node`` and the byte after its last."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        starts = self._line_starts
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def line_span(self, statement: ast.stmt) -> tuple[int, int]:
        """Return the first byte of the lines of ``statement`` and the byte after their last."""
        assert statement.end_lineno is not None
        return self._line_starts[statement.lineno - 1], self._line_starts[statement.end_lineno]

    def of(self, node: Node) -> str:
        start, stop = self.span(node)
        return self._data[start:stop].decode()

    def statement(self, node: ast.AST) -> ast.stmt:
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def edited(self, edits: Sequence[Edit]) -> str:
        data = self._data
        for edit in sorted(edits, key=lambda edit: -edit.start):
            data = data[: edit.start] + edit.new.encode() + data[edit.stop :]
        return data.decode()

    def diff(self, changed: str) -> str:
        """Return a unified diff with one line of context."""
        name = "/".join(Path(self.path).parts[-4:])
        lines = difflib.unified_diff(self.text.splitlines(), changed.splitlines(), name, name, lineterm="", n=1)
        return "\n".join(lines)


class Function:
    """A function of a module; statements of nested functions are not part of it."""

    def __init__(self, file: SourceFile, node: ast.FunctionDef) -> None:
        self.file, self.node, self.name, arguments = file, node, node.name, node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        self.parameters = [*positional, *arguments.kwonlyargs]
        last_first = zip(positional[::-1], arguments.defaults[::-1], strict=False)
        named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        self.defaults = {argument.arg: value for argument, value in [*last_first, *named] if value is not None}
        self.is_kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        # True for a method of a torch.autograd.Function
        self.has_context = bool(self.parameters) and self.parameters[0].arg == "ctx"
        self.is_backward = self.has_context and self.name == "backward"
        first, *others = node.body
        is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        self.first_statement = others[0] if is_docstring and others else first

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes in breadth-first order, except those inside nested scopes."""
        found: list[ast.AST] = list(self.node.body)
        for node in found:  # the loop appends to the list
            if not isinstance(node, Scope):
                found += ast.iter_child_nodes(node)
        return found

    def is_tensor(self, name: str, *, floating: bool = False) -> bool:
        """Whether ``name`` held a tensor when the forms ran. Without a record of that run, any name may have."""
        if self.is_kernel or name in ("ctx", "self", "cls"):
            return False
        if self.file.tensors is None:
            return True
        first_line = min([self.node.lineno, *(decorator.lineno for decorator in self.node.decorator_list)])
        is_floating = self.file.tensors.get((first_line, name))
        return is_floating is not None and (is_floating or not floating)

    def tensor_parameters(self, *, floating: bool = False) -> list[str]:
        return [p.arg for p in self.parameters if self.is_tensor(p.arg, floating=floating)]

    def assignments(self) -> Iterator[tuple[ast.Assign, str]]:
        """Yield statements that assign the tensor of an expression to a single name, and that name."""
        for node in self.nodes:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if self.is_tensor(name):
                    if not isinstance(value, (ast.Name, ast.Constant)):
                        yield node, name

    def calls(self, *names: str) -> Iterator[ast.Call]:
        """Return calls of functions or methods with one of these last names."""
        return (node for node in self.nodes if isinstance(node, ast.Call) and called_name(node) in names)

    def method_calls(self, *names: str) -> Iterator[tuple[ast.Call, ast.Attribute]]:
        return ((call, call.func) for call in self.calls(*names) if isinstance(call.func, ast.Attribute))

    def loop_around(self, node: ast.AST) -> ast.For | ast.While | None:
        while node is not self.node:
            node = self.file.parents[node]
            if isinstance(node, (ast.For, ast.While)):
                return node
        return None

    # ---------------------------------------------------------------- text and edits
    def of(self, node: Node) -> str:
        return self.file.of(node)

    def operand(self, node: ast.expr) -> str:
        """Return the text of ``node``, in parentheses unless it can stand before a method call or beside a factor."""
        return self.of(node) if isinstance(node, _NEEDS_NO_PARENTHESES) else f"({self.of(node)})"

    def replace(self, node: Node, new: str) -> Edit:
        return Edit(*self.file.span(node), new)

    def insert_before(self, statement: ast.stmt, *lines: str) -> Edit:
        at, indent = self.file.line_span(statement)[0], " " * statement.col_offset
        return Edit(at, at, "".join(f"{indent}{line}\n" for line in lines))

    def insert_after(self, statement: ast.stmt, line: str) -> Edit:
        at = self.file.line_span(statement)[1]
        return Edit(at, at, f"{' ' * statement.col_offset}{line}\n")

    def delete(self, statement: ast.stmt) -> Edit:
        """Delete a statement, or replace it by ``pass`` if it is the only one of its block."""
        parent = self.file.parents[statement]
        if [statement] in [getattr(parent, name, None) for name in ("body", "orelse", "finalbody")]:
            return self.replace(statement, "pass")
        return Edit(*self.file.line_span(statement), "")

    def undo_method(self, call: ast.Call, method: ast.Attribute) -> Edit:
        """Remove a method call: the whole statement, or inside an expression all but the object of the method."""
        statement = self.file.parents[call]
        return self.delete(statement) if isinstance(statement, ast.Expr) else self.replace(call, self.of(method.value))


def called_name(call: ast.Call) -> str:
    """Return the last name of the called function, as ``add`` in ``torch.add(x, y)``."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def header_lines(statement: ast.stmt) -> tuple[int, int]:
    """Return the first and the last line of a statement, without the block of a compound statement."""
    assert statement.end_lineno is not None
    last = statement.body[0].lineno - 1 if isinstance(statement, _COMPOUND) else statement.end_lineno
    return statement.lineno, max(statement.lineno, last)
