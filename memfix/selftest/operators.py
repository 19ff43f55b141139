"""Typical regressions of memory fixes, as edits of a function's source. They depend on no particular op.

Each operator is a generator: it takes a function and yields ``(node, *edits)``, where ``node`` is the changed place.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .source import Edit, Function, SourceFile, called_name, header_lines

Plant = tuple[ast.AST, *tuple[Edit, ...]]
Planted = Iterator[Plant]
Operator = Callable[[Function], Planted]

_KEPT_FOREVER = "it keeps a tensor forever, which no meter counts if the tensor is a view or on the CPU"
_OTHER_REFUSAL = "it changes which inputs are refused, and no bad input of the contract is at that boundary"
_UPSTREAM = re.compile(r"^(d|grad|upstream)(_|$)|upstream|grad_out")
_METADATA = {"shape", "dtype", "device", "ndim", "stride", "dim", "size", "numel", "requires_grad", "is_contiguous"}
_IN_PLACE = {ast.Add: "add_", ast.Sub: "sub_", ast.Mult: "mul_", ast.Div: "div_"}
_HAVE_IN_PLACE = set(
    "add sub mul div exp neg clamp masked_fill sigmoid tanh relu addcmul index_add sqrt log softcap".split()
)
_OTHER_EDGE = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_UNINITIALISED = {"zeros": "empty", "zeros_like": "empty_like", "new_zeros": "new_empty"}
_CONDITIONS = {
    "wrong in one dtype": [f"{{}}.dtype == torch.{name}" for name in ("float64", "float32", "bfloat16", "float16")],
    "wrong in one layout": ["not {}.is_contiguous()", "{}.stride(-1) != 1", "{}.storage_offset()"],
    "wrong with one option": [],  # _options() makes these for each function
    "wrong at one size": ["{}.shape[0] == 1", "{}.shape[-1] == 1", "{}.shape[0] % 16 == 0", "{}.numel() > 100_000"],
}
"""Conditions on the first floating input, by kind. The planted code makes the result wrong where one holds."""


@dataclass(frozen=True)
class Mutant:
    """One planted regression. ``lines`` are those of the changed statement in the original."""

    kind: str
    module: str
    changed: str
    diff: str
    lines: tuple[int, int]
    why_undecided: str = ""
    """Why the mutant may still change something if all bits and bytes are equal; empty if nothing may."""
    must_run: int | None = None
    """The line of ``changed`` that makes the result wrong. Unless it runs, nothing is known about the mutant."""


@dataclass(frozen=True)
class EntryPoints:
    """What the contract says about the forms' functions: their names, and the values of their options."""

    names: frozenset[str] = frozenset()
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)


def mutants_of(file: SourceFile, entry_points: EntryPoints, *, skip: Sequence[tuple[int, int]] = ()) -> list[Mutant]:
    """Return every regression that can be planted in a module outside the lines of ``skip``, without duplicates."""
    found: dict[str, Mutant] = {}
    for function in file.functions:
        for kind, (node, *edits) in _planted_in(function, entry_points):
            statement = file.statement(node)
            lines = header_lines(statement)
            if any(first <= lines[0] <= last for first, last in skip):
                continue
            changed = file.edited(edits)
            if changed in found or changed == file.text or not _compiles(changed):
                continue
            must_run = lines[0] + 1 if kind in _CONDITIONS else None
            why_undecided = _KEPT_FOREVER if "globals()" in edits[0].new else ""
            if isinstance(statement, ast.If) and any(isinstance(inner, ast.Raise) for inner in statement.body):
                why_undecided = _OTHER_REFUSAL
            found[changed] = Mutant(kind, file.module, changed, file.diff(changed), lines, why_undecided, must_run)
    return list(found.values())


