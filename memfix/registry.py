"""Finds contracts: one in each folder of ``memfix/ops``, and other packages' by an entry point."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterable
from importlib.metadata import entry_points

from . import ops
from .contract import Contract
from .errors import ContractError, MemfixError, UsageError, did_you_mean

ENTRY_POINT_GROUP = "memfix.contracts"


@functools.cache
def all_contracts() -> dict[str, Contract]:
    """Every contract by name, in alphabetical order. Two of one name are refused."""
    found: dict[str, tuple[Contract, str]] = {}
    for contract, source in (*_own_contracts(), *_contracts_of_other_packages()):
        if contract.name in found:
            raise ContractError(
                f"two contracts are named {contract.name!r}: in {found[contract.name][1]} and in {source}"
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


def _own_contracts() -> Iterable[tuple[Contract, str]]:
    for module in pkgutil.iter_modules(ops.__path__):
        if module.ispkg:
            source = f"{ops.__name__}.{module.name}.contract"
            yield importlib.import_module(source).contract, source


def _contracts_of_other_packages() -> Iterable[tuple[Contract, str]]:
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        source = f"the entry point {entry.name!r} ({entry.value})"
        try:
            loaded = entry.load()
        except MemfixError:
            raise
        except Exception as error:
            raise ContractError(f"{source} cannot be loaded: {type(error).__name__}: {error}") from error
        for contract in loaded if isinstance(loaded, (list, tuple)) else [loaded]:
            if not isinstance(contract, Contract):
                raise ContractError(f"{source} must be a Contract or a list of them, got {type(contract).__name__}")
            yield contract, source
