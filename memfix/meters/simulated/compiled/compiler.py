"""Runs Dynamo and Inductor outside the simulation, for the simulated GPU, and counts what their code allocates."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ....errors import MeasurementError
from ...timeline import METERS_FOLDER
from ..patches import Patches, applied, suspended
from ..source_lines import TORCH
from ..tracking import StorageTracker
from . import inductor, process_state

RAN_EAGER = "a region under torch.compile ran eager: what Inductor would allocate is not known"
COMPARED: frozenset[tuple[str, str]] = frozenset({("H200", "2.11")})
"""The GPUs and versions of torch on which the bytes of compiled steps were measured and equal the simulated ones."""

_AFTER_A_BREAK = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)")


class CompiledCodeError(Exception):
    """Compiled code failed on fake tensors. The step must be measured again with its regions run eagerly."""


class Compiler:
    """Runs the compilers in one simulation.

    ``hidden_from_compilers`` are the simulation's patches that would mislead a compiler: they are off while one runs.
    """

    def __init__(self, tracker: StorageTracker, hidden_from_compilers: Patches, runs_eager: str | None = None) -> None:
        self.tracker = tracker
        self.doubts: dict[str, None] = {}
        """The notes for all compiled regions, collected while they were compiled."""
        self.assumed: dict[str, None] = {}
        """The assumptions that were made while regions were compiled."""
        self.user_settings: dict[str, Any] = {}
        """The user's values of the settings of Inductor that the simulation switches off."""
        self.runs_eager = runs_eager
        """Why compiled regions run eagerly; None if they are compiled."""
        self.is_running = False
        """Whether a compiler runs; any active dispatch mode is then its own."""
        self._hidden_from_compilers = hidden_from_compilers
        self._entry = Patches([(torch, "compile", self._loading_compilers_first(torch.compile))])
        self._frames = process_state.CompiledFrames()
        self._backends: dict[int, tuple[Any, _Backend]] = {}
        self._failed: dict[CodeType, str] = {}
        self._open = contextlib.ExitStack()
        self._folder: str | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, ``torch.compile`` compiles for the simulated GPU."""
        eval_frame = sys.modules.get("torch._dynamo.eval_frame")
        if eval_frame is None:
            yield
            return
        real: Callable[..., Any] = eval_frame._callback_from_stance
        if importlib.util.find_spec("triton") is None:
            self.runs_eager = "Triton is not installed"

        def from_stance(callback: Any) -> Any:
            found = real(callback)
            if not callable(found) or isinstance(found, _Converter):
                return found
            if self.runs_eager is None and self.tracker.launches is None:
                return _Converter(self, found)
            self._note_eager(self.runs_eager)
            return None

        with self._open, self._entry, applied([(eval_frame, "_callback_from_stance", from_stance)]):
            yield

    # ---------------------------------------------------------------- compilation
    def convert(self, callback: Callable[..., Any], frame: Any, cache_entry: Any) -> Any:
        """Convert a frame by Dynamo's ``callback``. A frame that fails runs eagerly, with the functions it calls."""
        from torch._dynamo import exc

        code = frame.f_code
        if code.co_filename.startswith(METERS_FOLDER):
            return _skipped(for_good=True)
        if code not in self._failed:
            try:
                with self.compiling():
                    converted = callback(frame, cache_entry, self._frames.state_of(code))
            except (exc.Unsupported, exc.UserError, exc.RecompileError):
                raise  # a GPU would raise the same for this code
            except Exception as error:
                self._failed[code] = _described(error)
            else:
                self._frames.add(converted)
                self._note_break(code)
                return converted
        self._note_eager(self._failed[code])
        return _skipped(for_good=False)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Inside, compilers see the simulated GPU, but no operator that they run is counted."""
        if self.is_running:
            yield
            return
        folder = self._prepare()
        noted = dict(self.tracker.notes)
        with (
            suspended(self._hidden_from_compilers, self._entry),
            _disable_current_modes(),
            _constants_begin_on_cpu(),
            inductor.settings(folder),
        ):
            self.is_running = True
            try:
                with applied(inductor.while_compiling(self)):
                    yield
            finally:
                self.is_running = False
        self.doubts |= {note: None for note in self.tracker.notes if note not in noted}

    @contextlib.contextmanager
    def simulating(self) -> Iterator[None]:
        """Inside, operators are counted although a compiler is running, because they belong to the step."""
        self.is_running = False
        try:
            with self._hidden_from_compilers, self.tracker.cache.mode, self.tracker:
                yield
        finally:
            self.is_running = True

    def _prepare(self) -> str:
        """At the first compilation, import the compilers and separate their state from the process's."""
        if self._folder is None:
            _load()
            self.user_settings = inductor.doubtful_settings()
            self._folder = self._open.enter_context(process_state.separate())
            self._open.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            self._open.callback(self._frames.forget)
            self._open.enter_context(applied(inductor.while_running(self)))
        return self._folder

    def _loading_compilers_first(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``torch.compile`` to import the compilers first, because it reads Dynamo's tables."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.runs_eager is None:
                _load()
            return function(*args, **kwargs)

        return run

    def backend_of(self, callback: Any) -> _Backend:
        """A stand-in for the backend of ``callback`` in Dynamo's cache, so that code the user compiled is not used."""
        while hasattr(callback, "_torchdynamo_orig_backend"):
            callback = callback._torchdynamo_orig_backend
        return self._backends.setdefault(id(callback), (callback, _Backend()))[1]

    # ---------------------------------------------------------------- compiled code
    def run(self, code: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a compiled graph, or Inductor for a backward, and add the notes of compiled regions to the tracker."""
        tracker = self.tracker
        version = ".".join(torch.__version__.split(".")[:2])
        if (tracker.gpu.name, version) not in COMPARED:
            tracker.note(f"a region under torch.compile is counted as Inductor of torch {version} allocates it")
        for doubt in self.doubts:
            tracker.note(doubt)
        tracker.assumed |= self.assumed
        tracker.lines.remember_node()
        try:
            return code(*args, **kwargs)
        except (MeasurementError, CompiledCodeError):
            raise
        except Exception as error:
            raise CompiledCodeError(_described(error)) from error

    def _note_break(self, code: CodeType) -> None:
        """Note a graph break if ``code`` is Dynamo's continuation of a user's function after the break."""
        rest = _AFTER_A_BREAK.fullmatch(code.co_name)
        if rest and not code.co_filename.startswith(TORCH):
            self.doubts[
                f"torch.compile breaks the graph of {rest[1]} in line {rest[2]}: its parts are compiled apart"
            ] = None

    def _note_eager(self, reason: str | None) -> None:
        self.tracker.note(RAN_EAGER if reason is None else f"{RAN_EAGER} ({reason})")


def _load() -> None:
    with suspended(), _disable_current_modes():
        inductor.load()


@contextlib.contextmanager
def _constants_begin_on_cpu() -> Iterator[None]:
    """Inside, ``torch.tensor(..., device="cuda")`` makes no real tensor on the GPU, also outside FakeTensorMode."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


class _Backend:
    """A stand-in for one of the user's backends in Dynamo's cache."""


class _Converter:
    """A callback for Dynamo that compiles frames for the simulated GPU."""

    def __init__(self, compiler: Compiler, callback: Callable[..., Any]) -> None:
        self._compiler = compiler
        self._callback = callback
        self._torchdynamo_orig_backend = compiler.backend_of(callback)  # Dynamo's cache reads this attribute

    def __call__(self, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
        return self._compiler.convert(self._callback, frame, cache_entry)


def _skipped(*, for_good: bool) -> Any:
    """The return value that makes Dynamo run a frame and its callees uncompiled; ``for_good``: whenever it runs."""
    from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy

    strategy = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    return ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=for_good)


def _described(error: Exception) -> str:
    while isinstance(cause := getattr(error, "inner_exception", None), Exception):
        error = cause
    first_line = (str(error).splitlines() or [""])[0][:160]
    return f"{type(error).__name__}: {first_line}"
