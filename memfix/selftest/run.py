"""The course of a self-test: plant, ask the gate's checks in children, and look harder at what passes them."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from random import Random

from ..checks.effort import Effort
from ..contract import Contract
from ..errors import MeasurementError, UsageError, did_you_mean
from ..gate.lock import Key
from ..registry import source_of
from .keeper import LEAST_SECONDS, LOOK_SECONDS, Baseline, Keeper, Question, Reply
from .modules import home_of, same_code, spans_of_naive, texts_of, using
from .operators import OF_MEMORY, Known, Mutant, mutants_of
from .parts import Look, Part
from .text import Text

Say = Callable[[str], None]
Asking = Generator[tuple["_Kept", Question], Reply, "Outcome"]
_TIMES_LONGER = 5.0  # than with nothing planted, before a mutant is ended


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant. ``verdict`` is caught, equal, undecided, missed or not asked."""

    op: str
    mutant: Mutant
    verdict: str
    check: str = ""
    why: str = ""

    @property
    def is_never_run(self) -> bool:
        return self.why == NEVER_RUN


NEVER_RUN = "no check runs this line"


class TimeIsOver(Exception):
    """The checks with nothing planted took longer than there was time for."""


@dataclass
class _Kept:
    """A keeper, with what it said first and how forms answered it before anything was planted."""

    keeper: Keeper
    baseline: Baseline
    looks: dict[str, Look] = field(default_factory=dict)

    def parts_at(self, path: str, lines: tuple[int, int]) -> list[Part]:
        """The parts that run one of the lines from the first to the last, the quickest first."""
        met = range(lines[0], lines[1] + 1)
        parts = [part for part, found in self.baseline.watched.items() if not found.lines[path].isdisjoint(met)]
        return sorted(parts, key=self.baseline.seconds.__getitem__)

    def seconds(self, parts: Sequence[Part]) -> float:
        return LEAST_SECONDS + _TIMES_LONGER * sum(self.baseline.seconds[part] for part in parts)


def run_selftest(
    contract: Contract,
    *,
    form: str | None = None,
    effort: Effort,
    lock: Mapping[Key, int] | None,
    most: int | None = None,
    seed: int = 0,
    until: float | None = None,
    say: Say = lambda _: None,
) -> list[Outcome]:
    """Every mutant of the op's forms, or ``most`` of them, with its outcome. After the time ``until`` none is asked.

    Asked are the op's own checks, and those of every other op that uses the same modules, as in a gate of all.
    """
    forms = _chosen(contract, form)
    texts = texts_of(contract, source_of(contract.name), forms)
    paths = [text.path for text in texts]
    others = [op for op in using(texts) if op.name != contract.name and _not_known_unequal(op)]
    asked = [(contract, forms), *((op, _not_known_unequal(op)) for op in others)]
    with ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="memfix-selftest-"))

        def started(op: Contract, forms: Sequence[str], *, interpreted: bool) -> tuple[Contract, Keeper]:
            own = {key: size for key, size in (lock or {}).items() if key[0] == op.name}
            keeper = Keeper(op.name, forms, paths, effort, own or None, interpreted=interpreted, cache=cache)
            stack.callback(keeper.close)
            return op, keeper

        say(f"{contract.name}: its checks with nothing planted")
        keepers = []
        for op, its_forms in asked:
            has_kernels = any(op.forms[name].has_kernels for name in its_forms)
            keepers += [
                started(op, its_forms, interpreted=kind) for kind in ([False, True] if has_kernels else [False])
            ]
        for _, keeper in keepers:
            if until is not None and not keeper.connection.poll(max(0.0, until - time.monotonic())):
                raise TimeIsOver
        kept = [_Kept(keeper, _first_words(op, keeper)) for op, keeper in keepers]
        _require_loadable(contract, texts, kept)
        mutants = _planted(contract, forms, texts, kept, seed)[:most]
        return list(_outcomes(contract, mutants, texts, kept, until, say))


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


def _first_words(contract: Contract, keeper: Keeper) -> Baseline:
    baseline: Baseline = keeper.receive()
    if (found := baseline.failure) is not None:
        raise MeasurementError(
            f"{contract.name} fails with nothing planted, so that nothing can be learnt from it; run memfix gate "
            f"{contract.name}: {found.subject}: {found.check}: {found.message}"
        )
    return baseline


def _require_loadable(contract: Contract, texts: Sequence[Text], kept: Sequence[_Kept]) -> None:
    """The control: the forms' modules, loaded a second time as they are, must pass what they passed before."""
    for k in kept:
        parts = tuple(k.baseline.watched)
        k.keeper.ask(Question(0, {text.module: text.text for text in texts}, parts, seconds=k.seconds(parts)))
        if (reply := k.keeper.receive()).verdict != "passed":
            raise MeasurementError(f"{contract.name} fails when it is loaded a second time: {reply.check}: {reply.why}")


