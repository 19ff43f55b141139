"""Parse and evaluate budget formulas such as ``"2*T*D*e + max(V*D*e, 4*GiB)"``, without running them as Python.

A formula may use integers, decimals, the contract's dims, ``e`` (bytes per element of the working dtype), its switches
(1 for a choice that is on and for an optional input that is there, else 0), the units ``KiB MiB GiB TiB``, the
operators ``+ - * / // % **`` and the functions ``min max ceil_div round_up power_of_two``: the last is the largest
power of two up to a number. Arithmetic is exact: a fraction of a byte is rounded down only at the end.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from .errors import FormulaError, did_you_mean
from .units import BYTE_UNITS

MAX_LENGTH = 1000
MAX_DEPTH = 300  # of nested operators, far below what Python can recurse
MAX_EXPONENT = 8
MAX_VALUE = 2**256  # far above any memory; it bounds exponents of exponents


def _ceil_div(value: Fraction, divisor: Fraction) -> Fraction:
    return Fraction(-(-value // divisor))


def _round_up(value: Fraction, step: Fraction) -> Fraction:
    return _ceil_div(value, step) * step


def _power_of_two(value: Fraction) -> Fraction:
    if value < 1:
        raise FormulaError(f"there is no whole power of two up to {value}")
    return Fraction(1 << (int(value).bit_length() - 1))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or not 0 <= exponent <= MAX_EXPONENT:
        raise FormulaError(f"an exponent must be a whole number from 0 to {MAX_EXPONENT}, got {exponent}")
    return base ** int(exponent)


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: dict[str, tuple[Callable[..., Fraction], int | None]] = {
    "min": (lambda *values: min(values), None),
    "max": (lambda *values: max(values), None),
    "ceil_div": (_ceil_div, 2),
    "round_up": (_round_up, 2),
    "power_of_two": (_power_of_two, 1),
}
_CONSTANTS = {unit: Fraction(size) for unit, size in BYTE_UNITS.items() if unit != "B"}


@dataclass(frozen=True)
class Formula:
    """A parsed formula. ``names`` are the dims it needs; ``evaluate`` gives whole bytes."""

    text: str

    def __post_init__(self) -> None:
        self._tree  # noqa: B018 - parse now, so that a contract with a broken formula cannot be built

    @cached_property
    def _tree(self) -> ast.expr:
        if len(self.text) > MAX_LENGTH:
            raise FormulaError(f"a formula must be at most {MAX_LENGTH} characters, got {len(self.text)}")
        try:
            tree = ast.parse(self.text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            where = f" at column {error.offset}" if isinstance(error, SyntaxError) and error.offset else ""
            raise FormulaError(f"cannot parse the formula {self.text!r}{where}") from None
        self._refuse_unknown_syntax(tree, MAX_DEPTH)
        return tree

    @cached_property
    def names(self) -> frozenset[str]:
        """Every name that needs a value: dims, switches and ``e``."""
        functions = {node.func for node in ast.walk(self._tree) if isinstance(node, ast.Call)}
        used = {node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name) and node not in functions}
        return frozenset(used - _CONSTANTS.keys())

    def evaluate(self, values: Mapping[str, int]) -> int:
        """The formula's value in whole bytes, rounded down."""
        try:
            return int(self._value(self._tree, values) // 1)
        except ZeroDivisionError:
            raise FormulaError(f"the formula {self.text!r} divides by zero at {dict(values)}") from None

    def _refuse_unknown_syntax(self, node: ast.expr, depth: int) -> None:
        if depth == 0:
            raise FormulaError(f"a formula may nest {MAX_DEPTH} operators, and {self.text[:60]!r}... nests more")
        match node:
            case ast.Constant(value=bool() | math.inf):
                pass
            case ast.Constant(value=int() | float()) | ast.Name():
                return
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                self._refuse_unknown_syntax(left, depth - 1)
                self._refuse_unknown_syntax(right, depth - 1)
                return
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                self._refuse_unknown_syntax(operand, depth - 1)
                return
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                if name not in _FUNCTIONS:
                    raise FormulaError(
                        f"unknown function {name!r} in the formula {self.text!r}{did_you_mean(name, _FUNCTIONS)}"
                    )
                arity = _FUNCTIONS[name][1]
                if not args or (arity is not None and len(args) != arity):
                    raise FormulaError(
                        f"{name} takes {arity or 'one or more'} values in the formula {self.text!r}, got {len(args)}"
                    )
                for arg in args:
                    self._refuse_unknown_syntax(arg, depth - 1)
                return
        raise FormulaError(
            f"the formula {self.text!r} may hold numbers, dims, + - * / // % ** and min, max, ceil_div, round_up, "
            f"power_of_two; not {ast.unparse(node)!r}"
        )

    def _value(self, node: ast.expr, values: Mapping[str, int]) -> Fraction:
        match node:
            case ast.Constant(value=int() | float() as number):
                return Fraction(str(number))
            case ast.Name(id=name):
                if name in values:
                    return Fraction(values[name])
                if name in _CONSTANTS:
                    return _CONSTANTS[name]
                raise FormulaError(f"unknown name {name!r} in the formula {self.text!r}{did_you_mean(name, values)}")
            case ast.BinOp(left=left, op=op, right=right):
                value = _OPERATORS[type(op)](self._value(left, values), self._value(right, values))
                if abs(value) > MAX_VALUE:
                    raise FormulaError(f"the formula {self.text!r} leaves every range of bytes")
                return value
            case ast.UnaryOp(operand=operand):
                return -self._value(operand, values)
            case ast.Call(func=ast.Name(id=name), args=args):
                return _FUNCTIONS[name][0](*[self._value(arg, values) for arg in args])
        raise AssertionError(f"unreachable: {ast.dump(node)}")