def _planted_in(f: Function, entry_points: EntryPoints) -> Iterator[tuple[str, Plant]]:
    found = [(kind, operator(f)) for kind, operator in OPERATORS.items()]
    if f.name in entry_points.names or f.is_backward:
        found += [(kind, _wrong_where(f, some or _options(f, entry_points))) for kind, some in _CONDITIONS.items()]
        found += [("upcast", _upcast_inputs(f)), ("clone", _clone_inputs(f))]
    return ((kind, plant) for kind, planted in found for plant in planted)


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


# ---------------------------------------------------------------- memory
def keep_alive(f: Function) -> Planted:
    """Keep every chunk's tensor until the loop ends, the old value of a name, or one tensor forever."""
    bound = {parameter.arg for parameter in f.parameters}
    assignments = [*f.assignments()]
    for statement, name in assignments:
        if loop := f.loop_around(statement):
            yield statement, f.insert_before(loop, "kept = []"), f.insert_after(statement, f"kept.append({name})")
        elif name in bound:
            yield statement, f.insert_before(statement, f"{name}_before = {name}")
        bound.add(name)
    for statement, name in assignments[:1]:
        yield statement, f.insert_after(statement, f'globals().setdefault("kept", []).append({name})')


def drop_del(f: Function) -> Planted:
    for node in f.nodes:
        if isinstance(node, ast.Delete) and all(isinstance(target, ast.Name) for target in node.targets):
            yield node, f.delete(node)


def upcast(f: Function) -> Planted:
    for statement, name in f.assignments():
        if f.is_tensor(name, floating=True):
            yield statement, f.insert_after(statement, _widened(name))


def clone(f: Function) -> Planted:
    for statement, _ in f.assignments():
        yield statement, f.replace(statement.value, f"{f.operand(statement.value)}.clone()")


def _upcast_inputs(f: Function) -> Planted:
    for name in f.tensor_parameters(floating=True):
        yield f.first_statement, f.insert_before(f.first_statement, _widened(name))


def _clone_inputs(f: Function) -> Planted:
    for name in f.tensor_parameters():
        unless_none = f"None if {name} is None else " if isinstance(f.defaults.get(name), ast.Constant) else ""
        yield f.first_statement, f.insert_before(f.first_statement, f"{name} = {unless_none}{name}.clone()")


def _widened(name: str) -> str:
    return f"{name} = {name}.to(torch.promote_types({name}.dtype, torch.float32))"


def save_for_backward(f: Function) -> Planted:
    """Save one more tensor for backward: an input, or what forward computed."""
    if not f.has_context or f.name not in ("forward", "setup_context"):
        return
    saves = [f.file.statement(call) for call in f.calls("save_for_backward")]
    places = saves[:1] or [node for node in f.nodes if isinstance(node, ast.Return)][-1:]
    saved = {node.id for save in saves for node in ast.walk(save) if isinstance(node, ast.Name)}
    for at in places:
        made = [name for node, name in f.assignments() if node.lineno < at.lineno and not f.loop_around(node)]
        for name in dict.fromkeys([*f.tensor_parameters(), *made]):
            if name not in saved:
                yield at, f.insert_before(at, f"ctx.also_saved = {name}")


def cache_by_shape(f: Function) -> Planted:
    tensors = f.tensor_parameters()
    for statement, name in f.assignments() if tensors else ():
        key = f'("{name}", {tensors[0]}.shape, {tensors[0]}.dtype)'
        cached = f'globals().setdefault("cache", {{}}).setdefault({key}, {f.of(statement.value)})'
        yield statement, f.replace(statement.value, cached)


def hold_graph(f: Function) -> Planted:
    """Leave out a detach, a no_grad or a checkpoint."""
    for call, method in f.method_calls("detach", "requires_grad_"):
        yield call, f.replace(call, f.of(method.value))
    for call in f.calls("no_grad", "inference_mode", "set_grad_enabled"):
        if isinstance(f.file.parents[call], ast.withitem):
            yield call, f.replace(call, "torch.enable_grad()")
    for call in f.calls("checkpoint"):
        if call.args:
            yield call, f.replace(call, f"{f.operand(call.args[0])}({', '.join(map(f.of, call.args[1:]))})")


