"""The dispatch mode that sees every operator of a simulated step and counts what it allocates."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ...errors import MeasurementError
from . import assumptions, out_of_memory, peers
from .assumptions import Answers, Scenario
from .choices import chooses, chosen_indices
from .composite import composite_key
from .cublas import CublasWorkspaces
from .decisions import Decision, Decisions
from .engine import LAST_GRADIENTS, EngineWatch
from .fake_execution import run_on_fakes
from .fake_result_cache import NOT_HANDLED, VIEWS, FakeResultCache
from .gpus import GPU
from .in_parts import PARTS, UNBOUNDED
from .launches import Launch
from .ledger import Entry, Ledger
from .memory_guard import is_refused_access
from .running_phase import RunningPhase
from .source_lines import SourceLines, line_of
from .storages import Storages, is_on_gpu, name_of, writes_into_arguments
from .streams import GRADIENTS, RECORDED, Streams, StreamsOfGraphs
from .value_operators import UNKNOWN
from .values import Values
from .workspace import Call, Workspace, hides_nothing, is_filling, may_resize
from .workspace.indexing import is_mask, is_masked_fill
from .workspace.layout import contiguous_strides
from .workspace.ordering import room_for_distinct
from .workspace.rules import tensors_in

aten = torch.ops.aten

_INDEXES = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index)
_PLAIN = (FakeTensor, torch.nn.Parameter)
_DEVICE = torch.ops.prim.device.default
IN_THREADS = "the step runs operators in threads of its own: when each runs, and what cuBLAS keeps for it, is not known"
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_OF_VALUES = frozenset((assumptions.NO_LARGER_ID, peers.SAME))
"""Notes of the warm-up that stay for the measured step, because assumed values may decide the state it begins with."""


class StorageTracker(TorchDispatchMode):
    """Runs each operator and counts its memory. It is entered after FakeTensorMode, so it sees each operator first.

    While it handles an operator, it is off the stack of modes, so inner calls reach only FakeTensorMode. To handle
    inner calls too, a method enters the tracker again (``with self``).
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: ``compiled`` skips this module's frames, and disabling Dynamo at every operator costs time."""
        return False

    def __init__(
        self, gpu: GPU, cache: FakeResultCache, scenario: Scenario = "usual", assume: Mapping[str, Decision] = _NOTHING
    ) -> None:
        super().__init__()
        self.gpu = gpu
        self.cache = cache
        self.ledger = Ledger()
        self.storages = Storages(self.ledger, cache.mode)
        self.answers = Answers(scenario)
        self.decisions = Decisions(assume)
        self.assumed: dict[str, None] = {}
        """The assumptions behind values that the step read, in order."""
        self.assumed_before: dict[str, None] = {}
        """The assumptions of the build and the warm-up, which may decide the state that the step begins with."""
        self.values = Values(self.answers, self.assumed.setdefault)
        self.phase = RunningPhase()
        self.engine = EngineWatch(self.note, self._backward_begins, self._returned_gradients)
        self.lines = SourceLines()
        self.workspace = Workspace(gpu)
        self.notes: dict[str, None] = {}  # a set in order of insertion
        self.streams = Streams(StreamsOfGraphs())
        self.cublas = CublasWorkspaces(gpu, self.ledger, self.streams, self.note)
        self.bounded: set[str] = set()
        """The notes whose uncertainty the bounds of the reading cover."""
        self.of_this_torch: set[str] = set()
        """The notes that bytes and bounds are those of the torch that is installed."""
        self.launches: list[Launch] | None = None
        """The list to which launches of Triton and CUDA kernels are added; None to ignore them."""
        self.is_threaded = False
        """Whether the step has started threads."""
        self._one_at_a_time, self._own_thread = threading.RLock(), threading.get_ident()
        self._few_elements, self._much_memory = gpu.memory_bytes // 100, gpu.memory_bytes // 4 * 3
        """Tensors of fewer elements fit while less than this memory is in use, and are not checked."""
        self._first_read: int | None = None
        """The ledger's event at which the step first read an unknown number."""

    def begin_step(self) -> None:
        """End the warm-up and begin the measured step. Notes about kernels of the warm-up are dropped."""
        for doubt in self.notes.keys() - _OF_VALUES:
            del self.notes[doubt]
        self.assumed_before |= self.assumed
        self.assumed.clear()
        self.answers.begin_step()

    def may_numbers_decide_what_is_kept(self) -> bool:
        """Whether a tensor is alive that was made after the step first read an unknown number. Each call looks only at
        the time since the last call."""
        first_read, self._first_read = self._first_read, None
        return first_read is not None and self.ledger.is_alive_since(first_read)

    def note(self, doubt: str) -> None:
        """Add a reason why the reading is an estimate."""
        self.notes.setdefault(doubt)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        try:
            if not self.is_threaded:
                return self._run(func, types, args, kwargs)
            with self._one_at_a_time:
                if threading.get_ident() != self._own_thread:
                    self.note(IN_THREADS)
                return self._run(func, types, args, kwargs)
        except Exception as error:
            del args, kwargs
            _forget_arguments(error)
            raise

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator. The methods below are tried in order until one returns a result."""
        if func is _DEVICE and type(args[0]) is FakeTensor:  # two thirds of all calls; first, for speed
            return args[0].fake_device
        if types and not _are_plain(types):
            return _left_to_subclass(types)
        kwargs = kwargs or {}
        if func.namespace == "prim":  # FakeTensorMode answers a query for metadata, which allocates nothing
            return func(*args, **kwargs)
        if func.namespace == "profiler":  # names of ranges, without tensors; FakeTensorMode would only take time
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        self.ledger.settle()
        self.ledger.enter_phase(self.phase.name)
        result = self._view(func, args, kwargs) if func in VIEWS else NOT_HANDLED
        if result is not NOT_HANDLED:
            return result
        traits = _traits_of(func)
        if traits.reads_values:
            result = self._answered(func, args, kwargs)
        if result is NOT_HANDLED and traits.parts is not None and is_on_gpu(args[0]):
            result = self._in_parts(func, args, kwargs, traits.parts)
        if result is NOT_HANDLED and traits.composite_key is not None:
            result = self._decomposed(func, args, kwargs, traits.composite_key)
        if result is NOT_HANDLED:
            result = self._executed(func, args, kwargs, traits)
        return result

    # ---------------------------------------------------------------- ways to run an operator
    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a view. It takes no memory, so only its argument is registered."""
        self.storages.add_argument(args[0])
        if torch.is_grad_enabled():
            self.lines.current()  # records the line for the view's autograd node
        return self.cache.view(func, args, kwargs)

    def _answered(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that reads values, on known values or else on assumed ones."""
        if func is aten.index.Tensor:
            if not any(map(is_mask, args[1])):
                return NOT_HANDLED
            with self:
                return func(args[0], _without_masks(args[1]))
        if func is aten.masked_select.default and is_on_gpu(args[0]):
            with self:
                tensor, mask = torch.broadcast_tensors(*map(torch.atleast_1d, args))
                return aten.index.Tensor(tensor, [mask])
        given = tensors_in((args, list(kwargs.values())))
        result = self.values.computed(func, args, kwargs, given)
        if result is not UNKNOWN:
            self._record_assumptions(given)
            if func is aten._local_scalar_dense.default and self.values.are_undecided(given):
                result = self._number(args[0].dtype, result)
            room = room_for_distinct(Call(self.gpu, func, args, kwargs, result))
            result = self._as_fakes(func, result, args[0], room)
        else:
            result = self._assumed(func, args, kwargs)
            if result is NOT_HANDLED:
                return NOT_HANDLED
        call = Call(self.gpu, func, args, kwargs, result)
        self._count_workspace(call, given, tensors_in(result), self.lines.current())
        return result

    def _assumed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The assumed result of an operator that reads unknown values, or ``NOT_HANDLED``."""
        first = args[0]
        answer = assumptions.in_backward(func, first)
        if answer is not None:
            self.note(answer[0])
            return answer[1]
        if func is aten._local_scalar_dense.default:
            return self._number(first.dtype)
        if func is aten.equal.default:
            self.assumed[assumptions.EQUAL] = None
            return self.answers.scenario != "least"
        if func is aten.nonzero.default:
            count = self._num_picked(first)
            return self._new(func, (count, first.dim()), (1, count), torch.int64, first)
        if func is aten.bincount.default:
            return self._counted(func, args, kwargs)
        if func is aten._ctc_loss.default:  # the lengths are plain numbers, so nothing is assumed
            (num_steps, batch, _), longest = first.shape, max(args[3], default=0)
            alpha = (batch, num_steps, 2 * longest + 1)
            return tuple(
                self._new(func, size, contiguous_strides(size), first.dtype, first) for size in ((batch,), alpha)
            )
        return NOT_HANDLED

    def _counted(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """The counts of unknown ids: none is assumed to be above ``minlength``, or else above how many there are."""
        ids, weights = args[0], args[1] if len(args) > 1 else kwargs.get("weights")
        at_least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
        self.note(assumptions.NO_LARGER_ID if at_least else assumptions.AS_MANY_AS_IDS)
        self.bounded.add(assumptions.NO_LARGER_ID)  # a step that states a minlength relies on it
        num_bins = at_least or ids.numel()
        counts = self._new(func, (num_bins,), (1,), torch.int64 if weights is None else weights.dtype, ids)
        if weights is None and at_least:
            shares = self.answers.shares(ids.numel(), at_least)
            self.values.keep(counts, shares, frozenset((assumptions.at(assumptions.EVEN, self._place()),)))
        return counts

    def _num_picked(self, mask: torch.Tensor) -> int:
        """How many elements a mask picks."""
        value = self.values.of(mask)
        if value is not None:
            self._record_assumptions([mask])
            with torch._C._DisableTorchDispatch():
                return int(value.count_nonzero())
        share = self.values.share_of(mask)
        share = 1.0 if share is None else share
        how, fewest = self.decisions.of_mask(mask, self.lines.current()), 0.0
        if isinstance(how, int):
            return how
        if how is None:
            fewest = self.answers.fewest
            note = assumptions.ALL_CHOSEN if share == 1 else assumptions.EVEN
            self.assumed[assumptions.at(note, self._place())] = None
            how = self.answers.scenario
        if how in ("most", "worst"):
            return self.values.most_picked(mask)
        self.answers.are_most &= share == 1
        return math.ceil(mask.numel() * (fewest if how == "least" else share))

    def values_read(self, tensor: torch.Tensor, most_bytes: int) -> torch.Tensor | None:
        """The values of a whole tensor that Python code reads, assumed if unknown; None if they take more bytes."""
        value = self.values.of(tensor)
        if value is not None:
            self._record_assumptions([tensor])
            if self.values.are_undecided([tensor]):
                self._number(tensor.dtype)
            if tensor.numel() > 1 and assumptions.ORDER in self.values.assumed_of([tensor]):
                self.note(assumptions.READ_ORDER)
            return value
        if tensor.numel() * tensor.element_size() > most_bytes:
            return None
        for _, decided in self.decisions.of_results([tensor], self.lines.current()):
            return decided
        with torch._C._DisableTorchDispatch():
            return torch.full(tensor.shape, self._number(tensor.dtype), dtype=tensor.dtype, device="cpu")

    def is_assumed(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a simulated tensor are unknown, or follow from more than random draws."""
        if not isinstance(tensor, FakeTensor) or tensor.device.type == "cpu":
            return False
        drawn = {assumptions.DRAWN, assumptions.DRAWN_ONCE}
        return self.values.of(tensor) is None or not self.values.assumed_of([tensor]) <= drawn

    def _record_assumptions(self, tensors: list[torch.Tensor]) -> None:
        """Record the assumptions behind values that are read, except unknown numbers, whose notes name the line."""
        assumed = self.values.assumed_of(tensors)
        if peers.SAME in assumed:  # other answers are not tried
            self.note(peers.SAME)
        marks = {assumptions.UNDECIDED, assumptions.CHOSEN, assumptions.ORDER, peers.SAME}
        self.assumed |= dict.fromkeys(sorted(assumed - marks))
        drawn = (assumptions.DRAWN, assumptions.DRAWN_ONCE)
        self.answers.are_most &= assumed.isdisjoint((assumptions.UNDECIDED, *drawn))

    def _number(self, dtype: torch.dtype, computed: Any = None) -> float | int | bool:
        decided = self.decisions.of_number(dtype, self.lines.current())
        if decided is not None:
            return decided
        note = assumptions.number(self._place(), dtype)
        self.assumed[note] = None
        if self._first_read is None:
            self._first_read = self.ledger.event
        return self.answers.number(dtype, note, computed)

    def _place(self) -> str:
        line = line_of(self.lines.current())
        return line.place if line else "?"

    def _as_fakes(self, func: Any, value: Any, like: torch.Tensor, room: int | None = None) -> Any:
        """Turn real results of an operator into fake tensors on the device of ``like``, and keep their values. Results
        of one dimension have memory for ``room`` elements."""
        if isinstance(value, torch.Tensor):
            if like.device.type == "cpu":
                return value
            stride = (1, value.shape[0]) if func is aten.nonzero.default and value.dim() == 2 else value.stride()
            if room is None or value.dim() != 1 or value.shape[0] in (0, room):  # results not asked for are empty
                made = self._new(func, tuple(value.shape), stride, value.dtype, like)
            else:
                whole = self._new(func, (room,), (1,), value.dtype, like)
                made = self.cache.same_memory(whole, tuple(value.shape), stride, 0, value.dtype, like.device)
            self.values.keep(made, value, self.values.assumed_of([like]))
            return made
        if isinstance(value, (list, tuple)):
            return type(value)(self._as_fakes(func, part, like, room) for part in value)
        return value

    def _new(self, func: Any, size: tuple[int, ...], stride: Any, dtype: torch.dtype, like: torch.Tensor) -> Any:
        made = self.cache.new_memory(size, stride, dtype, like.device)
        self.storages.add_result(made, func, self.lines.current(), None)
        return made

    def _in_parts(self, func: Any, args: Any, kwargs: Any, parts: Callable[..., Any]) -> Any:
        """Run an operator without a fake kernel as the parts that its CUDA kernel is made of."""
        doubt = f"{func}: its parts are taken from its source, and were not measured"
        self.note(doubt)
        if str(func.overloadpacket) not in UNBOUNDED:
            self.bounded.add(doubt)
        with self:
            return parts(*args, **kwargs)

    def _decomposed(self, func: Any, args: Any, kwargs: Any, key: torch._C.DispatchKey) -> Any:
        """Decompose an operator that CUDA runs as a composite: each part is then dispatched on its own."""
        try:
            with self:
                result = func._op_dk(key, *args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            launches_kernel = is_refused_access(error)
            if not (launches_kernel or isinstance(error, NotImplementedError)):
                raise
            if not (launches_kernel and hides_nothing(func)):
                self.note(f"{func} could not be taken apart: what it hides is not known")
            return NOT_HANDLED
        # a composite that only makes a view may bypass the dispatcher, and then returns a meta tensor, not a fake one;
        # one on the CPU that resizes an empty result, such as polar, leaves that real tensor empty
        others = [tensor for tensor in tensors_in(result) if not isinstance(tensor, FakeTensor)]
        is_lost = any(tensor.device.type == "meta" or tensor.shape == (0,) for tensor in others)
        return NOT_HANDLED if is_lost else result

    def _executed(self, func: Any, args: Any, kwargs: Any, traits: _Traits) -> Any:
        """Run an operator that has a kernel, and count its results and its workspace."""
        if traits.indexes and _indexes_from_cpu(args):
            with self:
                moved = [i.to(args[0].device) if isinstance(i, torch.Tensor) else i for i in args[1]]
                return func(args[0], moved, *args[2:], **kwargs)
        if traits.indexes and _writes_by_mask(args):
            with self:
                return func(args[0], _without_masks(args[1]), *args[2:], **kwargs)
        if func is aten._to_copy.default:
            self.engine.remember_cast(sys._getframe(2))
        given = tensors_in((args, list(kwargs.values()))) if kwargs else tensors_in(args)
        may_be_real = traits.is_sent or (traits.runs_on_real and given)
        # zero tensors of forward-mode AD are not fake, but they have no memory, and a device that does not exist
        if may_be_real and not any(isinstance(tensor, FakeTensor) or tensor._is_zerotensor() for tensor in given):
            result = self._run_on_real(func, args, kwargs, given, traits)
            if result is not NOT_HANDLED:
                return result
        for tensor in given:
            self.storages.add_argument(tensor)
        self.cublas.take(func, args)
        if self.streams.of_graphs.is_any_other and torch.is_grad_enabled() and any(t.requires_grad for t in given):
            self._runs_graph()
        site = self.lines.current()
        replaced = self.storages.entry_of(args[0]) if self.engine.writes_in_place(func, args) else None
        result, recipe = run_on_fakes(self.gpu, self.cache, func, args, kwargs, given)
        results = tensors_in(result)
        real = self.values.real_result(func, args, kwargs, given, results)
        if real is not NOT_HANDLED:
            return real
        for tensor in results:
            if tensor.numel() > self._few_elements or self.ledger.allocated.live > self._much_memory:
                self._check_memory(tensor)
            self.storages.add_result(tensor, func, site, replaced)
        if not traits.hides_nothing or (traits.may_resize and is_filling()):
            self._count_workspace(Call(self.gpu, func, args, kwargs, result), given, results, site, recipe)
        self.values.follow(func, args, kwargs, given, results)
        if traits.chooses:
            self._choose(Call(self.gpu, func, args, kwargs, result))
        if self.decisions:
            for tensor, value in self.decisions.of_results(result, site, Call(self.gpu, func, args, kwargs, result)):
                self.values.keep(tensor, value, frozenset((assumptions.CHOSEN,)))
        return result

    def _check_memory(self, made: torch.Tensor) -> None:
        """Raise or add a note if a new tensor does not fit the GPU, and the step catches that."""
        if is_on_gpu(made) and self.storages.entry_of(made) is None:
            live, size = self.ledger.allocated.live, made.untyped_storage().nbytes()
            note = out_of_memory.check(live, size, self.gpu.memory_bytes)
            if note is not None:
                self.note(note)

    def _choose(self, call: Call) -> None:
        """Assume the indices that an operator chose by unknown values, if the step cannot be measured otherwise."""
        indices = chosen_indices(call)
        if self.values.of(indices) is not None:
            return
        self.answers.has_choices = True
        if self.answers.makes_choices:
            marks = {assumptions.at(assumptions.EVEN, self._place()), assumptions.CHOSEN}
            marks |= {assumptions.ORDER} if call.operator.overloadpacket is aten.sort else set()
            self.values.keep(indices, self.answers.choices(call), frozenset(marks))

    def _run_on_real(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], traits: _Traits) -> Any:
        """Run a view, a collective or an in-place operator whose tensors are all real, such as an optimizer's step
        counts. FakeTensorMode makes no view of a real tensor, and would replace each real argument by a fake one."""
        if not (traits.is_view or traits.is_sent):
            return self.values.real_result(func, args, kwargs, given, given)
        with torch._C._DisableTorchDispatch():
            result = func(*args, **kwargs)
        if traits.is_sent:
            self.values.state_sent(given)
        return result

    def _count_workspace(
        self, call: Call, given: list[torch.Tensor], results: list[Any], site: object, key: Hashable = None
    ) -> None:
        if not (any(map(is_on_gpu, given)) or any(map(is_on_gpu, results))):
            return
        hidden = self.workspace.buffers(call, key, given)
        if hidden.doubt is not None:
            self.note(hidden.doubt)
            if hidden.within is not None:
                self.bounded.add(hidden.doubt)
        if hidden.sizes or hidden.within is not None:
            what = f"workspace of {name_of(call.operator)}"
            bounds = None if hidden.within is None else (hidden.within.least, hidden.within.most)
            self.ledger.workspace((Entry(size, what, site) for size in hidden.sizes), bounds)

    # ---------------------------------------------------------------- memory that is freed late
    def _runs_graph(self) -> None:
        """Record that an operator whose result is differentiated, or a backward pass, runs on the current stream."""
        if self.streams.of_graphs.add(self.streams.current):
            self.ledger.late_births = GRADIENTS

    def _backward_begins(self) -> None:
        self.ledger.no_longer_late(LAST_GRADIENTS)
        if self.streams.of_graphs.is_any_other:
            self._runs_graph()

    def _returned_gradients(self, gradients: list[torch.Tensor]) -> None:
        for gradient in map(_unwrapped, gradients):
            self._may_be_late(gradient, LAST_GRADIENTS)

    def record_stream(self, tensor: torch.Tensor) -> None:
        self._may_be_late(tensor, RECORDED)

    def _may_be_late(self, tensor: torch.Tensor, reason: str) -> None:
        if isinstance(tensor, FakeTensor):
            self.storages.add_argument(tensor)
            entry = self.storages.entry_of(tensor)
            if entry is not None:
                self.ledger.may_be_late(entry, reason)

    def note_late_frees(self) -> None:
        """Add notes if the peak depends on when memory is freed that may be freed late, and widen the bounds."""
        count, peak = self.ledger.requested, self.ledger.late_peak
        if peak > count.peak:
            for reason in sorted(self.ledger.late_reasons):
                self.note(reason)
                self.bounded.add(reason)
            count.most_peak = max(count.most_peak, peak)


@contextlib.contextmanager
def counted_as_inputs() -> Iterator[None]:
    """Inside, new tensors count as inputs that existed before the step, such as upstream gradients."""
    tracker = _current()
    tracker.storages.counts_as_inputs = True
    try:
        yield
    finally:
        tracker.storages.counts_as_inputs = False


def state_range(tensor: torch.Tensor, low: int, high: int) -> None:
    """Tell the simulation that every element of ``tensor`` is at least ``low`` and below ``high``."""
    _current().values.state_range(tensor, low, high)


def _current() -> StorageTracker:
    (tracker,) = (mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, StorageTracker))
    return tracker


class _Traits:
    """The properties that decide how an operator is run. They share one lookup a call, which hashes it in Python."""

    __slots__ = (
        "chooses", "composite_key", "hides_nothing", "indexes", "is_sent", "is_view", "may_resize", "parts",
        "reads_values", "runs_on_real",
    )  # fmt: skip

    def __init__(self, operator: Any) -> None:
        packet, tags = operator.overloadpacket, operator.tags
        self.chooses = chooses(operator)
        self.composite_key = composite_key(operator)
        self.hides_nothing = hides_nothing(operator)
        self.indexes = packet in _INDEXES
        self.may_resize = may_resize(operator)
        self.parts = PARTS.get(str(packet))
        self.is_view = operator.is_view or torch.Tag.inplace_view in tags or packet is aten.set_
        """Whether the operator returns a view or changes metadata."""
        self.is_sent = operator.namespace in peers.NAMESPACES  # it is a collective
        self.runs_on_real = self.is_view or writes_into_arguments(operator)
        self.reads_values = bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.intersection(tags))
        """Whether a Python result, or the shape of a result, depends on values."""


_traits_of = functools.cache(_Traits)


def _forget_arguments(error: BaseException) -> None:
    """Let go of the tensors that an error's traceback holds in Python frames that torch has in C++ on a GPU."""
    waiting: list[BaseException | None] = [error]
    seen = set[int]()
    while waiting:
        cause = waiting.pop()
        if cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            traceback.clear_frames(cause.__traceback__)
            waiting += [cause.__cause__, cause.__context__]


def _indexes_from_cpu(args: Any) -> bool:
    """Whether a tensor on the GPU is indexed by tensors on the CPU, which torch first copies to the GPU."""
    return is_on_gpu(args[0]) and any(
        isinstance(index, torch.Tensor) and index.device.type == "cpu" for index in args[1]
    )


def _writes_by_mask(args: Any) -> bool:
    """Whether an ``index_put`` on the GPU has masks that are to be decomposed into index tensors. Filling by a CPU
    scalar makes no indices (``masked_fill``), and an accumulation frees its indices before its peak."""
    if not any(map(is_mask, args[1])) or not is_on_gpu(args[0]):
        return False
    adds = len(args) > 3 and args[3]
    return not adds and not is_masked_fill(*args[:3])


def _without_masks(indices: Any) -> list[Any]:
    """The indices, with each mask replaced by one index tensor for each of its dimensions, as CUDA does."""
    return [place for index in indices for place in (index.nonzero().unbind(1) if is_mask(index) else (index,))]


@functools.cache
def _are_plain(types: tuple[type, ...]) -> bool:
    """Whether all tensor classes of a call are FakeTensor, Parameter or plain Tensor (real tensors)."""
    return all(kind in (FakeTensor, torch.Tensor) or issubclass(kind, _PLAIN) for kind in types)


def _left_to_subclass(types: Any) -> Any:
    """Return NotImplemented, so that a tensor subclass unwraps itself. Raise if the subclass is not supported."""
    if any(kind.__name__ == "DTensor" for kind in types) and not _has_fake_process_group():
        raise MeasurementError("DTensor spans several GPUs, and one is simulated; measure the local tensors' step")
    if any(kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl for kind in types):
        names = ", ".join(kind.__name__ for kind in types)
        raise MeasurementError(f"a tensor subclass without a __torch_dispatch__ cannot be simulated: {names}")
    return NotImplemented


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside the wrappers of ``torch.func``."""
    functorch: Any = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def _has_fake_process_group() -> bool:
    """Whether the other ranks are fake, so that this GPU holds only a DTensor's local part."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_backend() == "fake"
