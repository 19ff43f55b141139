"""``--changed``: find the ops whose files differ from a commit.

An op depends on the modules that its contract, naive and forms import from packages of the same checkout, on other
files in the same folders, and on its entries in the lock. Sources are read, not run: where no op is touched, not even
torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import LockError, UsageError
from ..registry import Source, all_contracts, source_of, sources
from .base import JUDGES
from .commit import Commit, NotInGit, git, is_tracked
from .definitions import definition_of
from .lock import parse_lock, read_lock
from .module_graph import files_used, package_of

OPTION = "--changed"
_NAMED = 3


@dataclass(frozen=True)
class Touched:
    """The ops that a change touches, and a note that says why."""

    ops: tuple[str, ...]
    note: str
    packages: tuple[str, ...] = ()
    """The entry points whose files differ. Their ops are unknown if the change broke the import."""


def touched_ops(ref: str, lock_path: Path | None, among: Sequence[str] = ()) -> Touched:
    """Return the ops, ``among`` those named or all, with a file that differs between ``ref`` and the working tree."""
    checkout = _Checkout.here()
    declared = [source for source in sources() if checkout.tracks(source.module.partition(".")[0])]
    if not declared:
        raise NotInGit(f"{OPTION} needs ops in this checkout, and {checkout.root} tracks no package that registers any")
    package = package_of(declared[0].module)
    assert package is not None
    commit = Commit.of(ref, package, option=OPTION, may_be_empty=True)
    changed = commit.changed_files()
    if not changed:
        return Touched((), f"no op is touched: nothing differs from {ref}")
    judges = [name for name in sorted(changed.values()) if _is_judge(name)] if checkout.tracks("memfix") else []
    if judges:
        what = f"{_some(judges)} {'judges' if len(judges) == 1 else 'judge'} every form"
        return Touched(tuple(among or all_contracts()), f"{OPTION} {ref}: every op: {what}")
    difference = _Difference.of(declared, changed, checkout.tracks)
    packages = tuple(sorted({source.package for source in difference.touched} - {""}))
    reasons = dict(_ops_in_lock(commit, changed, lock_path)) | dict(difference.ops(checkout.tracks))
    reasons = {op: name for op, name in sorted(reasons.items()) if not among or op in among}
    if not reasons:
        number = f"{len(changed)} file{'s differ' if len(changed) != 1 else ' differs'}"
        return Touched((), f"no op is touched: {number} from {ref}, and no op depends on any of them", packages)
    spelled = ", ".join(f"{op} ({name})" for op, name in reasons.items())
    return Touched(tuple(reasons), f"{OPTION} {ref}: only what it touches: {spelled}", packages)


@dataclass
class _Checkout:
    """The git checkout that holds the working directory."""

    root: Path
    _tracked: dict[str, bool] = field(default_factory=dict)

    @classmethod
    def here(cls) -> _Checkout:
        try:
            return cls(Path(git(Path.cwd(), "rev-parse", "--show-toplevel").strip()).resolve())
        except UsageError as error:
            raise NotInGit(f"{OPTION} needs a git checkout, and {Path.cwd()} is in none: {error}") from None

    def tracks(self, package: str) -> bool:
        if package not in self._tracked:
            self._tracked[package] = is_tracked(self.root, package_of(package))
        return self._tracked[package]


def _is_judge(name: str) -> bool:
    return name in JUDGES or name.startswith(tuple(f"{judge}/" for judge in JUDGES))


@dataclass(frozen=True)
class _Difference:
    """The changed modules, the changed other files by the folder of modules that they belong to, and the sources of
    contracts that depend on them."""

    modules: dict[Path, str]
    beside: dict[Path, str]
    touched: frozenset[Source]

    @staticmethod
    def of(declared: Iterable[Source], changed: dict[Path, str], is_ours: Callable[[str], bool]) -> _Difference:
        modules = {path: name for path, name in changed.items() if path.suffix == ".py"}
        files = {source: files_used([source.module], is_ours) for source in declared}
        folders = {path.parent for used in files.values() for path in used}
        others = [(_nearest(path, folders), name) for path, name in changed.items() if path not in modules]
        beside = {folder: name for folder, name in others if folder is not None}
        touched = frozenset(source for source, used in files.items() if _first(used, modules, beside))
        return _Difference(modules, beside, touched)

    def ops(self, is_ours: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
        """Yield the ops that depend on changed files, each with the first of these files."""
        if not self.touched:
            return
        sources_of = {op: source_of(op) for op in all_contracts()}
        for op, source in sources_of.items():
            if source in self.touched:
                own = _modules_of(op)
                others = {name for other in sources_of if sources_of[other] == source for name in _modules_of(other)}
                used = files_used(own, is_ours) | files_used([source.module], is_ours, others - own)
                if name := _first(used, self.modules, self.beside):
                    yield op, name


def _modules_of(op: str) -> set[str]:
    """Return the modules that define naive and the forms of ``op``."""
    contract = all_contracts()[op]
    functions = [contract.naive, *(form.function for form in contract.forms.values())]
    return {definition_of(function)[0] for function in functions} - {""}


def _first(used: set[Path], modules: dict[Path, str], beside: dict[Path, str]) -> str:
    """Return the first changed file among the ``used`` ones, or in one of their folders."""
    names = [modules[path] for path in used if path in modules]
    return min(names or [beside[path.parent] for path in used if path.parent in beside], default="")


def _nearest(path: Path, folders: set[Path]) -> Path | None:
    """Return the folder of a file that is no module, or the nearest parent, that contains modules of an op."""
    return next((folder for folder in path.parents if folder in folders), None)


def _ops_in_lock(commit: Commit, changed: dict[Path, str], lock_path: Path | None) -> Iterator[tuple[str, str]]:
    """Yield the ops whose entries in the lock differ from those at the commit."""
    if lock_path is None or lock_path.resolve() not in changed:
        return
    name = changed[lock_path.resolve()]
    now, then = read_lock(lock_path), commit.file(name)
    try:
        before = parse_lock(then, name) if then is not None else {}
    except LockError:  # a broken lock, which this change mends
        before = {}
    for op in {key[0] for key, _ in now.items() ^ before.items()} & all_contracts().keys():
        yield op, name


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