# ---------------------------------------------------------------- chunks and edges
def skip_last_chunk(f: Function) -> Planted:
    for node in f.nodes:
        match node:
            case ast.For(iter=ast.Call(args=[*_, _] as args) as call) if called_name(call) in ("range", "static_range"):
                stop, step = args[min(1, len(args) - 1)], f.operand(args[2]) if len(args) == 3 else "1"
                yield node, f.replace(stop, f"{f.operand(stop)} - {step}")
            case ast.For(iter=ast.Call() as call) if not f.is_kernel:
                yield node, f.replace(call, f"list({f.of(call)})[:-1]")


def off_by_one(f: Function) -> Planted:
    for node in f.nodes:
        match node:
            case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in _OTHER_EDGE:
                yield node, f.replace(node, f"{f.of(left)} {_OTHER_EDGE[type(sign)]} {f.of(right)}")
            case ast.Slice(lower=lower, upper=upper):
                for bound, change in ((upper, "- 1"), (lower, "+ 1")):
                    if bound is not None:
                        yield bound, f.replace(bound, f"{f.operand(bound)} {change}")
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=ast.Constant(value=int(1) as one)):
                if one is not True:
                    yield node, f.replace(node, f.operand(left))
            case ast.UnaryOp(
                ast.USub(), ast.BinOp(left=ast.UnaryOp(ast.USub(), left), op=ast.FloorDiv(), right=right)
            ):  # -(-a // b) rounds up
                yield node, f.replace(node, f"({f.operand(left)} // {f.operand(right)})")
    for call in f.calls("cdiv", "ceil_div"):
        if len(call.args) == 2:
            yield call, f.replace(call, f"({f.operand(call.args[0])} // {f.operand(call.args[1])})")


def drop_mask(f: Function) -> Planted:
    for call in f.calls("load", "store", "atomic_add"):
        kept = [keyword for keyword in call.keywords if keyword.arg not in ("mask", "other")]
        if len(kept) < len(call.keywords):
            arguments = [*map(f.of, call.args), *(f"{keyword.arg}={f.of(keyword.value)}" for keyword in kept)]
            yield call, f.replace(call, f"{f.of(call.func)}({', '.join(arguments)})")
    for call in f.calls("where"):
        if len(call.args) == 3:
            yield call, f.replace(call, f.operand(call.args[1]))
    for call, method in f.method_calls("masked_fill", "masked_fill_", "tril", "triu", "tril_", "triu_"):
        is_function = isinstance(method.value, ast.Name) and method.value.id in ("torch", "tl")
        yield call, f.replace(call, f.operand(call.args[0] if is_function else method.value))
    for node in f.nodes:
        match node:
            case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
                yield node, f.replace(node, f.operand(left))
                yield node, f.replace(node, f.operand(right))
            case ast.AugAssign(op=ast.BitAnd()):
                yield node, f.delete(node)


