"""Finds contracts in the folders of ``memfix/ops``, and in other packages through an entry point.

A folder of ``memfix/ops`` holds one product. Its ``contract.py`` declares the op with the folder's name. Further
contracts of the product are in files named after their ops: ``kda/decode_kda_contract.py``.
"""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """The place where contracts are declared: an attribute of a module, or without one all that the module holds.

    ``spelled`` is its name in messages, and ``package`` the name of the entry point that it came by.
    """

    module: str
    attribute: str
    spelled: str
    package: str = ""

    def declared(self) -> list[Any]:
        module = importlib.import_module(self.module)
        if not self.attribute:
            return list({id(value): value for value in vars(module).values() if isinstance(value, Contract)}.values())
        found = operator.attrgetter(self.attribute)(module)
        return list(found) if isinstance(found, (list, tuple)) else [found]


@dataclass(frozen=True)
class Registered:
    """The contracts by name in alphabetical order, their sources, and why others were left out."""

    contracts: Mapping[str, Contract]
    sources: Mapping[str, Source]
    left_out: Sequence[tuple[str, str]]
    """The name of an entry point, and a sentence that says what is wrong with it."""


@functools.cache
def registered() -> Registered:
    """Everything that is declared. A fault of ours is raised; one of another package leaves out what it concerns."""
    contracts: dict[str, Contract] = {}
    sources: dict[str, Source] = {}
    left_out: list[tuple[str, str]] = []
    for source in (*_own_sources(), *_sources_of_other_packages()):
        try:
            declared = source.declared() if not source.package else _declared_elsewhere(source)
        except BrokenEntryPoint as error:
            left_out.append((source.package, str(error)))
            continue
        for contract in declared:
            first = sources.setdefault(contract.name, source)
            if contracts.setdefault(contract.name, contract) is not contract:
                twice = f"two contracts are named {contract.name!r}: in {first.spelled} and in {source.spelled}"
                if not source.package:
                    raise ContractError(twice)
                left_out.append((source.package, f"{twice}; the second is left out until one has another name"))
    return Registered({name: contracts[name] for name in sorted(contracts)}, sources, left_out)


def all_contracts() -> Mapping[str, Contract]:
    """Every contract by name, in alphabetical order."""
    return registered().contracts


def contracts(names: Iterable[str] = ()) -> list[Contract]:
    """The contracts called ``names``, or all of them. The name of an entry point stands for all that came by it."""
    known, sources = all_contracts(), registered().sources
    chosen: list[str] = []
    for name in names:
        of_package = [op for op in known if sources[op].package == name]
        if name not in known and not of_package:
            raise UsageError(f"no op {name!r}{did_you_mean(name, known)}{_perhaps_left_out(name)}")
        chosen += [name] if name in known else of_package
    return [known[name] for name in dict.fromkeys(chosen)] or list(known.values())


def source_of(name: str) -> Source:
    """Where the contract called ``name`` is declared."""
    return registered().sources[name]


def _perhaps_left_out(name: str) -> str:
    left_out = registered().left_out
    of_package = [reason for package, reason in left_out if package == name]
    return "".join(f"\n  left out: {reason}" for reason in of_package or [reason for _, reason in left_out])


class BrokenEntryPoint(ContractError):
    """What an entry point names cannot be loaded, or is no contract."""


def _declared_elsewhere(source: Source) -> list[Contract]:
    """The contracts of an entry point. Whatever goes wrong in the other package is told with the entry point's name."""
    try:
        found = source.declared()
    # a package that calls sys.exit() while it is imported would end the gate with its own exit code
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, MemfixError) else f"{type(error).__name__}: "
        raise BrokenEntryPoint(f"{source.spelled} cannot be loaded: {kind}{error}") from error
    strangers = [type(contract).__name__ for contract in found if not isinstance(contract, Contract)]
    if strangers or not found:
        rule = "must be a Contract, a list of them, or a module that holds some"
        raise BrokenEntryPoint(f"{source.spelled} {rule}, got {strangers[0] if strangers else 'none'}")
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
        module, _, attribute = entry.value.partition("[")[0].partition(":")
        spelled = f"the entry point {entry.name!r} ({entry.value})"
        yield Source(module.strip(), attribute.strip(), spelled, package=entry.name)
