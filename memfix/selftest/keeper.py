"""A process that has imported everything, run every check once, and forks a child for each question.

A child loads the changed module in its own memory, so nothing has to be undone. Its time and memory have limits, which
the system holds it to: a mutant may hang or ask for all there is.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from ..checks.children import StartMethod, start_method, take_one_core
from ..checks.effort import Effort
from ..checks.finding import Finding
from ..checks.interpreter import VARIABLE, prepare_to_interpret
from ..checks.plan import Found
from ..checks.preload import import_for_equality, import_for_meters
from ..contract import Contract
from ..errors import MeasurementError, MemfixError
from ..gate.lock import Key
from ..registry import Source, all_contracts, source_of
from .modules import loaded_again
from .parts import Judge, Look, Part, difference, look
from .watching import Watched, watching

MOST_BYTES = 4 << 30  # above what the keeper itself takes
LEAST_SECONDS = 30.0
LOOK_SECONDS = 60.0


@dataclass(frozen=True)
class Question:
    """Is a module with this text caught by ``parts``? With ``before``, does ``form`` differ from it anywhere?"""

    number: int
    changed: Mapping[str, str]
    parts: tuple[Part, ...] = ()
    form: str = ""
    before: Look | None = None
    must_run: tuple[str, int] | None = None
    seconds: float = LEAST_SECONDS


@dataclass(frozen=True)
class Reply:
    """``verdict`` is caught, passed, unmet, or what :func:`difference` says; ``check`` is who caught it."""

    number: int
    verdict: str
    check: str = ""
    why: str = ""
    look: Look | None = None


@dataclass(frozen=True)
class Baseline:
    """What the checks did with nothing planted: lines and tensors that they met, and how long each part took."""

    watched: dict[Part, Watched]
    seconds: dict[Part, float]
    failure: Finding | None = None


class Keeper:
    """The parent's end. Several questions may be under way; replies come in any order."""

    def __init__(
        self, op: str, forms: Sequence[str], paths: Sequence[str], effort: Effort, lock: Mapping[Key, int] | None,
        *, interpreted: bool, cache: str,
    ) -> None:  # fmt: skip
        method: StartMethod = start_method()
        if interpreted and "triton" in sys.modules:  # where Triton is imported, it has decided already
            method = "spawn"
        context: Any = multiprocessing.get_context(method)
        self.connection, theirs = context.Pipe()
        arguments = (theirs, op, tuple(forms), tuple(paths), effort, lock, interpreted, cache)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def receive(self) -> Any:
        try:
            received = self.connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise MeasurementError(f"the process that asks mutants ended with {self._process.exitcode}") from None
        if isinstance(received, MemfixError):
            raise received
        return received

    def ask(self, question: Question) -> None:
        self.connection.send(question)

    def close(self) -> None:
        self.connection.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


# ---------------------------------------------------------------- the keeper's own process
def _serve(
    connection: Connection, op: str, forms: Sequence[str], paths: Sequence[str], effort: Effort,
    lock: Mapping[Key, int] | None, interpreted: bool, cache: str,
) -> None:  # fmt: skip
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process by closing the pipe
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the gate without a GPU is what is asked
    os.environ["TRITON_CACHE_DIR"] = cache
    take_one_core()
    import_for_equality()
    torch.backends.mkldnn.set_flags(False)  # on Arm its threads do not survive a fork: a child waits for them for good
    if interpreted:
        os.environ[VARIABLE] = "1"
        prepare_to_interpret()
    else:
        import_for_meters()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        contract, source = all_contracts()[op], source_of(op)
        judge = Judge(effort, lock)
        baseline = _baseline(judge, contract, forms, paths, interpreted=interpreted)
    except MemfixError as error:
        connection.send(error)
        return
    connection.send(baseline)
    _Server(connection, contract, source, judge, interpreted).serve()


def _baseline(
    judge: Judge, contract: Contract, forms: Sequence[str], paths: Sequence[str], *, interpreted: bool
) -> Baseline:
    watched: dict[Part, Watched] = {}
    seconds: dict[Part, float] = {}
    for part in judge.parts(contract, forms, interpreted=interpreted):
        asked = partial(_watched, judge, contract, part, paths)
        start = time.monotonic()
        # a simulated step starts autograd's threads, and a child of a process that has them cannot run a backward
        found, failure, judge.naive = _in_child(asked) if part.kind == "memory" else asked()
        if failure is not None:
            return Baseline({}, {}, failure)
        watched[part], seconds[part] = found, time.monotonic() - start
    return Baseline(watched, seconds)