# ---------------------------------------------------------------- factors
def _products(node: ast.AST) -> list[tuple[ast.BinOp, ast.expr, ast.expr]]:
    """Return ``(product, factor, other factor)`` for both factors of a product; nothing for other nodes."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [(node, node.left, node.right), (node, node.right, node.left)]
    return []


def lose_rescale(f: Function) -> Planted:
    """Leave out a multiplication of the old value or by an exponential."""
    for node in f.nodes:
        if isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Mult, ast.Div)):
            yield node, f.delete(node)
        for product, factor, other in _products(node):
            if _is_exponential(factor) or _is_target(f.file.statement(node), other):
                yield product, f.replace(product, f.operand(other))
    for call, method in f.method_calls("mul_", "div_", "mul"):
        if call.args:
            yield call, f.undo_method(call, method)


def _is_exponential(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("exp", "exp2", "exp_")


def _is_target(statement: ast.stmt, node: ast.expr) -> bool:
    names = [target.id for target in getattr(statement, "targets", ()) if isinstance(target, ast.Name)]
    return isinstance(node, ast.Name) and node.id in names


def forget_upstream(f: Function) -> Planted:
    """Use ones in place of the upstream gradient."""
    upstream = {p.arg for p in f.parameters if _UPSTREAM.search(p.arg)}
    if f.is_backward:
        upstream |= {p.arg for p in f.parameters[1:]}
    for node in f.nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Load()) if name in upstream and f.is_tensor(name, floating=True):
                parent = f.file.parents[node]
                if not isinstance(parent, ast.Compare) and getattr(parent, "attr", "") not in _METADATA:
                    yield node, f.replace(node, f"torch.ones_like({name})")
        for product, factor, other in _products(node):
            if isinstance(factor, ast.Name) and (factor.id in upstream or _UPSTREAM.search(factor.id)):
                yield product, f.replace(product, f.operand(other))


def write_into_input(f: Function) -> Planted:
    inputs = set(f.tensor_parameters())
    for node in f.nodes:
        match node:
            case ast.BinOp(left=ast.Name(id=name), op=op, right=right) if name in inputs and type(op) in _IN_PLACE:
                yield node, f.replace(node, f"{name}.{_IN_PLACE[type(op)]}({f.of(right)})")
            case ast.Attribute(value=ast.Name(id=name), attr=method) if name in inputs and method in _HAVE_IN_PLACE:
                yield node, f.replace(node, f"{name}.{method}_")


def empty_for_zeros(f: Function) -> Planted:
    for call, method in () if f.is_kernel else f.method_calls(*_UNINITIALISED):
        yield call, f.replace(method, f"{f.of(method.value)}.{_UNINITIALISED[method.attr]}")
    for call, method in f.method_calls("new_full", "zero_", "fill_"):
        if method.attr != "new_full":
            yield call, f.undo_method(call, method)
        elif len(call.args) == 2:
            without_value = Edit(f.file.span(call.args[0])[1], f.file.span(call.args[1])[1], "")
            yield call, f.replace(method, f"{f.of(method.value)}.new_empty"), without_value


# ---------------------------------------------------------------- wrong in one place only
def _wrong_where(f: Function, conditions: Sequence[str]) -> Planted:
    for name in f.tensor_parameters(floating=True)[:1]:
        for condition in conditions:
            lines = f"if {condition.format(name)}:", f"    {name} = {name} * 1.5"
            yield f.first_statement, f.insert_before(f.first_statement, *lines)


def _options(f: Function, entry_points: EntryPoints) -> list[str]:
    """Return conditions under which an option of ``f`` differs from its default."""
    found: list[str] = []
    for parameter in f.parameters:
        name, default = parameter.arg, getattr(f.defaults.get(parameter.arg), "value", ...)
        if name in entry_points.options:
            found += [f"{name} is None" if v is None else f"{name} == {v!r}" for v in entry_points.options[name][1:]]
        elif default is None or isinstance(default, bool):
            found.append(f"{name} is {'not None' if default is None else not default}")
    return found


OPERATORS: dict[str, Operator] = {
    "keep a tensor alive": keep_alive,
    "drop a del": drop_del,
    "upcast": upcast,
    "clone": clone,
    "save for backward": save_for_backward,
    "cache by shape": cache_by_shape,
    "hold the graph": hold_graph,
    "skip the last chunk": skip_last_chunk,
    "off by one": off_by_one,
    "drop a mask": drop_mask,
    "lose a rescale": lose_rescale,
    "forget the upstream factor": forget_upstream,
    "write into an input": write_into_input,
    "empty for zeros": empty_for_zeros,
}
KINDS = (*OPERATORS, *_CONDITIONS)
MEMORY_KINDS = frozenset(KINDS[:7])
"""Kinds that a meter is more likely to catch than a comparison of results."""
