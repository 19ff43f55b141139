"""The pytest plugin: the ``peak_memory`` fixture, markers, options, and a summary of what was measured.

Loading it imports no torch. Results travel on each test's own report, so they arrive under xdist too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from . import __version__
from .errors import MemfixError
from .provenance import allocator_settings, gpu_and_driver, installed_version
from .units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from .checks.effort import Effort
    from .checks.examine import Found, Tools
    from .checks.finding import Finding
    from .contract import Contract
    from .gate.peaks import Peaks
    from .laws import Phase
    from .meters.base import Meter, Reading

PROPERTY, NO_GPU_PROPERTY, TEST_PROPERTY = "memfix", "memfix no gpu", "memfix test"
"""Properties of a test: what it measured, why it was skipped without a GPU, and that it is a test of memory."""

_OPTIONS = {
    "meter": ("METER", "what reads the peak: simulated (default), cuda, nvml or host"),
    "profile": ("PROFILE", "how hard the checks look: dev, ci (default) or thorough"),
    "lock": ("PATH", "file of exact bytes that a suite's readings must not exceed"),
    "json": ("PATH", "write every reading as JSON"),
    "md": ("PATH", "write every reading as a Markdown table"),
}
_FLAGS = {
    "update": "write the readings to the lock file instead of comparing with it",
    "strict": "fail when something could not be measured as asked, such as gpu tests without a GPU",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("memfix", "memory fixes")
    for name, (metavar, text) in _OPTIONS.items():
        group.addoption(f"--memfix-{name}", metavar=metavar, default=None, help=text)
        parser.addini(f"memfix_{name}", text, default=None)
    for name, text in _FLAGS.items():
        group.addoption(f"--memfix-{name}", action="store_true", default=None, help=text)
        parser.addini(f"memfix_{name}", text, type="bool", default=False)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "gpu(use='alone'): needs a CUDA GPU; skipped, with the reason, where there is none. 'alone': no other worker "
        "of xdist may use it meanwhile; 'beside': others may that measure nothing either; 'meters': only meters use "
        "it, which reserve it themselves",
    )
    config.addinivalue_line("markers", "slow: takes long; leave out with -m 'not slow'")
    config.addinivalue_line("markers", "memfix(limit): the whole test may take at most this much GPU memory, '2GiB'")
    try:
        settings = Settings.of(config)
    except MemfixError as error:
        raise pytest.UsageError(f"memfix: {error}") from None
    config.pluginmanager.register(Plugin(config, settings), "memfix-session")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options, command line over ini file, checked before any test runs."""

    meter: str
    effort: Effort
    lock: Path | None
    json: str | None
    md: str | None
    update: bool
    strict: bool

    @staticmethod
    def of(config: pytest.Config) -> Settings:
        from .checks.effort import get_effort
        from .errors import UsageError, did_you_mean
        from .gate.report import require_writable
        from .meters import METERS

        given = {}
        for name in (*_OPTIONS, *_FLAGS):
            option = config.getoption(f"memfix_{name}")
            given[name] = option if option is not None else config.getini(f"memfix_{name}") or None
        meter = given["meter"] or "simulated"
        if meter not in METERS:
            raise UsageError(f"unknown meter {meter!r}{did_you_mean(meter, METERS)}")
        for name in ("json", "md"):
            require_writable(given[name])
        lock = config.rootpath / given["lock"] if given["lock"] else None
        if given["update"] and lock is None:
            raise UsageError("--memfix-update writes the lock file: name it with --memfix-lock or memfix_lock")
        effort = get_effort(given["profile"])
        return Settings(meter, effort, lock, given["json"], given["md"], bool(given["update"]), bool(given["strict"]))


