"""Check untrusted JSON against types: what is too large, unknown or of another type is refused."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import reprlib
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, NotRequired, get_args, get_origin, get_type_hints

from ...errors import UsageError

MOST_BYTES = 8 << 20
_LONGEST_TEXT = 20_000
_MOST_ENTRIES = 10_000


def parsed(content: bytes) -> Any:
    if len(content) > MOST_BYTES:
        raise UsageError(f"it must have at most {MOST_BYTES:,} bytes, and has more")
    try:
        return json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(f"it must be UTF-8, and byte {error.start:,} is not") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"it must be JSON: {str(error).splitlines()[0][:100]}") from None


def checked(value: Any, kind: Any, where: str = "") -> Any:
    """Return ``value`` as ``kind``: a type, a dataclass, or the kinds of an object by key. A list becomes a tuple."""
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, Mapping):
        return _checked_object(value, kind, where)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return kind(**_checked_object(value, kinds_of(kind), where))
    if origin is NotRequired:
        return checked(value, inner[0], where)
    if origin is UnionType:
        (other,) = (one for one in inner if one is not NoneType)
        return None if value is None else checked(value, other, where)
    if origin is Literal:
        return value if value in inner else _refuse(where, f"one of {', '.join(inner)}", value)
    if origin is tuple:
        _require_few(value, list, "a list", where)
        return tuple(checked(one, inner[0], f"{where}[{number}]") for number, one in enumerate(value))
    if origin is dict:
        _require_few(value, dict, "an object", where)
        return {checked(key, str, where): checked(one, inner[1], where) for key, one in value.items()}
    is_right, rule = _SIMPLE[kind]
    return value if is_right(value) else _refuse(where, rule, value)


@functools.cache
def kinds_of(kind: type) -> dict[str, Any]:
    """Return the kinds of a dataclass's fields. JSON may leave out fields with a default."""
    hints = get_type_hints(kind)
    return {
        field.name: hints[field.name] if field.default is dataclasses.MISSING else NotRequired[hints[field.name]]
        for field in dataclasses.fields(kind)
    }


def _checked_object(value: Any, kinds: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check an object, which must have these keys and no others."""
    if type(value) is not dict:
        _refuse(where, "an object", value)
    for key in value:
        if key not in kinds:
            raise UsageError(f"{where or 'it'} has the unknown key {reprlib.repr(key)}; known: {', '.join(kinds)}")
    for key, kind in kinds.items():
        if key not in value and get_origin(kind) is not NotRequired:
            raise UsageError(f"{where or 'it'} must have the key {key}")
    return {key: checked(one, kinds[key], f"{where}.{key}".lstrip(".")) for key, one in value.items()}


def _require_few(value: Any, wanted: Any, thing: str, where: str) -> None:
    if type(value) is not wanted or len(value) > _MOST_ENTRIES:
        _refuse(where, f"{thing} of at most {_MOST_ENTRIES:,} entries", value)


def _refuse(where: str, rule: str, value: Any) -> NoReturn:
    raise UsageError(f"{where or 'it'} must be {rule}, got {reprlib.repr(value)}")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**63 and math.isfinite(value)


_SIMPLE: dict[Any, tuple[Callable[[Any], bool], str]] = {
    str: (
        lambda value: type(value) is str and len(value) <= _LONGEST_TEXT,
        f"text of at most {_LONGEST_TEXT:,} characters",
    ),
    int: (lambda value: type(value) is int and _is_number(value), "a whole number of at most 63 bits"),
    float: (_is_number, "a number of at most 63 bits"),
    bool: (lambda value: type(value) is bool, "true or false"),
    NoneType: (lambda value: value is None, "null"),
}
