"""Find contracts in the folders of ``memfix/ops``, in other packages through an entry point, or in files.

A folder of ``memfix/ops`` holds one product. Its ``contract.py`` declares the op with the folder's name. Further
contracts of the product are in files named after their ops: ``kda/decode_kda_contract.py``.

Where the environment names files (``MEMFIX_FROM``, which ``--from`` sets), their contracts are all there are. Worker
processes inherit the variable, so they find the same contracts.
"""

from __future__ import annotations

import functools
import importlib
import operator
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from importlib.metadata import entry_points
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

from . import ops
from .contract import Contract
from .errors import ContractError, MemfixError, UsageError, did_you_mean

ENTRY_POINT_GROUP = "memfix.contracts"
FILES_VARIABLE = "MEMFIX_FROM"


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
            return _contracts_in(module)
        found = operator.attrgetter(self.attribute)(module)
        return list(found) if isinstance(found, (list, tuple)) else [found]


def _contracts_in(module: ModuleType) -> list[Contract]:
    """Return the contracts that a module has as attributes, and those of its suites."""
    found: dict[int, Contract] = {}
    for value in vars(module).values():
        contracts = [value] if isinstance(value, Contract) else getattr(value, "memfix_contracts", ())
        found |= {id(contract): contract for contract in contracts if isinstance(contract, Contract)}
    return list(found.values())


@dataclass(frozen=True)
class Registered:
    """The contracts by name in alphabetical order, their sources, and why others were left out."""

    contracts: Mapping[str, Contract]
    sources: Mapping[str, Source]
    left_out: Sequence[tuple[str, str]]
    """The name of an entry point, and a sentence that says what is wrong with it."""


@functools.cache
def registered() -> Registered:
    """Return everything that is declared. Errors in memfix's own ops are raised; others' faulty ones are left out."""
    contracts: dict[str, Contract] = {}
    declared_in: dict[str, Source] = {}
    left_out: list[tuple[str, str]] = []
    for source in sources():
        is_ours = source.module.startswith(f"{ops.__name__}.")
        try:
            declared = source.declared() if is_ours else _declared_elsewhere(source)
        except BrokenSource as error:
            if not source.package:
                raise
            left_out.append((source.package, str(error)))
            continue
        for contract in declared:
            first = declared_in.setdefault(contract.name, source)
            if contracts.setdefault(contract.name, contract) is not contract:
                twice = f"two contracts are named {contract.name!r}: in {first.spelled} and in {source.spelled}"
                if not source.package:
                    raise ContractError(twice)
                left_out.append((source.package, f"{twice}; the second is left out until one has another name"))
    return Registered({name: contracts[name] for name in sorted(contracts)}, declared_in, left_out)


def all_contracts() -> Mapping[str, Contract]:
    """Every contract by name, in alphabetical order."""
    return registered().contracts


def contracts(names: Iterable[str] = ()) -> list[Contract]:
    """Return the contracts called ``names``, or all. An entry point's name selects every contract that it declares."""
    known, sources = all_contracts(), registered().sources
    chosen: list[str] = []
    for name in names:
        of_package = [op for op in known if sources[op].package == name]
        if name not in known and not of_package:
            raise UsageError(f"no op {name!r}{_why_none(name)}")
        chosen += [name] if name in known else of_package
    return [known[name] for name in dict.fromkeys(chosen)] or list(known.values())


def source_of(name: str) -> Source:
    """Where the contract called ``name`` is declared."""
    return registered().sources[name]


def _why_none(name: str) -> str:
    """Return the end of the error about an unknown op: a broken package, or a similar name and what was left out."""
    known, left_out = registered().contracts, registered().left_out
    of_package = [reason for package, reason in left_out if package == name]
    if of_package:
        return f": {'; '.join(of_package)}"
    return did_you_mean(name, known) + "".join(f"\n  left out: {reason}" for _, reason in left_out)


class BrokenSource(ContractError):
    """What an entry point or a file names cannot be loaded, or is no contract."""


def _declared_elsewhere(source: Source) -> list[Contract]:
    """Return the contracts of another package or file. Errors in it name the source."""
    try:
        found = source.declared()
    # a package that calls sys.exit() while it is imported would end the gate with its own exit code
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, MemfixError) else f"{type(error).__name__}: "
        raise BrokenSource(f"{source.spelled} cannot be loaded: {kind}{error}") from error
    strangers = [type(contract).__name__ for contract in found if not isinstance(contract, Contract)]
    if strangers or not found:
        rule = "must be a Contract, a list of them, or a module that holds some"
        raise BrokenSource(f"{source.spelled} {rule}, got {strangers[0] if strangers else 'none'}")
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


def sources() -> Iterator[Source]:
    """Where contracts are declared, found without importing them."""
    paths = [Path(path) for path in os.environ.get(FILES_VARIABLE, "").split(os.pathsep) if path]
    if not paths:
        yield from _own_sources()
        yield from _sources_of_other_packages()
    for path in paths:
        for file in _files_in(path):
            yield _source_in(file)


def _files_in(path: Path) -> list[Path]:
    """Return the file, or the files of a folder whose text has ``Contract(``. No other file is imported."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UsageError(f"--from must be a file or a folder, got {path}, which does not exist")
    files = [file for file in sorted(path.rglob("*.py")) if "Contract(" in file.read_text(encoding="utf-8")]
    if not files:
        raise UsageError(f"--from {path}: no file in it has a Contract; name the file itself if it imports one")
    return files


def _source_in(file: Path) -> Source:
    """Return a file as a module, named and imported as by pytest. It may import from the working directory."""
    path = file.resolve()
    above = [path.stem]
    folder = path.parent
    while (folder / "__init__.py").exists():
        above.insert(0, folder.name)
        folder = folder.parent
    for place in (Path.cwd() / "src", Path.cwd(), folder):
        if place.is_dir() and str(place) not in sys.path:
            sys.path.insert(0, str(place))
    source = Source(".".join(above), "", str(file))
    there = getattr(sys.modules.get(source.module), "__file__", None) or str(path)
    if Path(there).resolve() != path:
        raise UsageError(f"--from {file}: a module {source.module!r} is there already, {there}; rename the file")
    return source


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