class Plugin:
    """Collects what tests measured and reports it at the end. One in each process; only the controller reports."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self.settings = settings
        worker: dict[str, Any] | None = getattr(config, "workerinput", None)
        self._reports = worker is None
        if worker is not None:
            from .meters.cuda import CudaMeter

            CudaMeter.num_processes = worker["workercount"]
        self.readings: list[dict[str, Any]] = []
        self.notes: dict[str, None] = {}
        self.failures: dict[str, str] = {}
        """The messages of failed memfix tests, by test id."""
        self.without_gpu: list[str] = []
        """For each test that was skipped without a GPU, the reason."""
        self.found: dict[int, Found] = {}

    # ---------------------------------------------------------------- while tests run
    @cached_property
    def meter_and_note(self) -> tuple[Meter, str | None]:
        from .meters import meter_or_simulated

        return meter_or_simulated(self.settings.meter)

    @cached_property
    def no_gpu_reason(self) -> str | None:
        from .meters.cuda import gpu_unavailable_reason

        return gpu_unavailable_reason()

    @cached_property
    def lock(self) -> dict[Any, int]:
        from .gate.lock import read_lock

        return read_lock(self.settings.lock) if self.settings.lock is not None else {}

    @cached_property
    def peaks(self) -> Peaks:
        from .gate.peaks import peaks_path, read_peaks

        return read_peaks(peaks_path(self.settings.lock)) if self.settings.lock is not None else {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for marker in item.iter_markers("memfix"):
                _limit_of(marker, item)
        if not self._reports:  # a worker of xdist: exclusive GPU tests come last, so that others do not wait for them
            items.sort(key=_gpu_order)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        wants_gpu = item.get_closest_marker("gpu") or item.get_closest_marker("memfix")
        if wants_gpu and self.no_gpu_reason is not None:
            item.user_properties.append((NO_GPU_PROPERTY, self.no_gpu_reason))
            pytest.skip(f"no GPU to measure on: {self.no_gpu_reason}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Give a test that needs the GPU exclusive use of it among this user's processes, unless its marker says
        otherwise, and compare its peak with its limit."""
        marker, gpu = item.get_closest_marker("memfix"), item.get_closest_marker("gpu")
        if marker is None and gpu is None:
            return (yield)
        from .meters.cuda import watched_peak
        from .meters.gpu_sharing import gpu_beside_others, gpu_to_ourselves

        if marker is None:
            use = "alone" if gpu is None else gpu.kwargs.get("use", "alone")
            ways: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
                "alone": gpu_to_ourselves, "beside": gpu_beside_others, "meters": contextlib.nullcontext,
            }  # fmt: skip
            with ways[use]():
                return (yield)
        limit = _limit_of(marker, item)
        with gpu_to_ourselves(), watched_peak() as peak:
            result = yield
        item.user_properties.append((TEST_PROPERTY, ""))
        _record(item, item.nodeid, peak.bytes, {"meter": "cuda", "limit": limit})
        if peak.bytes > limit:
            pytest.fail(
                f"the test took {format_bytes(peak.bytes)} of GPU memory, limit {format_bytes(limit)}, meter cuda",
                pytrace=False,
            )
        return result

    # ---------------------------------------------------------------- at the end
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self._reports:
            return
        for name, value in report.user_properties:
            if (name, report.when) == (NO_GPU_PROPERTY, "setup"):
                self.without_gpu.append(str(value))
            if (name, report.when) == (PROPERTY, "call"):
                entry = json.loads(str(value))
                self.readings.append({**entry, "test": report.nodeid, "outcome": report.outcome})
                self.notes.update(dict.fromkeys(entry.get("notes", ())))
            if (name, report.when, report.failed) == (TEST_PROPERTY, "call", True):
                self.failures[report.nodeid] = report.longreprtext

    def pytest_report_header(self) -> str:
        gpu = gpu_and_driver()
        parts = [f"meter {self.settings.meter}", f"torch {installed_version('torch')}"]
        parts += [f"GPU {gpu[0]}, driver {gpu[1]}" if gpu else "no GPU", f"allocator {allocator_settings()}"]
        return f"memfix {__version__}: {', '.join(parts)}"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self._reports:
            return
        from .gate.report import as_json, write_report

        settings = self.settings
        if settings.update and settings.lock is not None and session.exitstatus == pytest.ExitCode.OK:
            self._update_lock(settings.lock)
        if settings.json is not None:
            write_report(settings.json, as_json({"readings": self.readings, "notes": list(self.notes)}))
        if settings.md is not None:
            from .gate.report.readings import readings_as_markdown

            write_report(settings.md, readings_as_markdown(self.readings, self.failures, list(self.notes)))
        unmeasured = self.without_gpu or any(reading.get("is_fallback") for reading in self.readings)
        if settings.strict and unmeasured and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _update_lock(self, path: Path) -> None:
        from .gate.lock import write_lock

        measured = {tuple(r["key"]): r["bytes"] for r in self.readings if r.get("key") and r["meter"] == "simulated"}
        write_lock(path, {**self.lock, **measured})
        self.notes.setdefault(f"{len(measured)} readings were written to {path}")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not (self.readings or self.notes or self.without_gpu):
            return
        write = terminalreporter.write_line
        terminalreporter.section("memfix")
        different = {(r["name"], r["meter"], r["bytes"]): r for r in self.readings}  # forms share naive's readings
        largest = sorted(different.values(), key=lambda r: -r["bytes"])
        for reading in largest[:12]:
            write(f"{format_bytes(reading['bytes']):>12}  {reading['meter']:<9}  {reading['name']}")
        if len(largest) > 12:
            write(f"{'':>12}  and {len(largest) - 12} smaller readings; all of them with --memfix-json")
        for note in self.notes:
            write(f"note: {note}")
        if self.without_gpu:
            failing = ": a failure under --memfix-strict" if self.settings.strict else ""
            tests = f"{len(self.without_gpu)} test{'s' if len(self.without_gpu) > 1 else ''}"
            write(f"nothing was measured on a GPU: {tests} skipped, {self.without_gpu[0]}{failing}", red=bool(failing))


