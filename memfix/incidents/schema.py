"""Reads the sections of a YAML file into frozen dataclasses. Checks types, ranges and choices, with line numbers."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

import yaml

from ..errors import UsageError, did_you_mean

_INT = re.compile(r"[+-]?[0-9][0-9_]*")
_BOOL = {"true": True, "false": False}
_NULL = ("", "~", "null", "Null", "NULL")
_WORDS = {int: "an int", float: "a number", bool: "true or false", str: "a string"}
_LIMITS = (("at least", operator.le), ("more than", operator.lt), ("at most", operator.ge), ("less than", operator.gt))


def setting(
    default: Any = MISSING,
    *,
    about: str,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    choices: Iterable[str] = (),
) -> Any:
    """Declare a key of a section: its default (without one it is required), its meaning and its allowed values."""
    metadata = {"about": about, "limits": (low, above, high, below), "choices": tuple(choices)}
    return dataclasses.field(default=default, metadata=metadata, kw_only=True)


def read_sections(path: Path, schemas: Mapping[str, type[Any]], overrides: Iterable[str] = ()) -> dict[str, Any]:
    """An instance of each section's dataclass, from a YAML file with keys overridden by ``section.key=value``.

    One error lists all faults, each with the file, the line and the key.
    """
    tree = _read(path)
    for override in overrides:
        _put(tree, override)
    faults = [
        f"{entry.where}: unknown section {name!r}{did_you_mean(name, schemas)}"
        for name, entry in tree.items()
        if name not in schemas
    ]
    read: dict[str, Any] = {}
    for name in schemas:
        try:
            read[name] = _section(name, tree.get(name), path, schemas)
        except UsageError as error:
            faults.append(str(error))
    if faults:
        raise UsageError("\n".join(faults))
    return read


def described(schemas: Mapping[str, type[Any]]) -> Iterator[tuple[str, str, str]]:
    """Every key: its path, its allowed values and default, and its meaning."""
    for name, schema in schemas.items():
        kinds = typing.get_type_hints(schema)
        for field in dataclasses.fields(schema):
            kind, may_be_null = _kind(kinds[field.name])
            takes = " | ".join(field.metadata["choices"]) or _WORDS[kind]
            takes += "".join(f", {words}" for words, _ in _limits(field))
            takes += " or null" if may_be_null else ""
            default = "" if field.default is MISSING else f"  [{_shown(field.default)}]"
            yield f"{name}.{field.name}", takes + default, field.metadata["about"]


def differences(old: Mapping[str, Mapping[str, Any]], new: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The keys whose values differ between two runs, each with ``old -> new``."""
    found = {}
    for section in {**old, **new}:
        before, after = old.get(section, {}), new.get(section, {})
        for key in {**before, **after}:
            if before.get(key, MISSING) != after.get(key, MISSING):
                changed = (_shown(side[key]) if key in side else "absent" for side in (before, after))
                found[f"{section}.{key}"] = " -> ".join(changed)
    return found


# ---------------------------------------------------------------- parsing
@dataclass(frozen=True)
class _Entry:
    """A value as written in the file: text, or keys with entries of their own."""

    where: str
    text: str = ""
    unquoted: bool = True  # not quoted; only an unquoted null means None
    keys: dict[str, _Entry] | None = None


def _read(path: Path) -> dict[str, _Entry]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"no config file {path}") from None
    except OSError as error:
        raise UsageError(f"cannot read the config file {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not text: byte {error.start} is not UTF-8") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        reason = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        raise UsageError(f"{path}{f':{mark.line + 1}' if mark else ''}: not YAML: {reason}") from None
    if node is None:
        raise UsageError(f"{path}: the file is empty; write sections such as model, data, training")
    entry = _entry(node, path, "")
    if entry.keys is None:
        raise UsageError(f"{entry.where}: a config is sections of keys, got {entry.text!r}")
    return entry.keys


def _entry(node: yaml.Node, path: Path, key_path: str) -> _Entry:
    where = f"{path}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.ScalarNode):
        return _Entry(where, text=node.value, unquoted=node.style is None)
    if isinstance(node, yaml.SequenceNode):
        raise UsageError(f"{where}: {key_path or 'a config'} must not be a list")
    keys: dict[str, _Entry] = {}
    # deeper keys are refused anyway, and visiting them might never end, because a YAML node can contain itself
    if "." in key_path:
        return _Entry(where, keys=keys)
    lines: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise UsageError(f"{path}:{line}: a key must be a word")
        inner = f"{key_path}.{key.value}".strip(".")
        if key.value in keys:
            raise UsageError(f"{path}:{line}: {inner} is given twice, first in line {lines[key.value]}")
        lines[key.value] = line
        # report the key's line, because its value may be on a later line
        keys[key.value] = dataclasses.replace(_entry(value, path, inner), where=f"{path}:{line}")
    return _Entry(where, keys=keys)


