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

from ...timeline import METERS_FOLDER
from ..patches import Patches, applied, suspended
from ..source_lines import TORCH
from ..tracking import StorageTracker
from . import inductor, process_state
from .compilation import Compilation, described

RAN_EAGER = "a region under torch.compile ran eager: what Inductor would allocate is not known"
_AFTER_A_BREAK = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)")


class Compiler:
    """Runs the compilers in one simulation."""

    def __init__(self, tracker: StorageTracker, hidden_from_compilers: Patches, runs_eager: str | None = None) -> None:
        self.compilation = Compilation(tracker, hidden_from_compilers)
        self.runs_eager = runs_eager
        """Why compiled regions run eagerly; None if they are compiled."""
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
            if self.runs_eager is None and self.compilation.tracker.launches is None:
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
                self._failed[code] = described(error)
            else:
                self._frames.add(converted)
                self._note_break(code)
                return converted
        self._note_eager(self._failed[code])
        return _skipped(for_good=False)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Inside, compilers see the simulated GPU, but no operator that they run is counted."""
        if self.compilation.is_running:
            yield
            return
        folder = self._prepare()
        noted = dict(self.compilation.tracker.notes)
        with (
            suspended(self.compilation.hidden_from_compilers, self._entry),
            _disable_current_modes(),
            _constants_begin_on_cpu(),
            inductor.settings(folder),
        ):
            self.compilation.is_running = True
            try:
                with applied(inductor.while_compiling(self.compilation, self.compiling)):
                    yield
            finally:
                self.compilation.is_running = False
        self.compilation.doubts |= {note: None for note in self.compilation.tracker.notes if note not in noted}

    def _prepare(self) -> str:
        """At the first compilation, import the compilers and separate their state from the process's."""
        if self._folder is None:
            _load()
            self.compilation.user_settings = inductor.doubtful_settings()
            self._folder = self._open.enter_context(process_state.separate())
            self._open.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            self._open.callback(self._frames.forget)
            self._open.enter_context(applied(inductor.while_running(self.compilation)))
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

    def _note_break(self, code: CodeType) -> None:
        """Note a graph break if ``code`` is Dynamo's continuation of a user's function after the break."""
        rest = _AFTER_A_BREAK.fullmatch(code.co_name)
        if rest and not code.co_filename.startswith(TORCH):
            self.compilation.doubts[
                f"torch.compile breaks the graph of {rest[1]} in line {rest[2]}: its parts are compiled apart"
            ] = None

    def _note_eager(self, reason: str | None) -> None:
        self.compilation.tracker.note(RAN_EAGER if reason is None else f"{RAN_EAGER} ({reason})")


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