class TestSession:
    """What a suite's test and the ``peak_memory`` fixture need: meter, effort, and a record of readings."""

    __test__ = False

    def __init__(self, item: pytest.Item, plugin: Plugin) -> None:
        self._item = item
        self._plugin = plugin

    @property
    def tools(self) -> Tools:
        from .checks.examine import Tools

        return Tools(self.meter, self._plugin.settings.effort)

    @property
    def meter(self) -> Meter:
        return self._plugin.meter_and_note[0]

    @property
    def file(self) -> str:
        """The test file's path, relative to the working directory."""
        return os.path.relpath(self._item.path)

    def found(self, contract: Contract) -> Found:
        """Return what this session has found about a contract, by identity: two contracts may have one name."""
        return self._plugin.found.setdefault(id(contract), {})

    def record_reading(self, name: str, size: int, reading: Reading, key: tuple[str, ...] | None = None) -> None:
        fallback = self._plugin.meter_and_note[1]
        notes = [f"{name}: an estimate: {note}" for note in reading.notes if not reading.exact]
        more = {"key": key, "notes": [*([fallback] if fallback else []), *notes], "is_fallback": fallback is not None}
        _record(self._item, name, size, {**reading.as_dict(), **more})

    def against_lock(self, key: tuple[str, str, str, Phase], size: int, reading: Reading) -> Sequence[Finding]:
        """Compare a simulated reading with the lock, unless there is none or it is being written."""
        from .gate.judge import judge_entry
        from .gate.lock import spelled

        settings = self._plugin.settings
        if settings.lock is None or settings.update or reading.meter != "simulated":
            return []
        alive_then = self._plugin.peaks.get(spelled(key), ())
        return [judge_entry(key, size, self._plugin.lock.get(key), reading, alive_then, accept="--memfix-update")]


@pytest.fixture
def memfix_session(request: pytest.FixtureRequest) -> TestSession:
    """Meters and effort of this session, for tests that a contract's suite makes."""
    plugin = request.config.pluginmanager.get_plugin("memfix-session")
    assert isinstance(plugin, Plugin)
    request.node.user_properties.append((TEST_PROPERTY, ""))
    return TestSession(request.node, plugin)


@pytest.fixture
def peak_memory(memfix_session: TestSession, request: pytest.FixtureRequest) -> Callable[..., Reading]:
    """``peak_memory(fn, *args, backward=False, **kwargs) -> Reading``: the peak of a call above its arguments."""

    def measure(function: Callable[..., Any], *args: Any, backward: bool = False, **kwargs: Any) -> Reading:
        from .measure import peak_of_call

        reading = peak_of_call(memfix_session.meter, function, args, kwargs, backward=backward)
        name = f"{request.node.nodeid} {getattr(function, '__name__', type(function).__name__)}"
        memfix_session.record_reading(name, reading.highest_bytes, reading)
        return reading

    return measure


def _record(item: pytest.Item, name: str, size: int, more: dict[str, Any]) -> None:
    entry = {**more, "name": name, "bytes": size}
    entry.pop("alive_at_peak", None)
    item.user_properties.append((PROPERTY, json.dumps(entry)))


def _gpu_order(item: pytest.Item) -> int:
    """Sort key: first tests that need no GPU or share it, then those that use it briefly, then exclusive ones."""
    marker = item.get_closest_marker("gpu")
    if item.get_closest_marker("memfix"):
        return 2
    return 0 if marker is None else ("beside", "meters", "alone").index(marker.kwargs.get("use", "alone"))


def _limit_of(marker: pytest.Mark, item: pytest.Item) -> int:
    """Return the marker's one argument in bytes; anything else is a usage error."""
    usage = "write it as @pytest.mark.memfix('2GiB') or memfix(limit='2GiB')"
    values = [*marker.args, *marker.kwargs.values()]
    if len(values) != 1 or marker.kwargs.keys() - {"limit"}:
        raise pytest.UsageError(f"{item.nodeid}: the memfix marker takes one limit; {usage}")
    try:
        return parse_bytes(values[0])
    except ValueError as error:
        raise pytest.UsageError(f"{item.nodeid}: {error}; {usage}") from None