def _put(tree: dict[str, _Entry], override: str) -> None:
    key_path, equals, text = override.partition("=")
    names = key_path.split(".")
    if not equals or len(names) != 2 or not all(names):
        raise UsageError(f"an override is section.key=value, such as training.steps=10; got {override!r}")
    section, key = names
    entry = tree.get(section)
    if entry is None or (entry.keys is None and _is_null(entry)):
        entry = tree[section] = _Entry(f"override {override}", keys={})
    if entry.keys is not None:  # a section that is text is refused later
        entry.keys[key] = _Entry(f"override {override}", text=text)


# ---------------------------------------------------------------- checking against the schema
def _section(name: str, entry: _Entry | None, path: Path, schemas: Mapping[str, type[Any]]) -> Any:
    schema = schemas[name]
    if entry is not None and entry.keys is None and not _is_null(entry):
        raise UsageError(f"{entry.where}: {name} must be a section of keys, got {entry.text!r}")
    given = (entry.keys if entry else None) or {}
    where = entry.where if entry else str(path)
    fields = {field.name: field for field in dataclasses.fields(schema)}
    kinds = typing.get_type_hints(schema)
    faults, read = [], {}
    for key, value in given.items():
        try:
            if key not in fields:
                raise UsageError(f"unknown key {name}.{key}{_nearest(name, key, schemas)}")
            read[key] = _value(f"{name}.{key}", fields[key], kinds[key], value)
        except UsageError as error:
            faults.append(f"{value.where}: {error}")
    faults += [
        f"{where}: {name}.{key} is missing: {field.metadata['about']}"
        for key, field in fields.items()
        if field.default is MISSING and key not in given
    ]
    if not faults:
        try:
            return schema(**read)
        except ValueError as error:
            faults.append(f"{where}: {name}: {error}")
    raise UsageError("\n".join(faults))


def _nearest(section: str, key: str, schemas: Mapping[str, type[Any]]) -> str:
    """A hint for an unknown key: the same key in another section, or a similar one in this section."""
    for other, schema in schemas.items():
        if any(field.name == key for field in dataclasses.fields(schema)):
            return f"; did you mean '{other}.{key}'?"
    return did_you_mean(key, [field.name for field in dataclasses.fields(schemas[section])])


def _value(key_path: str, field: dataclasses.Field[Any], annotation: Any, entry: _Entry) -> Any:
    kind, may_be_null = _kind(annotation)
    if entry.keys is not None:
        raise UsageError(f"{key_path} must be {_WORDS[kind]}, got keys of its own")
    if may_be_null and _is_null(entry):
        return None
    try:
        value = _parsed(kind, entry)
    except ValueError:
        or_null = " or null" if may_be_null else ""
        raise UsageError(f"{key_path} must be {_WORDS[kind]}{or_null}, got {entry.text!r}") from None
    choices = field.metadata["choices"]
    if choices and value not in choices:
        raise UsageError(f"{key_path} must be one of {', '.join(choices)}, got {value!r}")
    for words, keeps in _limits(field):
        if not keeps(value):
            raise UsageError(f"{key_path} must be {words}, got {_shown(value)}")
    return value


def _parsed(kind: type[Any], entry: _Entry) -> Any:
    # parse the text ourselves, because YAML 1.1 reads 1e-3 as a string and 1:30 as ninety
    text = entry.text
    if kind is str and not _is_null(entry):
        return text
    if kind is bool and text.lower() in _BOOL:
        return _BOOL[text.lower()]
    if kind is int and _INT.fullmatch(text):
        return int(text)
    if kind is float and math.isfinite(float(text)):
        return float(text)
    raise ValueError(text)


def _is_null(entry: _Entry) -> bool:
    return entry.keys is None and entry.unquoted and entry.text in _NULL


def _kind(annotation: Any) -> tuple[type[Any], bool]:
    """``int | None`` as ``int`` and True."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        (kind,) = (argument for argument in typing.get_args(annotation) if argument is not type(None))
        return kind, True
    assert annotation in _WORDS, f"a setting is an int, float, bool or str, not {annotation}"
    return annotation, False


def _limits(field: dataclasses.Field[Any]) -> Iterator[tuple[str, Any]]:
    """Each bound of a key, in words and as a test."""
    for (words, keeps), limit in zip(_LIMITS, field.metadata["limits"], strict=True):
        if limit is not None:
            yield f"{words} {limit}", functools.partial(keeps, limit)


def _shown(value: Any) -> str:
    """``value`` as it is written in a file."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
