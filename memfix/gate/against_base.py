"""``--base``: compare ops with another commit, each in the checkout of its own package.

Memfix's own ops are judged in a copy of memfix, by its checks as they were where these changed (``base.py``). The ops
of other packages are judged by today's checks (``their_base.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..checks.examine import Examination, Tools
from ..checks.finding import Finding
from ..contract import Contract
from ..errors import MemfixError, UsageError
from ..registry import source_of
from .base import JUDGED, Base, examine_under, judge_changes, law_changes, laws_under, lock_at, lock_changes
from .lock import Key
from .their_base import bytes_against_base, under_laws_of, under_their_laws
from .timing.base_checkout import BaseCheckouts, check_out_base

_OWN = __name__.partition(".")[0]


@dataclass(frozen=True)
class Bases:
    """The commit of memfix itself, where its own ops are judged, and those of other packages."""

    own: Base | None
    theirs: BaseCheckouts
    contracts: tuple[Contract, ...]
    notes: tuple[str, ...]

    def findings(self, tools: Tools) -> list[Finding]:
        """Judge today's forms by the laws of the base, and note how these differ from today's."""
        own = [contract for contract in self.contracts if _is_own(contract)]
        others = [contract for contract in self.contracts if not _is_own(contract)]
        rows = _under_own_laws(self.own, own, tools) if self.own else []
        return [*rows, *under_their_laws(self.theirs, others, tools)]

    def lock_changes(self, path: Path, lock: dict[Key, int]) -> list[Finding]:
        """Note how the lock differs from that of the base, if one of the checkouts contains it."""
        commits = [*([self.own] if self.own else []), *self.theirs.commits.values()]
        for commit in commits:
            if path.resolve().is_relative_to(commit.root.resolve()):
                return lock_changes(lock_at(commit, path), lock, commit.ref)
        return []

    def bytes_findings(self, examinations: Sequence[Examination], tools: Tools) -> list[Finding]:
        """Compare the bytes of other packages' forms with those at the base."""
        return list(bytes_against_base(self.theirs, self.contracts, examinations, tools))


@contextmanager
def bases_of(ref: str, contracts: Sequence[Contract]) -> Iterator[Bases]:
    """Find the commit ``ref`` in every package of ``contracts``. One without it is noted, or refused if alone."""
    own_ops = [contract.name for contract in contracts if _is_own(contract)]
    others = [contract for contract in contracts if not _is_own(contract)]
    own, notes, theirs = None, list[str](), BaseCheckouts()
    otherwise = "held to today's laws only"
    if own_ops:
        try:
            own = Base.of(ref, Path(__file__).resolve().parents[1])
            notes += own.notes(*JUDGED)
        except UsageError as error:
            if not others:
                raise
            notes.append(f"memfix's own ops: {otherwise}: {error}")
    with ExitStack() as stack:
        if others:
            try:
                theirs = stack.enter_context(check_out_base(ref, others, otherwise=otherwise))
            except UsageError as error:
                if own is None:
                    raise
                notes.append(f"{', '.join(contract.name for contract in others)}: {otherwise}: {error}")
        yield Bases(own, theirs, tuple(contracts), (*notes, *theirs.notes))


def _is_own(contract: Contract) -> bool:
    return source_of(contract.name).module.startswith(f"{_OWN}.")


def _under_own_laws(base: Base, contracts: Sequence[Contract], tools: Tools) -> list[Finding]:
    """Judge today's forms by the base's laws, and note how the two laws differ."""
    by_name = {contract.name: contract for contract in contracts}
    rows = base.gone_ops("law")
    changed = [op for op in base.ops_with_other_laws() if op in by_name]
    rows += [Finding("law", op, "", "note", f"new: no law at {base.ref}") for op in changed if base.is_new(op)]
    judged = [op for op in changed if not base.is_new(op)]
    judges = base.judges_changed()
    if judges:
        rows += judge_changes(judges, base.ref)
        return rows + _under_checks_of(base, by_name, judged, tools)
    for op in judged:
        tools.say(f"{op}: today's forms under the laws of {base.ref}")
        with base.laid_over([op]) as overlay:
            try:
                rows += law_changes(by_name[op], laws_under(overlay, [op])[op], base.ref)
                found = examine_under(overlay, [op], tools.effort.name, tools.meter.name)["findings"]
            except MemfixError as error:
                if base.has_moved(op):  # its old contract need not fit today's forms: a reader must compare
                    rows.append(Finding("law", op, "", "note", f"was declared elsewhere at {base.ref}: {error}"))
                else:
                    rows.append(Finding("base law", op, "", "error", str(error)))
                continue
        rows += under_laws_of(base.ref, list(map(Finding.from_dict, found)))
    return rows


def _under_checks_of(
    base: Base, contracts: Mapping[str, Contract], changed: Sequence[str], tools: Tools
) -> list[Finding]:
    """Judge today's forms by the base's checks and laws, and note how the laws of ``changed`` ops differ."""
    ops = [op for op in contracts if op in base.ops_here() and not base.is_new(op)]
    tools.say(f"today's forms under the checks and laws of {base.ref}")
    rows: list[Finding] = []
    with base.with_todays_forms() as overlay:
        try:
            laws = laws_under(overlay, ops)
            for op in changed:
                rows += law_changes(contracts[op], laws[op], base.ref)
            found = examine_under(overlay, ops, tools.effort.name, tools.meter.name)["findings"]
        except MemfixError as error:
            # memfix's own code has changed; the rows name the files to read
            return [*rows, Finding("law", "memfix", "", "note", f"not judged by the checks of {base.ref}: {error}")]
    return rows + under_laws_of(base.ref, list(map(Finding.from_dict, found)))
