"""Keeps the values of small tensors, so that the code of a simulated step can read them.

Small tensors on the CPU are real, unless they were made from unknown values. The values of a storage on the GPU are
known if operators made them from known values alone; a real copy on the CPU holds them. A storage is small if it has
at most ``MOST_INTEGERS`` elements of an integer or bool dtype, or ``MOST_FLOATS`` of any other. For a larger storage
only a value that all its elements share is kept. An operator with an unknown argument makes all that it writes unknown.
Where unknown values decide how often a loop runs, the step is measured again with larger limits (``keep_more``).

Known values may rest on assumptions, which are passed on to results: random numbers are drawn on the CPU, while a GPU
would draw others, and a count over an unknown mask is assumed (``assumptions``). Every scalar made from unknown values,
such as a norm or a loss, is assumed too, so that all values computed from the same scalar agree.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from . import peers
from . import value_operators as operators
from .assumptions import CHOSEN, COPIED, DRAWN, DRAWN_ONCE, EVEN, UNDECIDED, Answers, Pool, formula_that_reads
from .fake_result_cache import NOT_HANDLED
from .value_operators import UNKNOWN
from .workspace.rules import tensors_in

aten = torch.ops.aten

MOST_INTEGERS, MOST_FLOATS = 2**20, 2**12
MORE_FLOATS, MOST_WORK, MOST_BYTES = 2**22, 2**32, 2**30
"""The limits after ``keep_more``: floats per storage; multiply-adds and bytes of all storages. They take seconds."""
_CPU = torch.device("cpu")
_NOTHING: frozenset[str] = frozenset()


@dataclass
class _Known:
    """What is known about the values of one storage."""

    memory: torch.UntypedStorage | None = None
    """The values, in real CPU memory of the storage's size."""
    shared: torch.Tensor | None = None
    """The value of every element of a storage that is too large for ``memory``."""
    assumed: frozenset[str] = _NOTHING
    """The assumptions behind the values."""
    range: tuple[int, int] | None = None
    """For unknown values: every element is at least the first number and below the second."""
    share: float | None = None
    """For an unknown mask: the share of its elements that are set."""
    pool: Pool | None = None
    """For an unknown one-hot mask: how many elements are set, and which of its views already picked some."""
    number: int = field(default_factory=itertools.count().__next__)
    """A unique number of the storage, because addresses are reused."""
    is_blank: bool = False
    """Whether nothing was written into the storage yet, so that its values can become known part by part."""
    num_bytes: int = 0
    """The real memory that the values take."""
    reference: Any = None

    def __post_init__(self) -> None:
        if self.memory is not None:
            self.num_bytes = self.memory.nbytes()

    def seen_by(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of ``tensor``, a view of this storage."""
        if self.shared is not None:
            return self.shared.expand(tensor.shape) if tensor.dtype == self.shared.dtype else None
        if self.memory is None or self.memory.nbytes() != tensor.untyped_storage().nbytes():  # it was resized
            return None
        view = torch.empty(0, dtype=tensor.dtype, device=_CPU)
        return view.set_(self.memory, tensor.storage_offset(), tensor.shape, tensor.stride())


class Values:
    """The known values of all storages of a simulation. ``_known`` maps a fake storage's address to its values."""

    def __init__(self, answers: Answers, assume: Callable[[str], object]) -> None:
        self._answers = answers
        self._assume = assume
        self._known: dict[int, _Known] = {}
        self._most_floats = MOST_FLOATS
        self._work_left, self._bytes_left = 0.0, 0

    def keep_more(self) -> None:
        """Raise the limit of floats per storage, until computing them takes too much work or memory."""
        self._most_floats = MORE_FLOATS
        self._work_left, self._bytes_left = MOST_WORK, MOST_BYTES

    @property
    def _keeps_more(self) -> bool:
        return self._most_floats > MOST_FLOATS

    def is_small(self, tensor: torch.Tensor) -> bool:
        return is_small(tensor, self._most_floats)

    # ---------------------------------------------------------------- reading
    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor, in the real memory that all views of its storage share; None if they are unknown."""
        if not isinstance(tensor, FakeTensor):
            return tensor if self._is_small_on_cpu(tensor) else None
        known = self._at(tensor)
        if known is None or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return None
        with torch._C._DisableTorchDispatch():
            return known.seen_by(tensor)

    def assumed_of(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        """The assumptions behind the values of these tensors."""
        return _NOTHING.union(*(known.assumed for known in map(self._at, tensors) if known is not None))

    def are_undecided(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether the values of these tensors were computed from an unknown number."""
        return UNDECIDED in self.assumed_of(tensors)

    def share_of(self, mask: torch.Tensor) -> float | None:
        """The share of an unknown mask's elements that are set, 1 by default; None if the tensor is no mask."""
        known = self._at(mask)
        if known is not None and known.share is not None:
            return known.share
        return 1.0 if mask.dtype == torch.bool else None

    def most_picked(self, mask: torch.Tensor) -> int:
        """The most elements that an unknown mask can pick, after other views of the same one-hot mask picked theirs."""
        known = self._at(mask)
        if known is None or known.pool is None:
            return mask.numel()
        return known.pool.taken_by((known.number, mask.storage_offset(), *mask.shape), mask.numel())

    def computed(self, operator: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        """The result of an operator on known values, or ``UNKNOWN``. In-place operators update the known values."""
        real = operators.empty_outs(operator, kwargs)
        for tensor in given:
            if id(tensor) not in real:
                value = self.of(tensor)
                if value is None:
                    return UNKNOWN
                real[id(tensor)] = value
        if self._keeps_more and not self._affords(operator, given):
            return UNKNOWN
        return operators.run_on_cpu(operator, args, kwargs, real)

    def real_result(self, operator: Any, args: Any, kwargs: Any, given: list[torch.Tensor], results: list[Any]) -> Any:
        """The result of an operator as real tensors, if it has small results on the CPU; else ``NOT_HANDLED``."""
        if operator.namespace != "aten" or not all(map(self._is_small_on_cpu, results or given)):
            return NOT_HANDLED
        # user code can read real memory without the dispatcher, so it must not hold a number that is only assumed
        value = UNKNOWN if self.are_undecided(given) else self.computed(operator, args, kwargs, given)
        if value is UNKNOWN:
            return self._filled(operator, args, kwargs, results)
        assumed = self._assumed_by(operator, given)
        if assumed or self._keeps_more:
            self._answers.are_most &= assumed.isdisjoint((DRAWN, DRAWN_ONCE))
            for tensor in (*tensors_in(value), *_real_written(operator, args, kwargs)):
                if operator.overloadpacket in operators.DRAWS_UP_TO_1 and tensor.numel() == 1:
                    self._answers.replace_draw(tensor)
                    assumed = assumed - {DRAWN} | {DRAWN_ONCE}
                self._remember(tensor, _Known(assumed=assumed, num_bytes=tensor.untyped_storage().nbytes()))
        return value

    def _filled(self, operator: Any, args: Any, kwargs: Any, results: list[Any]) -> Any:
        """Fill real memory with assumed values in place of unknown ones: a copy of integers to the CPU, or a real
        tensor that an operator writes into. User code may read both without the dispatcher."""
        real = _real_written(operator, args, kwargs)
        for tensor in real:
            self._fill(tensor)
        if real and len(results) == 1:
            return real[0]
        if operator.overloadpacket is not aten._to_copy or results[0].dtype.is_floating_point:
            return NOT_HANDLED
        with torch._C._DisableTorchDispatch():
            copy = torch.empty(results[0].shape, dtype=results[0].dtype, device=_CPU)
        self._fill(copy)
        return copy

    def _fill(self, tensor: torch.Tensor) -> None:
        self._assume(COPIED)
        with torch._C._DisableTorchDispatch():
            tensor.fill_(self._answers.number(tensor.dtype, COPIED))

    def _affords(self, operator: Any, given: list[torch.Tensor]) -> bool:
        """Subtract an operator's work from what is left. If nothing is left, go back to the usual limits for good."""
        self._work_left -= operators.work_of(operator, given)
        if self._work_left > 0 and self._bytes_left > 0:
            return True
        self._most_floats = MOST_FLOATS
        return False

    def _is_small_on_cpu(self, tensor: torch.Tensor) -> bool:
        device = getattr(tensor, "fake_device", None) or tensor.device  # .device of a fake tensor is dispatched
        return device.type == "cpu" and self.is_small(tensor)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, FakeTensor) or tensor.untyped_storage()._cdata in self._known

    def _at(self, tensor: torch.Tensor) -> _Known | None:
        return self._known.get(tensor.untyped_storage()._cdata)

    # ---------------------------------------------------------------- recording
    def keep(self, tensor: torch.Tensor, value: torch.Tensor, assumed: frozenset[str] = _NOTHING) -> None:
        """Record the values of a fake tensor that has a storage of its own. A ``value`` of one element fills it. Other
        values of more than a small tensor are not kept."""
        storage, is_small = tensor.untyped_storage(), self.is_small(tensor)
        is_small |= CHOSEN in assumed and is_small_as_choice(tensor)
        if not is_small and value.numel() != 1:
            self.forget([tensor])
            return
        with torch._C._DisableTorchDispatch():
            if not is_small:
                known = _Known(shared=value.reshape(()).to(tensor.dtype), assumed=assumed)
            else:
                known = _Known(torch.UntypedStorage(storage.nbytes()), assumed=assumed)
                room = known.seen_by(tensor)
                assert room is not None
                room.copy_(value)
        self._remember(tensor, known)

    def state_range(self, tensor: torch.Tensor, low: int, high: int) -> None:
        self._remember(tensor, _Known(range=(low, high)))

    def state_sent(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record that these real tensors hold values that other ranks sent, which are assumed."""
        for tensor in tensors:
            self._remember(tensor, _Known(assumed=frozenset((peers.SAME,))))

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self._drop(tensor.untyped_storage()._cdata)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Forget the values of a storage whose size changed: nothing was written into the memory that it gained."""
        known = self._known.get(storage._cdata)
        if known is None or known.is_blank:
            return
        if known.memory is None or known.memory.nbytes() != storage.nbytes():
            self._drop(storage._cdata)

    def forget_written(self, written: Iterable[Any]) -> None:
        """Forget the values of tensors that a kernel writes into: kernels do not run in a simulation."""
        self.forget(tensor for tensor in written if isinstance(tensor, FakeTensor))

    def _drop(self, address: int) -> None:
        known = self._known.pop(address, None)
        self._bytes_left += 0 if known is None else known.num_bytes

    def _remember(self, tensor: torch.Tensor, known: _Known) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata

        def freed(reference: object) -> None:
            found = self._known.get(address)
            if found is not None and found.reference is reference:
                self._drop(address)

        known.reference = weakref.ref(storage, freed)
        self._drop(address)
        self._bytes_left -= known.num_bytes
        self._known[address] = known

    # ---------------------------------------------------------------- following
    def follow(self, operator: Any, args: Any, kwargs: Any, given: list[torch.Tensor], results: list[Any]) -> None:
        """After an operator ran on fake tensors, record its results if they are known, else forget what it wrote."""
        is_number = len(results) == 1 and results[0].dim() == 0
        if not (is_number or operators.can_be_known(operator) or any(map(self._is_known, given))):
            return
        packet = operator.overloadpacket
        if operator.namespace in peers.NAMESPACES:
            self._receive(operator, args, given, results)
            return
        if packet in operators.BLANK:
            if self.is_small(results[0]):
                self._remember(results[0], _Known(is_blank=True))
            return
        if not (results or operators.writes(operator)):
            return
        if packet is aten.resize_:
            self.resized(args[0].untyped_storage())
            return
        if packet is aten._amp_foreach_non_finite_check_and_unscale_:  # in a healthy step it leaves its flag as it was
            operator, args = aten._foreach_mul_.Tensor, (args[0], args[2])
            given = tensors_in(args)
        if operators.has_out_arguments(operator) and not all(map(_fills_its_storage, results)):
            self._write_parts(operator, args, kwargs, given, results)
            return
        overwrites = packet in operators.OVERWRITES or (packet in operators.ADD_PRODUCTS and kwargs.get("beta", 1) == 0)
        if overwrites and self.of(args[0]) is None and not self._gave_memory(args[0], given):
            self.forget([args[0]])
            self._overwrite(operator, args, kwargs, given)
            return
        if packet in operators.FILLS:
            filled = operators.FILLS[packet]
            self.keep(results[0], _scalar(args[-1] if filled is None else filled))
            return
        healthy = operators.healthy_results(operator, args)
        is_assumed = bool(healthy) and self.are_undecided(given)
        if (
            operator.namespace == "aten"
            and not is_assumed
            and (
                self._follow_known(operator, args, kwargs, given, results)
                or self._follow_shared(operator, args, kwargs, given, results)
            )
        ):
            return
        was_zero = packet in (aten.scatter, aten.scatter_) and self._is_zero(args[0])
        self.forget(operators.written_tensors(operator, args, kwargs))
        if was_zero and isinstance(args[3], (int, float)) and args[3] == 1:  # a one-hot mask
            _, dim, index = args[:3]
            share = index.shape[dim] / args[0].shape[dim]
            self._remember(results[0], _Known(share=share, pool=Pool(index.numel())))
        elif len(results) == 1 and given:
            self._follow_unknown(operator, args, given, results[0])
        for place, value in healthy.items():
            self.keep(results[place], _scalar(value))

    def _follow_known(self, operator: Any, args: Any, kwargs: Any, given: Any, results: list[Any]) -> bool:
        """Follow an operator on small tensors whose values are known."""
        if not all(map(self.is_small, (*given, *results))) and not (
            all(map(is_small_as_choice, (*given, *results))) and self._follows_choices(operator, args, kwargs, given)
        ):
            return False
        values = self.computed(operator, args, kwargs, given)
        if values is UNKNOWN:
            return False
        assumed = self._assumed_by(operator, given)
        for known in map(self._at, operators.written_tensors(operator, args, kwargs)):
            if known is not None:
                known.assumed |= assumed
        for fake, value in zip(results, tensors_in(values), strict=False):
            is_new = operators.has_out_arguments(operator) or self._at(fake) is None  # else written in place, or a view
            if is_new and fake.shape == value.shape and fake.dtype == value.dtype and isinstance(fake, FakeTensor):
                self.keep(fake, value, assumed)
                fake.constant = None  # FakeTensorMode's own record of values, which covers fewer tensors
        return True

    def _follows_choices(self, operator: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> bool:
        """Whether an operator reads choices, such as those of a router, so that more floats are kept than otherwise:
        counts and masks. What it writes in place gets real memory."""
        if CHOSEN not in self.assumed_of(given):
            return False
        for tensor in operators.written_tensors(operator, args, kwargs):
            known = self._at(tensor)
            if known is not None and known.shared is not None:
                self.keep(tensor, known.shared, known.assumed | {CHOSEN})
        return True

    def _follow_shared(self, operator: Any, args: Any, kwargs: Any, given: Any, results: list[Any]) -> bool:
        """Follow an operator on tensors whose elements all share one value, if its result's elements do too."""
        packet = operator.overloadpacket
        singles: dict[int, Any] = operators.empty_outs(operator, kwargs)
        if (operators.writes(operator) and not singles) or len(results) != 1 or not given:
            return False
        for tensor in given:
            if id(tensor) not in singles:
                singles[id(tensor)] = self._single(tensor)
        if any(single is None for single in singles.values()):
            return False
        (result,) = results
        if packet in operators.REDUCES:
            value = operators.run_on_cpu(packet, (args[0],), {}, singles)
            if packet is aten.sum and value is not UNKNOWN:
                with torch._C._DisableTorchDispatch():
                    value = value * (args[0].numel() // max(1, result.numel()))
        elif torch.Tag.pointwise in operator.tags or packet in operators.COPIES:
            value = operators.run_on_cpu(operator, args, kwargs, singles)
        else:
            return False
        if value is UNKNOWN or value.numel() != 1:
            return False
        self.keep(result, value, self.assumed_of(given))
        return True

    def _follow_unknown(self, operator: Any, args: Any, given: list[torch.Tensor], result: torch.Tensor) -> None:
        """Record what can be said about the result of an operator on unknown values: a share, a count or a scalar."""
        packet = operator.overloadpacket
        first = args[0]
        if packet in operators.ALWAYS_HOLDS:
            stated = known.range if (known := self._at(first)) is not None else None
            if stated is not None and isinstance(args[1], int) and operators.ALWAYS_HOLDS[packet](*stated, args[1]):
                self.keep(result, _scalar(True))
        elif packet in operators.KEEPS_SHARE:
            share = self.share_of(first)
            if share is not None:
                known = self._at(first)
                self._remember(result, _Known(share=share, pool=known.pool if known else None))
        elif packet in operators.COUNTS and result.numel() and self.is_small(result):
            share = self.share_of(first)
            if share is not None and formula_that_reads() is None:
                num_each, known = first.numel() // result.numel(), self._at(first)
                if known is not None and known.pool is not None and packet in operators.ADDS:
                    shares = self._answers.shares(round(first.numel() * share), result.numel(), num_each)
                    with torch._C._DisableTorchDispatch():
                        shares = shares.reshape(result.shape)
                    self.keep(result, shares, frozenset((EVEN,)))
                    return
                note, value = self._answers.of_mask(packet, num_each, share)
                self.keep(result, _scalar(value), frozenset((note,)))
        elif result.dim() == 0 and result.dtype.is_floating_point and _has_own_storage(result, given):
            self.keep(result, _scalar(self._answers.next_number()), frozenset((UNDECIDED,)))

    def _gave_memory(self, target: torch.Tensor, given: list[torch.Tensor]) -> bool:
        """Give a blank storage real memory if an operator writes known values into a part of it. Returns whether it has
        memory now. Parts that were not written yet are taken to be zero."""
        known = self._at(target)
        others = [tensor for tensor in given if tensor is not target]
        if known is None or not known.is_blank or any(self.of(tensor) is None for tensor in others):
            return False
        with torch._C._DisableTorchDispatch():
            known.memory = torch.zeros(target.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage()
        known.is_blank, known.num_bytes = False, known.memory.nbytes()
        self._bytes_left -= known.num_bytes
        return True

    def _write_parts(
        self, operator: Any, args: Any, kwargs: Any, given: list[torch.Tensor], results: list[Any]
    ) -> None:
        """Follow an operator whose ``out=`` arguments are parts of storages: the other parts keep their values."""
        values = self.computed(operator, args, kwargs, given)
        outs = {id(tensor) for tensor in results}
        sources = [tensor for tensor in given if id(tensor) not in outs]
        for target, value in zip(results, tensors_in(values) if values is not UNKNOWN else results, strict=True):
            if values is not UNKNOWN:
                self._gave_memory(target, [target, *sources])
            known, room = self._at(target), self.of(target)
            # a kernel may have resized the argument, whose values then no longer fit
            if values is UNKNOWN or known is None or room is None or room.shape != value.shape:
                self.forget([target])
                continue
            with torch._C._DisableTorchDispatch():
                room.copy_(value)
            known.assumed |= self._assumed_by(operator, sources)

    def _overwrite(self, operator: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> None:
        """Record the values of a storage that an operator overwrote completely with known values."""
        target = args[0]
        if not isinstance(target, FakeTensor) or not _fills_its_storage(target):
            return
        others = [tensor for tensor in given if tensor is not target]
        sources = {id(tensor): self.of(tensor) for tensor in others}
        if any(value is None for value in sources.values()):
            return
        is_whole = self.is_small(target)
        if not is_whole and (operator.overloadpacket not in operators.SHARES or any(t.numel() > 1 for t in others)):
            return
        with torch._C._DisableTorchDispatch():
            room = torch.empty(target.shape if is_whole else (), dtype=target.dtype, device=_CPU)
        if operators.run_on_cpu(operator, args, kwargs, {**sources, id(target): room}) is not UNKNOWN:
            self.keep(target, room, self._assumed_by(operator, others))

    def _receive(self, operator: Any, args: Any, given: list[torch.Tensor], results: list[Any]) -> None:
        """Follow a collective. If the tensors that it writes fill one storage together, that storage becomes known."""
        assumed = self.assumed_of(given) | {peers.SAME}
        received = list(peers.received(operator, args, results, self.of))
        written = Counter[int]()
        for tensor, _ in received:
            written[tensor.untyped_storage()._cdata] += tensor.numel() * tensor.itemsize
        for tensor, value in received:
            storage = tensor.untyped_storage()
            if value is None or not self.is_small(tensor):
                self.forget([tensor])
                continue
            if self.of(tensor) is None and written[storage._cdata] == storage.nbytes():
                self._remember(tensor, _Known(torch.UntypedStorage(storage.nbytes()), assumed=assumed))
            room, known = self.of(tensor), self._at(tensor)
            if room is not None and known is not None:
                with torch._C._DisableTorchDispatch():
                    room.copy_(value)
                known.assumed |= assumed

    def _single(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value that all elements of a tensor are known to share, as a real tensor of one element; else None."""
        known = self._at(tensor)
        if known is not None and known.shared is not None:
            return known.shared
        return self.of(tensor) if tensor.numel() == 1 else None

    def _is_zero(self, tensor: torch.Tensor) -> bool:
        """Whether all elements are known to be zero."""
        value = self._single(tensor) if not self.is_small(tensor) else self.of(tensor)
        with torch._C._DisableTorchDispatch():
            return value is not None and not value.any()

    def _assumed_by(self, operator: Any, given: Iterable[torch.Tensor]) -> frozenset[str]:
        if operator.overloadpacket in operators.FILLS:  # ones_like and others take a shape, not values
            return _NOTHING
        draws = torch.Tag.nondeterministic_seeded in operator.tags
        return self.assumed_of(given) | ({DRAWN} if draws else _NOTHING)


def is_small(tensor: torch.Tensor, most_floats: int = MOST_FLOATS) -> bool:
    """Whether the values of a tensor's whole storage are few enough to be kept."""
    dtype = tensor.dtype
    most = most_floats if dtype.is_floating_point or dtype.is_complex else MOST_INTEGERS
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() <= most * dtype.itemsize


def is_small_as_choice(tensor: torch.Tensor) -> bool:
    """Whether a tensor of any dtype is small enough to be kept if it follows from choices."""
    return is_small(tensor, most_floats=MOST_INTEGERS)


def _real_written(operator: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The real tensors that an operator writes into."""
    written = operators.written_tensors(operator, args, kwargs)
    return [tensor for tensor in written if not isinstance(tensor, FakeTensor)]


def _has_own_storage(result: torch.Tensor, given: list[torch.Tensor]) -> bool:
    """Whether an operator's result is no view of an argument. Its storage may be larger than the result: a mean of
    squares can reuse the memory of the squares."""
    storage = result.untyped_storage()._cdata
    return all(tensor.untyped_storage()._cdata != storage for tensor in given)


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    return math.prod(tensor.shape) * tensor.dtype.itemsize == tensor.untyped_storage().nbytes()


def _scalar(value: complex | float | int | bool) -> torch.Tensor:
    with torch._C._DisableTorchDispatch():
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None, device=_CPU)
