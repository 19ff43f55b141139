"""Regressions of this field, as edits of a function's text. They follow from how code is written, never from one form.

Each operator is a generator: a function in, ``(node, edits)`` out, where ``node`` is the place that is changed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .text import Edit, Function, Text, header_lines

Planted = Iterator[tuple[ast.AST, list[Edit]]]
Operator = Callable[[Function], Planted]

_FOR_GOOD = "it keeps a tensor for good, of which no meter counts a view or what is on the CPU"
_WRONG = "{0} = {0} * 1.5"
_UPSTREAM = re.compile(r"^(d|grad|upstream)(_|$)|upstream|grad_out")
_OF_THE_SHAPE = {"shape", "dtype", "device", "ndim", "stride", "dim", "size", "numel", "requires_grad", "is_contiguous"}
_IN_PLACE = {ast.Add: "add_", ast.Sub: "sub_", ast.Mult: "mul_", ast.Div: "div_"}
_HAVE_IN_PLACE = (
    "add sub mul div exp neg clamp masked_fill sigmoid tanh relu addcmul index_add sqrt log softcap"
).split()
_OTHER_EDGE = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_UNINITIALISED = {"zeros": "empty", "zeros_like": "empty_like", "new_zeros": "new_empty"}


@dataclass(frozen=True)
class Mutant:
    """One planted regression. ``lines`` are those of the changed statement in the original."""

    kind: str
    module: str
    changed: str
    diff: str
    lines: tuple[int, int]
    doubt: str = ""
    """Why the same bits and bytes everywhere do not show that it changes nothing."""
    must_run: int | None = None
    """A line of ``changed`` that does harm where it runs, and must have run before anything is said."""


@dataclass(frozen=True)
class Known:
    """What the contract says of the functions that it calls: their names, and values of their options."""

    entries: frozenset[str] = frozenset()
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)


def mutants_of(text: Text, known: Known, *, skip: Sequence[tuple[int, int]] = ()) -> list[Mutant]:
    """Every regression that can be planted in a module, but for the lines in ``skip``; each text once."""
    found: dict[str, Mutant] = {}
    for function in text.functions():
        for kind, plant in operators(function, known):
            for node, edits in plant(function):
                lines = header_lines(text.statement(node))
                if any(first <= lines[0] <= last for first, last in skip):
                    continue
                changed = text.edited(edits)
                if changed in found or changed == text.text or not _compiles(changed):
                    continue
                must_run = lines[0] + 1 if kind in _CONDITIONS else None
                doubt = _doubt(text, node) or (_FOR_GOOD if "globals()" in edits[0].new else "")
                found[changed] = Mutant(kind, text.module, changed, text.diff(changed), lines, doubt, must_run)
    return list(found.values())


def operators(function: Function, known: Known) -> Iterator[tuple[str, Operator]]:
    yield from OPERATORS.items()
    if function.name in known.entries or (function.has_context and function.name == "backward"):
        for kind, conditions in _CONDITIONS.items():
            yield kind, lambda f, conditions=conditions: _wrong_where(f, conditions(f, known))  # type: ignore[misc]
        yield "upcast", _upcast_inputs
        yield "clone", _clone_inputs


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def _doubt(text: Text, node: ast.AST) -> str:
    statement = text.statement(node)
    if isinstance(statement, ast.If) and any(isinstance(inner, ast.Raise) for inner in statement.body):
        return "it changes what is refused, and no bad input of the contract is at that edge"
    return ""


# ---------------------------------------------------------------- memory
def keep_alive(f: Function) -> Planted:
    """Every chunk's tensor until the loop ends, what a name held before it got a new value, or one tensor for good."""
    bound = {parameter.arg for parameter in f.parameters}
    first = None
    for statement, name in f.assignments():
        first = first or (statement, name)
        if loop := f.loop_around(statement):
            yield statement, [f.text.before(loop, "kept = []"), f.text.after(statement, f"kept.append({name})")]
        elif name in bound:
            yield statement, [f.text.before(statement, f"{name}_before = {name}")]
        bound.add(name)
    if first is not None:
        statement, name = first
        yield statement, [f.text.after(statement, f'globals().setdefault("kept", []).append({name})')]


