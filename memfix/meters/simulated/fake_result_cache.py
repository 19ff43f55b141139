"""A cache of operators' results on fake tensors, because FakeTensorMode dominates the time of a simulated step.

Torch's own view kernels make views. For any other call the cache holds a recipe that makes the result, under a key of
all that the result can depend on: shapes, strides, dtypes, devices and plain values. A recipe is kept only if its
result has the same properties as that of FakeTensorMode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .hide_dispatch_modes import hide_python_key
from .workspace.rules import STORAGES, tensors_in

aten = torch.ops.aten

UNKNOWN = object()

Tensors = Sequence[torch.Tensor]
"""The tensors among the arguments of a call, in order."""
Recipe = Callable[["FakeResultCache", Tensors], Any]

_CPU, _META = torch.device("cpu"), torch.device("meta")
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
_UNPREDICTABLE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
_OTHER_VIEWS = (
    aten.alias.default, aten.diagonal.default, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default,
    aten.unbind.int, aten.unfold.default, aten._reshape_alias.default, aten._unsafe_view.default,
)  # fmt: skip
VIEWS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    **{operator: operator for operator in _OTHER_VIEWS},
    aten.detach.default: torch.detach,
    aten.expand.default: torch.Tensor.expand,
    aten.permute.default: torch.permute,
    aten.select.int: torch.select,
    aten.squeeze.default: torch.squeeze,
    aten.squeeze.dim: torch.squeeze,
    aten.squeeze.dims: torch.squeeze,
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: torch.Tensor.view,
}
"""Operators that return a view of their argument, and the fastest function to call for each."""
_MOST_RECIPES = 50_000

_recipes: dict[Hashable, Recipe | None] = {}
"""The cache of the process. None means that no recipe makes this result."""


class FakeResultCache:
    """The results of operators under one FakeTensorMode.

    ``num_modes`` modes are active when the cache is used, FakeTensorMode innermost; with any other mode nothing is
    cached. With ``hides_modes`` new tensors have no Python key between operators (``hide_dispatch_modes``).
    """

    def __init__(self, mode: FakeTensorMode, *, num_modes: int, hides_modes: bool) -> None:
        self.mode = mode
        self.hides_modes = hides_modes
        self._num_modes = num_modes
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def view(self, operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of an operator in ``VIEWS``, or ``UNKNOWN``."""
        if kwargs or not self._is_ours(args[0]) or self._is_other_mode_active():
            return UNKNOWN
        # what FakeTensorMode does to run a kernel, without its slow context manager
        with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
            self.mode.in_kernel_invocation = True
            torch._C._set_meta_in_tls_dispatch_include(True)
            try:
                views = VIEWS[operator](*args)
            finally:
                self.mode.in_kernel_invocation = False
        device = args[0].fake_device
        if isinstance(views, (list, tuple)):
            return [self.fake(view, device) for view in views]
        return self.fake(views, device)

    def key_of(self, operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable | None:
        """The key of a call; None if its result may depend on something that is not in the key."""
        if not _is_predictable(operator) or self._is_other_mode_active():
            return None
        # cuDNN changes the layout of a convolution's result
        key: list[Any] = [operator, torch.get_default_dtype(), torch._C._get_cudnn_enabled(), *kwargs]
        kinds = operator.is_view, _returns_new_memory(operator)
        is_complete = self._extend(key, args, *kinds) and self._extend(key, kwargs.values(), *kinds)
        return tuple(key) if is_complete else None

    def get(self, key: Hashable) -> Recipe | None:
        """The recipe of a call, one for each key."""
        return _recipes.get(key)

    def put(self, key: Hashable, operator: torch._ops.OpOverload, given: Tensors, result: Any) -> Recipe | None:
        """Keep the recipe of a call that has none yet, if there is one that makes the same result."""
        if key not in _recipes:
            if len(_recipes) >= _MOST_RECIPES:
                _recipes.clear()
            recipe = _recipe_of(result, _Places.of(given), is_view=operator.is_view)
            _recipes[key] = recipe if recipe is not None and _are_alike(result, recipe(self, given)) else None
        return _recipes[key]

    def _extend(self, key: list[Any], values: Iterable[Any], with_offset: bool, with_real: bool) -> bool:
        """Add ``values`` to ``key``. Returns False if a value has a type that cannot be in a key.

        Real tensors can only be ``with_real``: FakeTensorMode makes a fake of each, and no result may be a part of it.
        """
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if not self._is_ours(value):
                    return False
                key += (_kind_of(value), value.fake_device, value.dtype, value.shape, value.stride())
                if with_offset:
                    key += (value.storage_offset(), value.untyped_storage().nbytes())
            elif kind in _PLAIN:
                key += (kind, value)  # 1, 1.0 and True are equal but give results of different dtypes
            elif kind is list or kind is tuple:
                key += (kind, len(value))
                if not self._extend(key, value, with_offset, with_real):
                    return False
            elif with_real and (kind is torch.Tensor or kind is torch.nn.Parameter):
                if value.layout is not torch.strided or value.device != _CPU:
                    return False
                key += (kind, _kind_of(value), value.dtype, value.shape, value.stride())
            else:
                return False
        return True

    def _is_ours(self, tensor: Any) -> bool:
        return type(tensor) is FakeTensor and tensor.fake_mode is self.mode and _is_plain(tensor)

    def _is_other_mode_active(self) -> bool:
        """Whether a further dispatch mode is active, or inference mode, whose tensors have other dispatch keys."""
        return torch._C._len_torch_dispatch_stack() != self._num_modes or torch.is_inference_mode_enabled()

    def fake(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Turn a meta tensor into a fake one on ``device``, as FakeTensor's constructor does, without its checks."""
        made = torch.Tensor._make_subclass(
            FakeTensor, tensor, False, dispatch_device=True, device_for_backend_keys=device
        )
        if self.mode._allow_unsafe_data_ptr_access:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
        else:
            torch._C._set_throw_on_mutable_data_ptr(made)
        if device not in self._attributes:
            with torch._C._DisableTorchDispatch():
                some = torch.empty(0, device=_META)
            self._attributes[device] = vars(FakeTensor(self.mode, some, device)).copy()
        made.__dict__ = self._attributes[device].copy()  # a copy is far cheaper than an update
        if self.hides_modes:
            hide_python_key((made,))
        return made


def _is_plain(tensor: FakeTensor) -> bool:
    return tensor.constant is None and tensor.layout is torch.strided


def _kind_of(tensor: torch.Tensor) -> int:
    """The tensor's dispatch keys, which say whether it is conjugated, negated, an inference tensor, and so on."""
    return int(torch._C._dispatch_keys(tensor).raw_repr())


@functools.cache
def _is_predictable(operator: torch._ops.OpOverload) -> bool:
    """Whether the key contains everything that the operator's result depends on."""
    if operator.namespace != "aten" or operator in (aten.lift.default, aten.lift_fresh.default):
        return False
    if operator.overloadpacket in STORAGES:  # these may depend on the GPU
        return False
    # indexing by a mask never gets here, because fake masks have no values
    return operator is aten.index.Tensor or not any(tag in operator.tags for tag in _UNPREDICTABLE)


@functools.cache
def _returns_new_memory(operator: torch._ops.OpOverload) -> bool:
    """Whether the operator writes into no argument, and no result is a view of one."""
    return all(argument.alias_info is None for argument in operator._schema.arguments)


# ---------------------------------------------------------------- recipes
@dataclass(frozen=True)
class _Places:
    """The first place of each argument, and of each storage, among the arguments of a call."""

    of_tensor: dict[int, int]
    """By ``id``."""
    of_storage: dict[int, int]

    @staticmethod
    def of(given: Tensors) -> _Places:
        backwards = [*enumerate(given)][::-1]  # the first of several is written last
        return _Places(
            {id(argument): place for place, argument in backwards},
            {argument.untyped_storage()._cdata: place for place, argument in backwards},
        )


def _recipe_of(result: Any, places: _Places, *, is_view: bool) -> Recipe | None:
    if isinstance(result, (list, tuple)):
        parts = [_recipe_of(part, places, is_view=is_view) for part in result]
        recipes = [part for part in parts if part is not None]
        if len(recipes) < len(parts):
            return None
        kind: Any = type(result)
        return lambda cache, given: kind([recipe(cache, given) for recipe in recipes])
    if result is None:
        return lambda cache, given: None
    if id(result) in places.of_tensor:
        place = places.of_tensor[id(result)]
        return lambda cache, given: given[place]
    if type(result) is not FakeTensor or result.requires_grad or not _is_plain(result):
        return None
    shared = places.of_storage.get(result.untyped_storage()._cdata)
    if shared is not None:
        return _same_memory(shared, result) if is_view else None  # keys of other operators have no offset
    return _new_memory(result)


def _same_memory(place: int, result: torch.Tensor) -> Recipe:
    offset, size, stride = result.storage_offset(), tuple(result.shape), result.stride()
    dtype, device = result.dtype, result.device

    def make(cache: FakeResultCache, given: Tensors) -> Any:
        with torch._C._DisableTorchDispatch():
            view = torch.empty_strided((0,), (1,), dtype=dtype, device=_META)
            view.set_(given[place].untyped_storage(), offset, size, stride)
        return cache.fake(view, device)

    return make


def _new_memory(result: torch.Tensor) -> Recipe:
    size, stride, dtype, device = tuple(result.shape), result.stride(), result.dtype, result.device

    def make(cache: FakeResultCache, given: Tensors) -> Any:
        with torch._C._DisableTorchDispatch():
            memory = torch.empty_strided(size, stride, dtype=dtype, device=_META)
        return cache.fake(memory, device)

    return make


def _are_alike(result: Any, again: Any) -> bool:
    theirs, ours = tensors_in(result), tensors_in(again)
    # results may share new memory with each other
    num_storages = [len({tensor.untyped_storage()._cdata for tensor in some}) for some in (theirs, ours)]
    return num_storages[0] == num_storages[1] and [*map(_described, theirs)] == [*map(_described, ours)]


def _described(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        _kind_of(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(),
        tensor.untyped_storage().nbytes(), tensor.requires_grad, vars(tensor),
    )  # fmt: skip