def _watched(
    judge: Judge, contract: Contract, part: Part, paths: Sequence[str]
) -> tuple[Watched, Finding | None, Found]:
    with watching(paths) as found:
        failure = judge.first_failure(contract, [part])
    return found, failure, judge.naive


def _in_child(function: Callable[[], Any]) -> Any:
    process, pipe = _forked(function)
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        raise MeasurementError("the checks with nothing planted ended their process") from None
    finally:
        os.waitpid(process, 0)


def _forked(function: Callable[[], Any]) -> tuple[int, Any]:
    """A child, and the pipe through which what ``function`` returns there arrives."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = os.fork()
    if process == 0:
        with contextlib.suppress(BaseException):
            theirs.send_bytes(pickle.dumps(function()))
        os._exit(0)
    theirs.close()
    return process, ours


@dataclass
class _Server:
    connection: Connection
    contract: Contract
    source: Source
    judge: Judge
    interpreted: bool
    _children: dict[Any, tuple[int, int]] = field(default_factory=dict)
    """Pipe -> process, number of the question."""

    def serve(self) -> None:
        while True:
            for ready in wait([self.connection, *self._children]):
                if ready is not self.connection:
                    self._collect(ready)
                    continue
                try:
                    question = self.connection.recv()
                except (EOFError, ConnectionError):
                    for process, _ in self._children.values():
                        os.kill(process, signal.SIGKILL)
                        os.waitpid(process, 0)
                    return
                self._fork(question)

    def _fork(self, question: Question) -> None:
        process, pipe = _forked(partial(self._answer, question))
        self._children[pipe] = (process, question.number)

    def _collect(self, pipe: Any) -> None:
        process, number = self._children.pop(pipe)
        try:
            reply = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            reply = None
        pipe.close()
        exit_code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        self.connection.send(reply or _ended(number, exit_code))

    def _answer(self, question: Question) -> Reply:
        number = question.number
        _limit(question.seconds)
        try:
            contract = self.contract
            if question.changed:
                contract = loaded_again(contract, self.source, question.changed)
        except Exception as error:
            return Reply(number, "caught", "import", f"{type(error).__name__}: {error}")
        if question.form:
            until = time.monotonic() + LOOK_SECONDS
            path, line = question.must_run or ("", 0)
            with watching([path]) if path else contextlib.nullcontext(Watched()) as watched:
                now = look(contract, question.form, self.judge.effort, interpreted=self.interpreted, until=until)
            if question.before is None:
                return Reply(number, "looked", look=now)
            verdict, why = difference(contract, question.form, question.before, now)
            if verdict == "equal" and path and line not in watched.lines[path]:
                verdict, why = "unmet", f"its condition was never met, nor in {len(now.answers)} more calls"
            return Reply(number, verdict, why=why)
        # nobody reads the smallest call of a mutant
        judge = replace(self.judge, effort=replace(self.judge.effort, shrinks=0))
        finding = judge.first_failure(contract, question.parts)
        if finding is None:
            return Reply(number, "passed")
        if any(words in finding.message for words in _OUT_OF_MEMORY):
            return Reply(number, "caught", "limit on memory", finding.message)
        return Reply(number, "caught", finding.check, f"{finding.subject}: {finding.message}")


_OUT_OF_MEMORY = ("allocate memory", "not enough memory", "MemoryError")


def _limit(seconds: float) -> None:
    """The system ends the process when its time is over, and refuses memory above the limit."""
    faulthandler.disable()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        taken = 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmData:")))
        resource.setrlimit(resource.RLIMIT_DATA, (taken + MOST_BYTES, taken + MOST_BYTES))


def _ended(number: int, exit_code: int) -> Reply:
    if exit_code == -signal.SIGALRM:
        return Reply(number, "caught", "limit on time", "it ran past its time")
    if exit_code in (0, -signal.SIGKILL):
        return Reply(number, "caught", "limit on memory", "the system ended it, or it could not even answer")
    return Reply(number, "caught", "crash", f"it ended its process with {exit_code}")