def drop_del(f: Function) -> Planted:
    for node in f.nodes():
        if isinstance(node, ast.Delete) and all(isinstance(target, ast.Name) for target in node.targets):
            yield node, [f.text.without(node)]


def upcast(f: Function) -> Planted:
    for statement, name in f.assignments():
        if f.is_tensor(name, floating=True):
            yield statement, [f.text.after(statement, _widened(name))]


def clone(f: Function) -> Planted:
    for statement, _ in f.assignments():
        yield statement, [f.text.instead(statement.value, f"{f.text.operand(statement.value)}.clone()")]


def _upcast_inputs(f: Function) -> Planted:
    for name in f.tensor_parameters(floating=True):
        yield f.first_statement, [f.text.before(f.first_statement, _widened(name))]


def _clone_inputs(f: Function) -> Planted:
    for name in f.tensor_parameters():
        optional = isinstance(f.defaults.get(name), ast.Constant)
        line = f"{name} = None if {name} is None else {name}.clone()" if optional else f"{name} = {name}.clone()"
        yield f.first_statement, [f.text.before(f.first_statement, line)]


def _widened(name: str) -> str:
    return f"{name} = {name}.to(torch.promote_types({name}.dtype, torch.float32))"


def save_for_backward(f: Function) -> Planted:
    """One more tensor is kept from forward to backward: an input, or what the forward made."""
    if not f.has_context or f.name not in ("forward", "setup_context"):
        return
    saves = [f.text.statement(call) for call, _ in f.calls("save_for_backward")]
    returns = [node for node in f.nodes() if isinstance(node, ast.Return)]
    if not saves + returns:
        return
    at = (saves + returns)[-1] if not saves else saves[0]
    saved = {node.id for save in saves for node in ast.walk(save) if isinstance(node, ast.Name)}
    made = [
        name for statement, name in f.assignments() if statement.lineno < at.lineno and not f.loop_around(statement)
    ]
    for name in dict.fromkeys([*f.tensor_parameters(), *made]):
        if name not in saved:
            yield at, [f.text.before(at, f"ctx.also_saved = {name}")]


def cache_by_shape(f: Function) -> Planted:
    tensors = f.tensor_parameters()
    for statement, name in f.assignments() if tensors else ():
        key = f'("{name}", {tensors[0]}.shape, {tensors[0]}.dtype)'
        made = f'globals().setdefault("cache", {{}}).setdefault({key}, {f.text.of(statement.value)})'
        yield statement, [f.text.instead(statement.value, made)]


def hold_graph(f: Function) -> Planted:
    """Without a detach, a no_grad or a checkpoint."""
    for call, _ in f.calls("detach", "requires_grad_"):
        if isinstance(call.func, ast.Attribute):
            yield call, [f.text.instead(call, f.text.of(call.func.value))]
    for call, _ in f.calls("no_grad", "inference_mode", "set_grad_enabled"):
        if isinstance(f.text.parents[call], ast.withitem):
            yield call, [f.text.instead(call, "torch.enable_grad()")]
    for call, _ in f.calls("checkpoint"):
        if call.args:
            arguments = ", ".join(map(f.text.of, call.args[1:]))
            yield call, [f.text.instead(call, f"{f.text.operand(call.args[0])}({arguments})")]


# ---------------------------------------------------------------- chunks and edges
def skip_last_chunk(f: Function) -> Planted:
    for node in f.nodes():
        if not isinstance(node, ast.For) or not isinstance(node.iter, ast.Call):
            continue
        call = node.iter
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        if name in ("range", "static_range") and call.args:
            stop = call.args[min(1, len(call.args) - 1)]
            step = f.text.operand(call.args[2]) if len(call.args) == 3 else "1"
            yield node, [f.text.instead(stop, f"{f.text.operand(stop)} - {step}")]
        elif not f.is_kernel:
            yield node, [f.text.instead(call, f"list({f.text.of(call)})[:-1]")]


