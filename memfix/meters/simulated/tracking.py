"""The dispatch mode that sees every operator of a simulated step and counts what it allocates."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ...errors import MeasurementError
from .assumptions import assumed_answer, remember_question
from .composite import composite_key
from .engine import EngineWatch
from .fake_execution import run_on_fakes
from .fake_result_cache import UNKNOWN, VIEWS, FakeResultCache
from .gpus import GPU
from .launches import Launch
from .ledger import Entry, Ledger
from .running_phase import RunningPhase
from .source_lines import SourceLines
from .storages import Storages, is_on_gpu, name_of
from .workspace import Call, Workspace
from .workspace.rules import tensors_in

_PLAIN = (FakeTensor, torch.nn.Parameter)
_DEVICE = torch.ops.prim.device.default


class StorageTracker(TorchDispatchMode):
    """Sees each operator before FakeTensorMode does, because it is entered after it.

    While it handles an operator, torch has popped it from the stack of modes, so inner calls reach only FakeTensorMode.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: compiled regions run eagerly here, and disabling the compiler at every operator costs time."""
        return False

    def __init__(self, gpu: GPU, cache: FakeResultCache) -> None:
        super().__init__()
        self.gpu = gpu
        self.cache = cache
        self.ledger = Ledger()
        self.storages = Storages(self.ledger, cache.mode)
        self.phase = RunningPhase()
        self.engine = EngineWatch(self.note)
        self.lines = SourceLines()
        self.workspace = Workspace(gpu)
        self.notes: dict[str, None] = {}  # a set in order of insertion
        self.launches: list[Launch] | None = None
        """The list to which Triton launches are added; None to ignore them."""

    def note(self, doubt: str) -> None:
        """Add a reason why the reading is an estimate."""
        self.notes.setdefault(doubt)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator. The methods below are tried in order until one returns a result."""
        if func is _DEVICE and type(args[0]) is FakeTensor:  # two thirds of all calls; first, for speed
            return args[0].fake_device
        if types and not _are_plain(types):
            return _left_to_subclass(types)
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return _metadata(func, args, kwargs)
        self.ledger.settle()
        self.ledger.enter_phase(self.phase.name)
        result = self._view(func, args, kwargs) if func in VIEWS else UNKNOWN
        if result is UNKNOWN:
            result = self._assumed(func, args, kwargs)
        if result is UNKNOWN:
            result = self._decomposed(func, args, kwargs)
        if result is UNKNOWN:
            result = self._executed(func, args, kwargs)
        return result

    # ---------------------------------------------------------------- ways to run an operator
    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a view. It takes no memory, so only its argument is registered."""
        self.storages.add_argument(args[0])
        if torch.is_grad_enabled():
            self.lines.current()  # remembers the line for the view's autograd node
        result = self.cache.view(func, args, kwargs)
        if result is not UNKNOWN:
            remember_question(func, args, result)
        return result

    def _assumed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Answer an operator that reads values with the usual ones, because fake tensors have none."""
        assumed = assumed_answer(func, args)
        if assumed is None:
            return UNKNOWN
        note, make_answer = assumed
        if note is not None:
            self.note(note)
        with self:
            result = make_answer()
        call = Call(self.gpu, func, args, kwargs, result)
        self._count_workspace(call, tensors_in((args, result)), self.lines.current())
        return result

    def _decomposed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Decompose an operator that CUDA runs as a composite: each part is then dispatched on its own."""
        key = composite_key(func)
        if key is None:
            return UNKNOWN
        try:
            with self:
                result = func._op_dk(key, *args, **kwargs)
        except NotImplementedError:
            self.note(f"{func} could not be taken apart: what it hides is not known")
            return UNKNOWN
        # a composite that only makes a view may bypass the dispatcher, and then its result has no device
        return result if all(isinstance(tensor, FakeTensor) for tensor in tensors_in(result)) else UNKNOWN

    def _executed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that has a kernel, and count its results and its workspace."""
        given = tensors_in((args, list(kwargs.values()))) if kwargs else tensors_in(args)
        for tensor in given:
            self.storages.add_argument(tensor)
        site = self.lines.current()
        replaced = self.storages.entry_of(args[0]) if self.engine.writes_in_place(func, args) else None
        result = run_on_fakes(self.gpu, self.cache, func, args, kwargs, given)
        results = tensors_in(result)
        for tensor in results:
            self.storages.add_result(tensor, func, site, replaced)
        self._count_workspace(Call(self.gpu, func, args, kwargs, result), [*given, *results], site)
        remember_question(func, args, result)
        return result

    def _count_workspace(self, call: Call, tensors: list[torch.Tensor], site: object) -> None:
        if not any(map(is_on_gpu, tensors)):
            return
        buffers, doubt = self.workspace.buffers(call)
        if doubt is not None:
            self.note(doubt)
        if buffers:
            what = f"workspace of {name_of(call.operator)}"
            self.ledger.workspace(Entry(size, what, site) for size in buffers)


@contextlib.contextmanager
def existing_before() -> Iterator[None]:
    """Inside, new tensors of a simulated step count as inputs, such as gradients shaped like its results."""
    (tracker,) = (mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, StorageTracker))
    tracker.storages.makes_inputs = True
    try:
        yield
    finally:
        tracker.storages.makes_inputs = False


@functools.cache
def _are_plain(types: tuple[type, ...]) -> bool:
    """Whether all tensor classes of a call are FakeTensor or Parameter."""
    return all(kind is FakeTensor or issubclass(kind, _PLAIN) for kind in types)


def _metadata(func: Any, args: Any, kwargs: Any) -> Any:
    """Let FakeTensorMode answer a query for strides or other metadata, which allocates nothing."""
    return args[0].fake_device if func is _DEVICE else func(*args, **kwargs)


def _left_to_subclass(types: Any) -> Any:
    """Let a tensor subclass unwrap itself, so that its inner tensors are dispatched. Refuse unsupported subclasses."""
    if any(kind.__name__ == "DTensor" for kind in types) and not _has_fake_process_group():
        raise MeasurementError("DTensor spans several GPUs, and one is simulated; measure the local tensors' step")
    if any(kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl for kind in types):
        names = ", ".join(kind.__name__ for kind in types)
        raise MeasurementError(f"a tensor subclass without a __torch_dispatch__ cannot be simulated: {names}")
    return NotImplemented


def _has_fake_process_group() -> bool:
    """Whether the other ranks are fake, so that this GPU holds only a DTensor's local part."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_backend() == "fake"
