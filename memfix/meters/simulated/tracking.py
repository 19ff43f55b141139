"""Follows every storage on the fake device, from the operator that made it until its memory is freed."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ...errors import MeasurementError
from ..timeline import Allocation
from . import hide_dispatch_modes
from .assumptions import assumed_answer, remember_question
from .attention import OUTPUTS_ON_CUDA
from .composite import composite_key
from .engine import EngineWatch
from .fake_result_cache import UNKNOWN, VIEWS, KnownResults
from .gpus import GPU
from .launches import Launch
from .ledger import Entry, Ledger
from .source_lines import SourceLines
from .workspace import Call, Workspace, storage_bytes
from .workspace.rules import tensors_in

_PLAIN = (FakeTensor, torch.nn.Parameter)
_DEVICE = torch.ops.prim.device.default


class StorageTracker(TorchDispatchMode):
    """A dispatch mode above FakeTensorMode that keeps the ledger."""

    known: KnownResults

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: what is compiled runs eager here anyway, and to shut the compiler out for every operator takes time."""
        return False

    def __init__(self, gpu: GPU, *, plain_path: bool) -> None:
        super().__init__()
        self.gpu = gpu
        self._plain_path = plain_path
        self.ledger = Ledger()
        self.engine = EngineWatch(self.note)
        self.lines = SourceLines()
        self.workspace = Workspace(gpu)
        self._num_optimizers = 0
        self.notes: dict[str, None] = {}  # in order of first mention
        self.launches: list[Launch] | None = None  # of Triton kernels, where somebody asks for them
        self._entries: dict[int, tuple[Entry, Any]] = {}  # storage address -> its entry and a weak reference
        self.makes_inputs = False
        self.of_earlier_simulations: list[Allocation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:  # two of three questions
            return args[0].fake_device
        kwargs = kwargs or {}
        for kind in types:
            if kind is not FakeTensor and not issubclass(kind, _PLAIN):
                return self._left_to_subclass(types)
        if func is _DEVICE:
            return args[0].fake_device
        if func.namespace == "prim":  # asks for a stride, or the like: nothing happens
            return func(*args, **kwargs)
        self.ledger.settle()
        self.ledger.enter(self._stage())
        if func in VIEWS:
            view = self._view(func, args, kwargs)
            if view is not UNKNOWN:
                return view
        assumed = assumed_answer(func, args)
        if assumed is not None:
            return self._assume(*assumed, func, args, kwargs)
        in_place = self.engine.writes_in_place(func, args)
        composite = None if in_place else composite_key(func)
        if composite is not None:
            try:
                with self:  # so that each part is seen
                    result = func._op_dk(composite, *args, **kwargs)
            except NotImplementedError:
                self.note(f"{func} could not be taken apart: what it hides is not known")
            else:
                if all(isinstance(tensor, FakeTensor) for tensor in tensors_in(result)):
                    return result
                # the composite bypassed the dispatcher and only made a view: the operator itself knows the device
        given = tensors_in((args, list(kwargs.values()))) if kwargs else tensors_in(args)
        for tensor in given:
            self._register_found(tensor)
        site = self.lines.current()
        result = self._run(func, args, kwargs, given)
        results = tensors_in(result)
        if self._plain_path:
            hide_dispatch_modes.hide(results)
        overwritten = self._entry(args[0]) if in_place else None
        for tensor in results:
            self._register_result(tensor, func, site, overwritten)
        self._register_workspace(Call(self.gpu, func, args, kwargs, result), [*given, *results], site)
        remember_question(func, args, result)
        return result

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """No kernel makes a view, and the memory that it lies in is registered."""
        self._register_found(args[0])
        if torch.is_grad_enabled():  # it has a node
            self.lines.current()
        result = self.known.view(func, args, kwargs)
        if result is not UNKNOWN:
            if self._plain_path:
                hide_dispatch_modes.hide(tensors_in(result))
            remember_question(func, args, result)
        return result

    def _assume(self, note: str | None, answer: Callable[[], Any], func: Any, args: Any, kwargs: Any) -> Any:
        if note is not None:
            self.note(note)
        with self:
            result = answer()
        call = Call(self.gpu, func, args, kwargs, result)
        self._register_workspace(call, tensors_in((args, result)), self.lines.current())
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        """The operator on fake tensors, with results as CUDA leaves them."""
        key = self.known.spelled(func, args, kwargs)
        result = UNKNOWN if key is None else self.known.result(key, given)
        if result is not UNKNOWN:
            return result
        self.known.mode.cache_enabled = key is None  # what we remember need not be remembered there too
        if self._plain_path:
            hide_dispatch_modes.show(given)
        try:
            result = _as_on_cuda(Call(self.gpu, func, args, kwargs, func(*args, **kwargs)))
        finally:
            if self._plain_path:
                hide_dispatch_modes.hide(given)
        if key is not None and key == self.known.spelled(func, args, kwargs):  # no argument was given another shape
            self.known.remember(key, func, given, result)
        return result

    def note(self, doubt: str) -> None:
        """Why the reading is not to be called exact."""
        self.notes.setdefault(doubt)

    def _left_to_subclass(self, types: Any) -> Any:
        """A tensor subclass unwraps itself, and its parts come by; one that speaks for other machines cannot."""
        if any(kind.__name__ == "DTensor" for kind in types) and not _is_one_rank_alone():
            raise MeasurementError("DTensor spans several GPUs, and one is simulated; measure the local tensors' step")
        if any(kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl for kind in types):
            names = ", ".join(kind.__name__ for kind in types)
            raise MeasurementError(f"a tensor subclass without a __torch_dispatch__ cannot be simulated: {names}")
        return NotImplemented

    def _stage(self) -> str:
        if self._num_optimizers:
            return "optimizer"
        return "forward" if torch._C._current_graph_task_id() == -1 else "backward"

    @contextlib.contextmanager
    def watching_optimizers(self) -> Iterator[None]:
        """Know when an optimizer's step runs."""

        def entered(*args: Any) -> None:
            self._num_optimizers += 1

        def left(*args: Any) -> None:
            self._num_optimizers -= 1

        hooks = [register_optimizer_step_pre_hook(entered), register_optimizer_step_post_hook(left)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    # ---------------------------------------------------------------- storages
    def _register_found(self, tensor: torch.Tensor) -> None:
        if tensor.layout is torch.strided and self._entry(tensor) is None and self._is_followed(tensor):
            storage = tensor.untyped_storage()
            entry = Entry(storage.nbytes(), "existed before")
            self._follow(storage, entry)
            self.ledger.found(entry)
            if getattr(tensor, "fake_mode", self.known.mode) is not self.known.mode:  # cached since then
                self.of_earlier_simulations.append(Allocation(entry.bytes, "of an earlier simulation", ""))

    def _register_result(self, tensor: torch.Tensor, func: Any, site: object, overwritten: Entry | None) -> None:
        if not self._is_followed(tensor):
            _refuse_sparse(tensor)
            return
        storage = tensor.untyped_storage()
        known = self._entries.get(storage._cdata)
        if known is not None:
            if known[0].bytes != storage.nbytes():
                self.ledger.resize(known[0], storage.nbytes())
            return
        if _writes_into_arguments(func):
            return  # a fake made a result of its own on the way: on a GPU it is the argument
        entry = Entry(storage.nbytes(), _name(func), site, self.ledger.stage)
        self._follow(storage, entry)
        if self.makes_inputs:
            self.ledger.found(entry)
        elif overwritten is not None:
            self.ledger.birth_in_place_of(overwritten, entry)
        else:
            self.ledger.birth(entry)

    def _register_workspace(self, call: Call, tensors: list[torch.Tensor], site: object) -> None:
        if not any(map(self._is_followed, tensors)):
            return
        buffers, doubt = self.workspace.buffers(call)
        if doubt is not None:
            self.note(doubt)
        if buffers:
            what = f"workspace of {_name(call.operator)}"
            self.ledger.workspace(Entry(size, what, site) for size in buffers)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """``storage.resize_`` does not pass the dispatcher; whoever intercepts it tells us."""
        found = self._entries.get(storage._cdata)
        if found is not None:
            self.ledger.resize(found[0], storage.nbytes())

    def _is_followed(self, tensor: torch.Tensor) -> bool:
        # a fake tensor's own record of its device, since asking for .device passes the dispatcher again
        device = getattr(tensor, "fake_device", None) or tensor.device
        if device.index:
            raise MeasurementError(f"one GPU is simulated, and the step uses {device}")
        return device.type == "cuda" and tensor.layout is torch.strided

    def _entry(self, tensor: torch.Tensor) -> Entry | None:
        found = self._entries.get(tensor.untyped_storage()._cdata)
        return found[0] if found else None

    def _follow(self, storage: torch.UntypedStorage, entry: Entry) -> None:
        address = storage._cdata

        def freed(_reference: object) -> None:
            found = self._entries.get(address)
            if found is not None and found[0] is entry:
                del self._entries[address]
            self.ledger.death(entry)

        self._entries[address] = (entry, weakref.ref(storage, freed))


@contextlib.contextmanager
def existing_before() -> Iterator[None]:
    """Inside, a simulated step makes tensors that count as there before it: inputs that its own results shape."""
    (tracker,) = (mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, StorageTracker))
    tracker.makes_inputs = True
    try:
        yield
    finally:
        tracker.makes_inputs = False


def _as_on_cuda(call: Call) -> Any:
    """The results of a call as a GPU leaves them, where that is not as fake tensors do."""
    size = storage_bytes(call)
    if size is not None:
        call.outputs.untyped_storage().resize_(size)
    change = OUTPUTS_ON_CUDA.get(call.operator)
    return call.outputs if change is None else change(call)


def _is_one_rank_alone() -> bool:
    """Whether the other ranks are pretended too: then a DTensor's local part is all there is on this GPU."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_backend() == "fake"


def _refuse_sparse(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise MeasurementError(
            f"a tensor of layout {tensor.layout} holds memory that only its values decide; measure it with --meter=cuda"
        )


@functools.cache
def _writes_into_arguments(operator: torch._ops.OpOverload) -> bool:
    """In place, or with ``out=``: every result is one of the arguments."""
    results = operator._schema.returns
    return bool(results) and all(r.alias_info is not None and r.alias_info.is_write for r in results)


@functools.cache
def _name(operator: torch._ops.OpOverload) -> str:
    """``mm``, ``add.Tensor``, and in full where it is not torch's own."""
    return str(operator).removeprefix("aten.").removesuffix(".default")