def off_by_one(f: Function) -> Planted:
    for node in f.nodes():
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OTHER_EDGE:
            sign = _OTHER_EDGE[type(node.ops[0])]
            yield node, [f.text.instead(node, f"{f.text.of(node.left)} {sign} {f.text.of(node.comparators[0])}")]
        elif isinstance(node, ast.Slice):
            if node.upper is not None:
                yield node.upper, [f.text.instead(node.upper, f"{f.text.operand(node.upper)} - 1")]
            if node.lower is not None:
                yield node.lower, [f.text.instead(node.lower, f"{f.text.operand(node.lower)} + 1")]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)) and _is_one(node.right):
            yield node, [f.text.instead(node, f.text.operand(node.left))]
        elif isinstance(node, ast.UnaryOp) and (rounded := _rounded_up(node)) is not None:
            yield node, [f.text.instead(node, f"({f.text.operand(rounded[0])} // {f.text.operand(rounded[1])})")]
    for call, _ in f.calls("cdiv", "ceil_div"):
        if len(call.args) == 2:
            down = f"({f.text.operand(call.args[0])} // {f.text.operand(call.args[1])})"
            yield call, [f.text.instead(call, down)]


def _is_one(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int and node.value == 1


def _rounded_up(node: ast.UnaryOp) -> tuple[ast.expr, ast.expr] | None:
    """``a, b`` of ``-(-a // b)``."""
    inner = node.operand
    if isinstance(node.op, ast.USub) and isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.FloorDiv):
        left = inner.left
        if isinstance(left, ast.UnaryOp) and isinstance(left.op, ast.USub):
            return left.operand, inner.right
    return None


def drop_mask(f: Function) -> Planted:
    for call, _ in f.calls("load", "store", "atomic_add"):
        masks = [keyword for keyword in call.keywords if keyword.arg in ("mask", "other")]
        if masks:
            kept = [
                *map(f.text.of, call.args),
                *(f"{k.arg}={f.text.of(k.value)}" for k in call.keywords if k not in masks),
            ]
            yield call, [f.text.instead(call, f"{f.text.of(call.func)}({', '.join(kept)})")]
    for call, _ in f.calls("where"):
        if len(call.args) == 3:
            yield call, [f.text.instead(call, f.text.operand(call.args[1]))]
    for call, _ in f.calls("masked_fill", "masked_fill_", "tril", "triu", "tril_", "triu_"):
        if isinstance(call.func, ast.Attribute):
            is_method = not (isinstance(call.func.value, ast.Name) and call.func.value.id in ("torch", "tl"))
            unmasked = call.func.value if is_method else call.args[0]
            yield call, [f.text.instead(call, f.text.operand(unmasked))]
    for node in f.nodes():
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
            yield node, [f.text.instead(node, f.text.operand(node.left))]
            yield node, [f.text.instead(node, f.text.operand(node.right))]
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.BitAnd):
            yield node, [f.text.without(node)]


# ---------------------------------------------------------------- factors
def lose_rescale(f: Function) -> Planted:
    """A product with what is already there, or with an exponential, that does not happen."""
    for node in f.nodes():
        if isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Mult, ast.Div)):
            yield node, [f.text.without(node)]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for factor, kept in ((node.left, node.right), (node.right, node.left)):
                if _is_exponential(factor) or _is_target(f.text.statement(node), kept):
                    yield node, [f.text.instead(node, f.text.operand(kept))]
    for call, _ in f.calls("mul_", "div_", "mul"):
        if isinstance(call.func, ast.Attribute) and call.args:
            parent = f.text.parents[call]
            if isinstance(parent, ast.Expr):
                yield call, [f.text.without(parent)]
            else:
                yield call, [f.text.instead(call, f.text.of(call.func.value))]