def _planted(
    contract: Contract, forms: Sequence[str], texts: Sequence[Text], kept: Sequence[_Kept], seed: int
) -> list[Mutant]:
    """All mutants in a random order in which the kinds take turns: the first of them are a fair sample."""
    entries = frozenset(home_of(contract.forms[form].function)[1] for form in forms)
    by_kind: dict[str, list[Mutant]] = {}
    for text in texts:
        tensors: dict[tuple[int, str], bool] = {}
        for part, found in itertools.chain.from_iterable(k.baseline.watched.items() for k in kept):
            for key, floating in found.tensors[text.path].items() if part.kind != "refusals" else ():
                tensors[key] = tensors.get(key, False) or floating
        watched = replace(text, tensors=tensors)
        known = Known(entries, contract.choices)
        for mutant in mutants_of(watched, known, skip=spans_of_naive(contract, text)):
            by_kind.setdefault(mutant.kind, []).append(mutant)
    for mutants in by_kind.values():
        Random(seed).shuffle(mutants)
    turns = itertools.zip_longest(*by_kind.values())
    return [mutant for turn in turns for mutant in turn if mutant is not None]


def _outcomes(
    contract: Contract, mutants: Sequence[Mutant], texts: Sequence[Text], kept: Sequence[_Kept],
    until: float | None, say: Say,
) -> Iterator[Outcome]:  # fmt: skip
    """As many mutants at a time as there are cores."""
    by_name = {text.module: text for text in texts}
    numbers = itertools.count()
    waiting = iter(mutants)
    asked: dict[int, tuple[Asking, Mutant]] = {}
    connections = {k.keeper.connection: k for k in kept}
    done = 0

    def advance(asking: Asking, mutant: Mutant, reply: Reply | None) -> Outcome | None:
        try:
            to, question = asking.send(reply)  # type: ignore[arg-type]
        except StopIteration as ended:
            outcome: Outcome = ended.value
            return outcome
        number = next(numbers)
        asked[number] = (asking, mutant)
        to.keeper.ask(replace(question, number=number))
        return None

    is_late = False
    while True:
        while not is_late and len(asked) < (os.cpu_count() or 1):
            mutant = next(waiting, None)
            if mutant is None:
                break
            outcome = advance(_asking(contract, mutant, by_name[mutant.module], kept), mutant, None)
            if outcome is not None:
                done += 1
                yield outcome
        if not asked or is_late:
            break
        say(f"{contract.name}: {done} of {len(mutants)} asked")
        timeout = None if until is None else max(0.0, until - time.monotonic())
        ready = wait(list(connections), timeout)
        is_late = not ready or (until is not None and time.monotonic() > until)
        for connection in ready:
            reply = connections[connection].keeper.receive()
            outcome = advance(*asked.pop(reply.number), reply)
            if outcome is not None:
                done += 1
                yield outcome
    for mutant in [*(mutant for _, mutant in asked.values()), *waiting]:
        yield Outcome(contract.name, mutant, "not asked", why="the time was over")


def _asking(contract: Contract, mutant: Mutant, text: Text, kept: Sequence[_Kept]) -> Asking:
    """The questions of one mutant in turn: an answer is sent in for each."""
    op, changed = contract.name, {mutant.module: mutant.changed}
    if same_code(text.text, mutant.changed):
        return Outcome(op, mutant, "equal", why="the same instructions")
    met = [(k, k.parts_at(text.path, mutant.lines)) for k in kept]
    if not any(parts for _, parts in met):
        return Outcome(op, mutant, "missed", why=NEVER_RUN)
    for k, parts in _in_order(met, memory_first=mutant.kind in OF_MEMORY):
        reply = yield k, Question(0, changed, tuple(parts), seconds=k.seconds(parts))
        if reply.verdict == "caught":
            return Outcome(op, mutant, "caught", reply.check, reply.why)
    found: dict[str, str] = {}
    for k, parts in met:
        for form in dict.fromkeys(part.form for part in parts):
            if form not in k.looks:
                reply = yield k, Question(0, {}, form=form, seconds=2 * LOOK_SECONDS)
                k.looks[form] = reply.look or Look({}, {})
            must_run = (text.path, mutant.must_run) if mutant.must_run else None
            reply = yield k, Question(0, changed, (), form, k.looks[form], must_run, seconds=4 * LOOK_SECONDS)
            if reply.verdict == "missed":
                return Outcome(op, mutant, "missed", why=reply.why)
            if reply.verdict == "unmet" and mutant.kind == "wrong with one option":
                return Outcome(op, mutant, "missed", why="no call has this option")
            found["equal" if reply.verdict == "equal" else "undecided"] = reply.why
    if mutant.doubt:
        found.setdefault("undecided", mutant.doubt)
    verdict = "undecided" if "undecided" in found else "equal"
    return Outcome(op, mutant, verdict, why=found[verdict])


def _in_order(met: Sequence[tuple[_Kept, list[Part]]], *, memory_first: bool) -> Iterator[tuple[_Kept, list[Part]]]:
    """What is likeliest to catch a mutant first; memory last, unless it is the likeliest."""
    for of_memory in (memory_first, not memory_first):
        for k, parts in met:
            chosen = [part for part in parts if (part.kind == "memory") == of_memory]
            if chosen:
                yield k, chosen
