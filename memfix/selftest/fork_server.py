"""A server process that imports torch and the op, runs every check once, and then forks a child for each request.

A child loads the changed module in its own memory, so nothing has to be undone. Its time and memory are limited by the
operating system, because a mutant may hang or allocate without end.
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

from ..checks.children import start_method, take_one_core
from ..checks.effort import Effort
from ..checks.examine import Found
from ..checks.finding import Finding
from ..checks.interpreter import VARIABLE, prepare_to_interpret
from ..checks.preload import import_for_equality, import_for_meters
from ..contract import Contract
from ..errors import MeasurementError, MemfixError
from ..gate.lock import Key
from ..orphans import end_with, ends_with_parent
from ..registry import Source, all_contracts, source_of
from .coverage import Coverage, line_coverage
from .fingerprint import Fingerprint, compare_fingerprints, fingerprint_of
from .judge import Group, Judge, check_groups, is_memory
from .modules import reload_contract

MOST_BYTES = 4 << 30  # above what the server itself takes
LEAST_SECONDS = 30.0
FINGERPRINT_SECONDS = 60.0
_TIMES_LONGER = 5.0  # than the unchanged op, before a mutant is ended
_OUT_OF_MEMORY = ("allocate memory", "not enough memory", "MemoryError")


@dataclass(frozen=True)
class Setup:
    """What a server checks: forms of one op, in Triton's interpreter or not. Line coverage is recorded in ``paths``."""

    op: str
    forms: tuple[str, ...]
    paths: tuple[str, ...]
    effort: Effort
    lock: Mapping[Key, int] | None
    interpreted: bool
    triton_cache: str


@dataclass(frozen=True)
class Request:
    """A request to run ``groups`` of checks with ``changed`` modules (source by name). With a ``form``, the server
    takes its fingerprint instead, and compares it with ``before`` if that is given."""

    changed: Mapping[str, str]
    groups: tuple[Group, ...] = ()
    form: str = ""
    before: Fingerprint | None = None
    must_run: tuple[str, int] | None = None
    """A file and its line that must run: otherwise equal fingerprints mean nothing."""
    seconds: float = LEAST_SECONDS


@dataclass(frozen=True)
class Reply:
    """The reply to a request. ``verdict`` is caught (by ``check``), passed, not reached, fingerprint (taken), or that
    of :func:`compare_fingerprints`."""

    verdict: str
    check: str = ""
    why: str = ""
    fingerprint: Fingerprint | None = None


class ForkServer:
    """The client in the parent process. Several requests may be pending; each reply has the number of its request.

    ``baseline`` is the coverage of each group of checks with nothing planted, and ``fingerprints`` are those of the
    unchanged forms. The caller fills in both.
    """

    def __init__(self, setup: Setup) -> None:
        # Triton decides at its import whether it interprets; a forked process would inherit that decision
        method: Any = "spawn" if setup.interpreted and "triton" in sys.modules else start_method()
        context: Any = multiprocessing.get_context(method)
        self.baseline: dict[Group, Coverage] = {}
        self.fingerprints: dict[str, Fingerprint] = {}
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, setup), daemon=True)
        self._process.start()
        theirs.close()

    def receive(self) -> Any:
        """Return the next message: first the baseline, then ``(number, reply)`` for each request."""
        try:
            received = self.connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode
            raise MeasurementError(f"the process that checks mutants ended with exit code {code}") from None
        if isinstance(received, MemfixError):
            raise received
        return received

    def ask(self, number: int, request: Request) -> None:
        self.connection.send((number, request))

    def close(self) -> None:
        self.connection.close()
        # a forked server holds our end of the pipe too, so it never sees it closed; on Linux its children die with it
        self._process.join(0 if sys.platform == "linux" else 5)
        self._process.kill()
        self._process.join()

    def groups_at(self, path: str, lines: tuple[int, int]) -> list[Group]:
        """Return the groups that run one of the lines ``lines[0]`` to ``lines[1]``, the quickest first."""
        changed = range(lines[0], lines[1] + 1)
        groups = [group for group, ran in self.baseline.items() if not ran.lines[path].isdisjoint(changed)]
        return sorted(groups, key=lambda group: self.baseline[group].seconds)

    def checking(self, changed: Mapping[str, str], groups: Sequence[Group]) -> Request:
        seconds = LEAST_SECONDS + _TIMES_LONGER * sum(self.baseline[group].seconds for group in groups)
        return Request(changed, tuple(groups), seconds=seconds)


# ---------------------------------------------------------------- in the server process
@ends_with_parent
def _serve(connection: Connection, setup: Setup) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process by closing the pipe
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # mutants are checked by the gate without a GPU
    os.environ["TRITON_CACHE_DIR"] = setup.triton_cache
    take_one_core()
    import_for_equality()
    torch.backends.mkldnn.set_flags(False)  # on Arm oneDNN's threads do not survive a fork: a child would wait for ever
    if setup.interpreted:
        os.environ[VARIABLE] = "1"
        prepare_to_interpret()
    else:
        import_for_meters()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        contract, judge = all_contracts()[setup.op], Judge(setup.effort, setup.lock)
        server = _Server(connection, contract, source_of(setup.op), judge, setup.interpreted)
        connection.send(_baseline(judge, contract, setup))
    except MemfixError as error:
        connection.send(error)
        return
    server.serve()


