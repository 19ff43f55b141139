"""Runs a self-test: plants mutants, runs the gate's checks on them, and compares fingerprints of those that pass."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from random import Random

from ..checks.effort import Effort
from ..contract import Contract
from ..errors import MeasurementError, UsageError, did_you_mean
from ..gate.definitions import definition_of
from ..gate.lock import Key
from ..progress import Say, silent
from ..registry import source_of
from .fingerprint import Fingerprint
from .fork_server import FINGERPRINT_SECONDS, ForkServer, Reply, Request, Setup
from .judge import Group, is_memory
from .modules import contracts_using, naive_lines, same_code, source_files_of
from .operators import MEMORY_KINDS, EntryPoints, Mutant, mutants_of
from .source import SourceFile

Requests = Generator[tuple[ForkServer, Request], Reply, "Outcome"]
"""A generator that yields the requests about one mutant, is sent the reply to each, and returns the outcome."""

NEVER_RUN = "no check runs this line"


@dataclass(frozen=True)
class Outcome:
    """The outcome of one mutant. ``verdict`` is caught, equal, undecided, missed, or not asked: the time
    limit was reached before it was checked."""

    op: str
    mutant: Mutant
    verdict: str
    check: str = ""
    why: str = ""

    @property
    def is_never_run(self) -> bool:
        return self.why == NEVER_RUN


class TimeIsOver(Exception):
    """The time was over before the checks with nothing planted had ended."""


def run_selftest(
    contract: Contract,
    *,
    form: str | None = None,
    effort: Effort,
    lock: Mapping[Key, int] | None,
    most: int | None = None,
    seed: int = 0,
    until: float | None = None,
    say: Say = silent,
) -> list[Outcome]:
    """Return the outcome of every mutant of the op's forms, or of ``most`` of them. After ``until`` none is checked.

    The checks are the op's own, and those of every other op that uses the same modules, as in a gate of all ops.
    """
    forms = _chosen(contract, form)
    files = source_files_of(contract, source_of(contract.name), forms)
    others = [(op, _not_known_unequal(op)) for op in contracts_using(files) if op.name != contract.name]
    with ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="memfix-selftest-"))
        say(f"{contract.name}: its checks with nothing planted")
        servers = []
        for op, its_forms in [(contract, forms), *(other for other in others if other[1])]:
            entries = {key: size for key, size in (lock or {}).items() if key[0] == op.name} or None
            # one process for the interpreted kernels, if there are any, and one for everything else
            for interpreted in sorted({False, *(op.forms[name].is_interpreted for name in its_forms)}):
                paths = tuple(file.path for file in files)
                setup = Setup(op.name, tuple(its_forms), paths, effort, entries, interpreted, cache)
                servers.append(stack.enter_context(closing(ForkServer(setup))))
        for server in servers:
            if until is not None and not server.connection.poll(max(0.0, until - time.monotonic())):
                raise TimeIsOver
        for server in servers:
            server.baseline = server.receive()
        _require_reloadable(contract, files, servers)
        mutants = _planted(contract, forms, files, servers, seed)[:most]
        return list(_outcomes(contract, mutants, files, servers, until, say))


def _chosen(contract: Contract, form: str | None) -> list[str]:
    if form is not None and form not in contract.forms:
        raise UsageError(f"{contract.name} has no form {form!r}{did_you_mean(form, contract.forms)}")
    chosen = [name for name in _not_known_unequal(contract) if form in (None, name)]
    if not chosen:
        what = form or "every form"
        raise UsageError(f"{contract.name}: {what} is known to be unequal: no regression would show in it")
    return chosen


def _not_known_unequal(contract: Contract) -> list[str]:
    return [name for name, form in contract.forms.items() if not form.known_unequal]


def _require_reloadable(contract: Contract, files: Sequence[SourceFile], servers: Sequence[ForkServer]) -> None:
    """Raise an error unless the forms' modules, reloaded without a change, pass the checks that they passed before."""
    for server in servers:
        server.ask(0, server.checking({file.module: file.text for file in files}, tuple(server.baseline)))
        reply: Reply = server.receive()[1]
        if reply.verdict != "passed":
            raise MeasurementError(f"{contract.name} fails when it is loaded a second time: {reply.check}: {reply.why}")


