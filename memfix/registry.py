"""Finds contracts in the folders of ``memfix/ops``, and in other packages through an entry point.

A folder of ``memfix/ops`` holds one product. Its ``contract.py`` declares the op with the folder's name. Further
contracts of the product are in files named after their ops: ``kda/decode_kda_contract.py``.
"""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from glob import glob
from importlib.metadata import entry_points
from pathlib import PurePath
from typing import Any

from . import ops
from .contract import Contract
from .errors import ContractError, MemfixError, UsageError, did_you_mean

ENTRY_POINT_GROUP = "memfix.contracts"


@dataclass(frozen=True)
class Source:
    """The place where one or more contracts are declared. ``spelled`` is its name in messages."""

    module: str
    attribute: str
    spelled: str

    def declared(self) -> list[Any]:
        found = operator.attrgetter(self.attribute)(importlib.import_module(self.module))
        return list(found) if isinstance(found, (list, tuple)) else [found]


@functools.cache
def all_contracts() -> dict[str, Contract]:
    """Every contract by name, in alphabetical order. Duplicate names are refused."""
    found: dict[str, tuple[Contract, Source]] = {}
    for contract, source in _declared():
        if contract.name in found:
            first = found[contract.name][1]
            raise ContractError(
                f"two contracts are named {contract.name!r}: in {first.spelled} and in {source.spelled}"
            )
        found[contract.name] = (contract, source)
    return {name: found[name][0] for name in sorted(found)}


def contracts(names: Iterable[str] = ()) -> list[Contract]:
    """The contracts called ``names``, or all of them."""
    known = all_contracts()
    for name in names:
        if name not in known:
            raise UsageError(f"no op {name!r}{did_you_mean(name, known)}")
    return [known[name] for name in dict.fromkeys(names)] or list(known.values())


def source_of(name: str) -> Source:
    """Where the contract called ``name`` is declared."""
    return next(source for contract, source in _declared() if contract.name == name)


def _declared() -> Iterator[tuple[Contract, Source]]:
    for source in _own_sources():
        yield from ((contract, source) for contract in source.declared())
    for source in _sources_of_other_packages():
        yield from ((contract, source) for contract in _declared_elsewhere(source))


def _declared_elsewhere(source: Source) -> list[Contract]:
    """The contracts of an entry point. Errors in the other package name the entry point."""
    try:
        found = source.declared()
    except MemfixError:
        raise
    except Exception as error:
        raise ContractError(f"{source.spelled} cannot be loaded: {type(error).__name__}: {error}") from error
    for contract in found:
        if not isinstance(contract, Contract):
            what = type(contract).__name__
            raise ContractError(f"{source.spelled} must be a Contract or a list of them, got {what}")
    return found


def op_declared_in(file: PurePath) -> str | None:
    """The name of the op that a file in ``memfix/ops`` declares; None if the file is not a contract."""
    if file.name == "contract.py":
        return file.parent.name
    return file.name.removesuffix("_contract.py") if file.name.endswith("_contract.py") else None


def in_a_folder_of_its_own(op: str) -> Source:
    """The source of an op in ``memfix/ops`` that has a folder of its own."""
    name = f"{ops.__name__}.{op}.contract"
    return Source(name, "contract", name)


def sources() -> list[Source]:
    """Where contracts are declared, found without importing them."""
    return [*_own_sources(), *_sources_of_other_packages()]


def _own_sources() -> Iterator[Source]:
    files = (PurePath(file) for folder in ops.__path__ for file in glob("*/*contract.py", root_dir=folder))
    for file in sorted(files):
        if op_declared_in(file) is not None:
            name = ".".join([ops.__name__, file.parent.name, file.stem])
            yield Source(name, "contract", name)


def _sources_of_other_packages() -> Iterator[Source]:
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        yield Source(entry.module, entry.attr, f"the entry point {entry.name!r} ({entry.value})")