def _baseline(judge: Judge, contract: Contract, setup: Setup) -> dict[Group, Coverage]:
    """Return the line coverage of each group of checks with nothing planted. All must pass."""
    baseline: dict[Group, Coverage] = {}
    for group in check_groups(contract, setup.forms, interpreted=setup.interpreted):
        run = partial(_run_traced, judge, contract, group, setup.paths)
        # a simulated step starts autograd's threads, and a process forked after that cannot run a backward
        baseline[group], found, judge.naive = _run_in_child(run) if is_memory(group) else run()
        if found is not None:
            raise MeasurementError(
                f"{contract.name} fails with nothing planted, so a self-test would show nothing; run memfix gate "
                f"{contract.name}: {found.subject}: {found.check}: {found.message}"
            )
    return baseline


def _run_traced(
    judge: Judge, contract: Contract, group: Group, paths: Sequence[str]
) -> tuple[Coverage, Finding | None, Found]:
    with line_coverage(paths) as coverage:
        failure = judge.first_failure(contract, [group])
    return coverage, failure, judge.naive


def _run_in_child(function: Callable[[], Any]) -> Any:
    process, pipe = _fork(function)
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        raise MeasurementError("the checks with nothing planted ended their process") from None
    finally:
        os.waitpid(process, 0)


def _fork(function: Callable[[], Any]) -> tuple[int, Any]:
    """Fork a child that runs ``function``; return its process id and the pipe that receives its pickled result."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    parent, process = os.getpid(), os.fork()
    if process == 0:
        end_with(parent)
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
    """The child's process id and the number of its request, by pipe."""

    def serve(self) -> None:
        while True:
            for ready in wait([self.connection, *self._children]):
                if ready is not self.connection:
                    self._collect(ready)
                    continue
                try:
                    number, request = self.connection.recv()
                except (EOFError, ConnectionError):
                    for process, _ in self._children.values():
                        os.kill(process, signal.SIGKILL)
                        os.waitpid(process, 0)
                    return
                process, pipe = _fork(partial(self._answer, request))
                self._children[pipe] = (process, number)

    def _collect(self, pipe: Any) -> None:
        process, number = self._children.pop(pipe)
        reply = None
        with contextlib.suppress(EOFError, OSError):
            reply = pickle.loads(pipe.recv_bytes())
        pipe.close()
        exit_code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        self.connection.send((number, reply or _reply_of_exit(exit_code)))

    def _answer(self, request: Request) -> Reply:
        _limit_this_process(request.seconds)
        contract = self.contract
        try:
            if request.changed:
                contract = reload_contract(contract, self.source, request.changed)
        except Exception as error:
            return Reply("caught", "import", f"{type(error).__name__}: {error}")
        if request.form:
            return self._compare(contract, request)
        # the smallest failing call of a mutant is not reported, so it is not searched for
        judge = replace(self.judge, effort=replace(self.judge.effort, shrinks=0))
        finding = judge.first_failure(contract, request.groups)
        if finding is None:
            return Reply("passed")
        if any(words in finding.message for words in _OUT_OF_MEMORY):
            return Reply("caught", "limit on memory", finding.message)
        return Reply("caught", finding.check, f"{finding.subject}: {finding.message}")

    def _compare(self, contract: Contract, request: Request) -> Reply:
        until = time.monotonic() + FINGERPRINT_SECONDS
        path, line = request.must_run or ("", 0)
        with line_coverage([path]) if path else contextlib.nullcontext(Coverage()) as ran:
            now = fingerprint_of(contract, request.form, self.judge.effort, interpreted=self.interpreted, until=until)
        if request.before is None:
            return Reply("fingerprint", fingerprint=now)
        verdict, why = compare_fingerprints(contract, request.form, request.before, now)
        if verdict == "equal" and path and line not in ran.lines[path]:
            verdict, why = "not reached", f"its condition was never met, not even in {len(now.answers)} more calls"
        return Reply(verdict, why=why)


def _limit_this_process(seconds: float) -> None:
    """Make the system end this process after ``seconds``, and refuse it more than ``MOST_BYTES`` of new memory."""
    faulthandler.disable()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        taken = 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmData:")))
        resource.setrlimit(resource.RLIMIT_DATA, (taken + MOST_BYTES, taken + MOST_BYTES))


def _reply_of_exit(exit_code: int) -> Reply:
    if exit_code == -signal.SIGALRM:
        return Reply("caught", "limit on time", "it ran past its time")
    if exit_code in (0, -signal.SIGKILL):
        return Reply("caught", "limit on memory", "the system ended it, or it could not reply")
    return Reply("caught", "crash", f"it ended its process with {exit_code}")