def _planted(
    contract: Contract, forms: Sequence[str], files: Sequence[SourceFile], servers: Sequence[ForkServer], seed: int
) -> list[Mutant]:
    """Return all mutants in random order, with the kinds in turns, so that the first of them are a fair sample."""
    names = frozenset(definition_of(contract.forms[form].function)[1] for form in forms)
    entry_points = EntryPoints(names, contract.choices)
    by_kind: dict[str, list[Mutant]] = {}
    for file in files:
        tensors: dict[tuple[int, str], bool] = {}
        for group, ran in itertools.chain.from_iterable(server.baseline.items() for server in servers):
            for key, floating in ran.tensors[file.path].items() if group[0].kind != "bad input" else ():
                tensors[key] = tensors.get(key, False) or floating
        for mutant in mutants_of(replace(file, tensors=tensors), entry_points, skip=naive_lines(contract, file)):
            by_kind.setdefault(mutant.kind, []).append(mutant)
    for mutants in by_kind.values():
        Random(seed).shuffle(mutants)
    turns = itertools.zip_longest(*by_kind.values())
    return [mutant for turn in turns for mutant in turn if mutant is not None]


def _outcomes(
    contract: Contract, mutants: Sequence[Mutant], files: Sequence[SourceFile], servers: Sequence[ForkServer],
    until: float | None, say: Say,
) -> Iterator[Outcome]:  # fmt: skip
    """Check as many mutants at a time as there are cores, and yield their outcomes."""
    by_name, by_connection = {file.module: file for file in files}, {server.connection: server for server in servers}
    numbers, waiting = itertools.count(), iter(mutants)
    pending: dict[int, tuple[Mutant, Requests]] = {}
    due: deque[tuple[Mutant, Requests, Reply | None]] = deque()
    done, is_late = 0, False
    while True:
        while not is_late and len(due) + len(pending) < (os.cpu_count() or 1):
            if (mutant := next(waiting, None)) is None:
                break
            due.append((mutant, _requests_about(contract, mutant, by_name[mutant.module], servers), None))
        if due:
            mutant, requests, reply = due.popleft()
            try:
                server, request = requests.send(reply)  # type: ignore[arg-type]
            except StopIteration as ended:
                done += 1
                yield ended.value
                continue
            number = next(numbers)
            pending[number] = (mutant, requests)
            server.ask(number, request)
            continue
        if not pending or is_late:
            break
        say(f"{contract.name}: {done} of {len(mutants)} asked")
        ready = wait(list(by_connection), None if until is None else max(0.0, until - time.monotonic()))
        is_late = not ready or (until is not None and time.monotonic() > until)
        for connection in ready:
            number, reply = by_connection[connection].receive()
            due.append((*pending.pop(number), reply))
    for mutant in [*(mutant for mutant, _ in pending.values()), *waiting]:
        yield Outcome(contract.name, mutant, "not asked", why="the time limit was reached")


def _requests_about(contract: Contract, mutant: Mutant, file: SourceFile, servers: Sequence[ForkServer]) -> Requests:
    op, changed = contract.name, {mutant.module: mutant.changed}
    if same_code(file.text, mutant.changed):
        return Outcome(op, mutant, "equal", why="the same instructions")
    running = [(server, server.groups_at(file.path, mutant.lines)) for server in servers]
    if not any(groups for _, groups in running):
        return Outcome(op, mutant, "missed", why=NEVER_RUN)
    for server, groups in _likeliest_first(running, memory_first=mutant.kind in MEMORY_KINDS):
        reply = yield server, server.checking(changed, groups)
        if reply.verdict == "caught":
            return Outcome(op, mutant, "caught", reply.check, reply.why)
    found: dict[str, str] = {}
    must_run = (file.path, mutant.must_run) if mutant.must_run else None
    for server, groups in running:
        for form in dict.fromkeys(group[0].form for group in groups):
            if form not in server.fingerprints:
                reply = yield server, Request({}, form=form, seconds=2 * FINGERPRINT_SECONDS)
                server.fingerprints[form] = reply.fingerprint or Fingerprint()
            before = server.fingerprints[form]
            reply = yield server, Request(changed, (), form, before, must_run, seconds=4 * FINGERPRINT_SECONDS)
            if reply.verdict == "missed":
                return Outcome(op, mutant, "missed", why=reply.why)
            if reply.verdict == "not reached" and mutant.kind == "wrong with one option":
                return Outcome(op, mutant, "missed", why="no call has this option")
            found["equal" if reply.verdict == "equal" else "undecided"] = reply.why
    if mutant.why_undecided:
        found.setdefault("undecided", mutant.why_undecided)
    verdict = "undecided" if "undecided" in found else "equal"
    return Outcome(op, mutant, verdict, why=found[verdict])


def _likeliest_first(
    running: Sequence[tuple[ForkServer, list[Group]]], *, memory_first: bool
) -> Iterator[tuple[ForkServer, list[Group]]]:
    """Yield the groups most likely to catch a mutant first: memory checks last, unless ``memory_first``."""
    for memory in (memory_first, not memory_first):
        for server, groups in running:
            if chosen := [group for group in groups if is_memory(group) == memory]:
                yield server, chosen