def _is_exponential(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("exp", "exp2", "exp_")


def _is_target(statement: ast.stmt, node: ast.expr) -> bool:
    names = [target.id for target in getattr(statement, "targets", ()) if isinstance(target, ast.Name)]
    return isinstance(node, ast.Name) and node.id in names


def forget_upstream(f: Function) -> Planted:
    """A gradient of ones for the one that arrives."""
    is_backward = f.has_context and f.name == "backward"
    arriving = {p.arg for p in f.parameters[1:]} if is_backward else set()
    arriving |= {p.arg for p in f.parameters if _UPSTREAM.search(p.arg)}
    for node in f.nodes():
        if isinstance(node, ast.Name) and node.id in arriving and isinstance(node.ctx, ast.Load) and not f.is_kernel:
            parent = f.text.parents[node]
            is_asked = isinstance(parent, ast.Compare) or getattr(parent, "attr", "") in _OF_THE_SHAPE
            if not is_asked and f.is_tensor(node.id, floating=True):
                yield node, [f.text.instead(node, f"torch.ones_like({node.id})")]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for factor, kept in ((node.left, node.right), (node.right, node.left)):
                if isinstance(factor, ast.Name) and (factor.id in arriving or _UPSTREAM.search(factor.id)):
                    yield node, [f.text.instead(node, f.text.operand(kept))]


def write_into_input(f: Function) -> Planted:
    inputs = set(f.tensor_parameters())
    for node in f.nodes():
        owner = getattr(node, "left", getattr(node, "value", None))
        if not isinstance(owner, ast.Name) or owner.id not in inputs:
            continue
        if isinstance(node, ast.BinOp) and type(node.op) in _IN_PLACE:
            yield node, [f.text.instead(node, f"{owner.id}.{_IN_PLACE[type(node.op)]}({f.text.of(node.right)})")]
        elif isinstance(node, ast.Attribute) and node.attr in _HAVE_IN_PLACE:
            yield node, [f.text.instead(node, f"{owner.id}.{node.attr}_")]


def empty_for_zeros(f: Function) -> Planted:
    for call, name in f.calls(*_UNINITIALISED):
        if isinstance(call.func, ast.Attribute) and not f.is_kernel:
            yield call, [f.text.instead(call.func, f"{f.text.of(call.func.value)}.{_UNINITIALISED[name]}")]
    for call, _ in f.calls("new_full", "zero_", "fill_"):
        if isinstance(call.func, ast.Attribute):
            owner, parent = f.text.of(call.func.value), f.text.parents[call]
            if call.func.attr == "new_full" and len(call.args) == 2:
                without_value = Edit(f.text.stop(call.args[0]), f.text.stop(call.args[1]), "")
                yield call, [f.text.instead(call.func, f"{owner}.new_empty"), without_value]
            elif call.func.attr != "new_full":
                yield call, [f.text.without(parent) if isinstance(parent, ast.Expr) else f.text.instead(call, owner)]


# ---------------------------------------------------------------- wrong in one place only
def _wrong_where(f: Function, conditions: Sequence[str]) -> Planted:
    names = f.tensor_parameters(floating=True)
    for condition in conditions if names else ():
        lines = (f"if {condition.format(names[0])}:", f"    {_WRONG.format(names[0])}")
        yield f.first_statement, [f.text.before(f.first_statement, *lines)]


def _dtypes(f: Function, known: Known) -> list[str]:
    return [f"{{}}.dtype == torch.{dtype}" for dtype in ("float64", "float32", "bfloat16", "float16")]


def _layouts(f: Function, known: Known) -> list[str]:
    return ["not {}.is_contiguous()", "{}.stride(-1) != 1", "{}.storage_offset()"]


def _options(f: Function, known: Known) -> list[str]:
    found = []
    for parameter in f.parameters:
        name, default = parameter.arg, f.defaults.get(parameter.arg)
        if name in known.options:
            found += [f"{name} is None" if v is None else f"{name} == {v!r}" for v in known.options[name][1:]]
        elif isinstance(default, ast.Constant) and default.value is None:
            found.append(f"{name} is not None")
        elif isinstance(default, ast.Constant) and isinstance(default.value, bool):
            found.append(f"{name} is {not default.value}")
    return found


def _sizes(f: Function, known: Known) -> list[str]:
    return ["{}.shape[0] == 1", "{}.shape[-1] == 1", "{}.shape[0] % 16 == 0", "{}.numel() > 100_000"]


_CONDITIONS: dict[str, Callable[[Function, Known], list[str]]] = {
    "wrong in one dtype": _dtypes,
    "wrong in one layout": _layouts,
    "wrong with one option": _options,
    "wrong at one size": _sizes,
}

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
OF_MEMORY = frozenset(KINDS[:7])
"""Kinds that a meter is likelier to see than a comparison."""
