"""A cache of operators' results on fake tensors, because FakeTensorMode takes most of the time of a simulated step.

Torch's own view kernels make views. For any other call the cache holds a recipe, a function that makes the result. Its
key has all that the result can depend on: shapes, strides, dtypes, devices and plain values. A recipe is kept only if
its result has the same properties as that of FakeTensorMode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .hide_dispatch_modes import hide_python_key
from .workspace.rules import RULES, STORAGES, tensors_in

aten = torch.ops.aten

NOT_HANDLED = object()
"""What a function returns in place of a result if it cannot run the given call."""

Size = Sequence[int]
Tensors = Sequence[torch.Tensor]
"""The tensors among the arguments of a call, in order."""
Recipe = Callable[["FakeResultCache", Tensors], Any]

_CPU, _META = torch.device("cpu"), torch.device("meta")
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
_NUMBERS = frozenset((int, float))
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
META_KERNELS = frozenset((
    aten._foreach_norm.Scalar, aten._foreach_sqrt.default, aten._log_softmax.default,
    aten._log_softmax_backward_data.default, aten._softmax.default, aten._softmax_backward_data.default,
    aten._to_copy.default, aten.addmm.default, aten.amax.default, aten.any.dim, aten.bmm.default, aten.cat.default,
    aten.cudnn_batch_norm.default, aten.cudnn_batch_norm_backward.default, aten.cumsum.default,
    aten.embedding.default, aten.embedding_dense_backward.default, aten.empty_like.default, aten.flip.default,
    aten.full_like.default, aten.gather.default, aten.index.Tensor, aten.index_select.default,
    aten.linalg_vector_norm.default, aten.mean.dim, aten.mm.default, aten.native_batch_norm.default,
    aten.native_batch_norm_backward.default, aten.native_dropout.default, aten.native_group_norm.default,
    aten.native_group_norm_backward.default, aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default, aten.new_empty.default, aten.new_empty_strided.default,
    aten.new_full.default, aten.new_ones.default, aten.new_zeros.default, aten.nll_loss_backward.default,
    aten.nll_loss_forward.default, aten.ones_like.default, aten.scatter.value, aten.sort.default,
    aten.stack.default, aten.sum.dim_IntList, aten.topk.default, aten.triu.default, aten.zeros_like.default,
))  # fmt: skip
"""Operators whose meta kernels return the same as FakeTensorMode, beside those that work by element or write into an
argument. FakeTensorMode takes several times as long: it first decomposes the operator, and dispatches each part."""
_MOST_RECIPES = 50_000

_recipes: dict[Hashable, Recipe | None] = {}
"""The cache of the process: key of a call -> its recipe; None if no recipe makes its result."""


class FakeResultCache:
    """The results of operators under one FakeTensorMode.

    ``num_modes`` dispatch modes are active when the cache is used, FakeTensorMode innermost; nothing is cached while
    there are more. With ``hides_modes``, tensors have no Python key between operators (``hide_dispatch_modes``).
    """

    def __init__(self, mode: FakeTensorMode, *, num_modes: int, hides_modes: bool) -> None:
        self.mode = mode
        self.hides_modes = hides_modes
        self._num_modes = num_modes
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def view(self, operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator in ``VIEWS`` and return its result, or ``NOT_HANDLED``."""
        if kwargs or not self._is_ours(args[0]) or self._is_other_mode_active():
            return NOT_HANDLED
        views, device = self._on_meta(VIEWS[operator], args, kwargs), args[0].fake_device
        if isinstance(views, (list, tuple)):
            return [self.fake(view, device) for view in views]
        return self.fake(views, device)

    def new(self, operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], given: Tensors) -> Any:
        """Run the meta kernel of an operator that has a fitting one and return its result, or ``NOT_HANDLED``."""
        devices = {tensor.device for tensor in given}
        if not _traits_of(operator).has_meta_kernel or len(devices) != 1 or not all(map(self._is_ours, given)):
            return NOT_HANDLED
        (device,) = devices
        if kwargs.get("device") is not None:
            if kwargs["device"] != device:  # on a real device, the result would have real memory
                return NOT_HANDLED
            kwargs = {**kwargs, "device": _META}
        try:
            result = self._on_meta(operator, args, kwargs)
        except Exception:  # FakeTensorMode will raise the proper error
            return NOT_HANDLED
        if isinstance(result, torch.Tensor):
            return self._as_fake(result, device)
        return type(result)(part if part is None else self._as_fake(part, device) for part in result)

    def _as_fake(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Turn a result of a meta kernel into a fake tensor; an argument that the operator wrote into is one."""
        return tensor if isinstance(tensor, FakeTensor) else self.fake(tensor, device)

    def _on_meta(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a function by its meta kernel, as FakeTensorMode does, but without its slow context manager."""
        with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
            self.mode.in_kernel_invocation = True
            torch._C._set_meta_in_tls_dispatch_include(True)
            try:
                return function(*args, **kwargs)
            finally:
                self.mode.in_kernel_invocation = False

    def key_of(self, operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable | None:
        """The key of a call; None if its result may depend on something that is not in the key."""
        if not _is_predictable(operator) or self._is_other_mode_active():
            return None
        # cuDNN changes the layout of a convolution's result
        key: list[Any] = [operator, torch.get_default_dtype(), torch._C._get_cudnn_enabled(), *kwargs]
        traits = _traits_of(operator)
        is_complete = self._extend(key, args, traits) and self._extend(key, kwargs.values(), traits)
        return tuple(key) if is_complete else None

    def get(self, key: Hashable, operator: torch._ops.OpOverload, args: Sequence[Any]) -> Recipe | None:
        """The recipe of a call, if there is one. Each key has a recipe object of its own."""
        recipe = _recipes.get(key)
        if recipe is None and _writes_lists_of_same_shapes(operator, args):
            _recipes[key] = recipe = _nothing()
        return recipe

    def put(self, key: Hashable, operator: torch._ops.OpOverload, given: Tensors, result: Any) -> Recipe | None:
        """Make and keep a recipe for a call whose key is new, if a recipe can make the same result."""
        if key not in _recipes:
            if len(_recipes) >= _MOST_RECIPES:
                _recipes.clear()
            recipe = _recipe_of(result, _Places.of(given), is_view=operator.is_view)
            _recipes[key] = recipe if recipe is not None and _are_alike(result, recipe(self, given)) else None
        return _recipes[key]

    def _extend(self, key: list[Any], values: Iterable[Any], traits: _Traits) -> bool:
        """Add ``values`` to ``key``. Returns False if a value has a type that cannot be in a key.

        A real tensor is allowed only if the operator returns new memory: FakeTensorMode replaces the tensor by a fake
        one, and no result may be a view of that.
        """
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if not self._is_ours(value):
                    return False
                key += (_kind_of(value), value.fake_device, value.dtype, value.shape, value.stride())
                if traits.is_view:
                    key += (value.storage_offset(), value.untyped_storage().nbytes())
            elif traits.ignores_numbers and kind in _NUMBERS:
                key.append(kind)
            elif kind in _PLAIN:
                key += (kind, value)  # 1, 1.0 and True are equal but give results of different dtypes
            elif kind is list or kind is tuple:
                key += (kind, len(value))
                if not self._extend(key, value, traits):
                    return False
            elif traits.returns_new_memory and (kind is torch.Tensor or kind is torch.nn.Parameter):
                if value.layout is not torch.strided or value.device != _CPU:
                    return False
                key += (kind, _kind_of(value), value.dtype, value.shape, value.stride())
            else:
                return False
        return True

    def _is_ours(self, tensor: Any) -> bool:
        return type(tensor) is FakeTensor and tensor.fake_mode is self.mode and _is_plain(tensor)

    def _is_other_mode_active(self) -> bool:
        """Whether another dispatch mode is active, or inference mode, in which new tensors have other dispatch keys."""
        return torch._C._len_torch_dispatch_stack() != self._num_modes or torch.is_inference_mode_enabled()

    def new_memory(self, size: Size, stride: Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A fake tensor with memory of its own."""
        with torch._C._DisableTorchDispatch():
            memory = torch.empty_strided(size, stride, dtype=dtype, device=_META)
        return self.fake(memory, device)

    def same_memory(
        self, base: torch.Tensor, size: Size, stride: Size, offset: Any, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A fake tensor with the memory of ``base``. The offset is that in the storage."""
        with torch._C._DisableTorchDispatch():
            view = torch.empty_strided((0,), (1,), dtype=dtype, device=_META)
            view.set_(base.untyped_storage(), offset, size, stride)
        return self.fake(view, device)

    def fake(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Turn a meta tensor into a fake one on ``device``, like FakeTensor's constructor but without its checks."""
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
    """The tensor's dispatch keys: they tell whether it is conjugated, negated, an inference tensor, and so on."""
    return int(torch._C._dispatch_keys(tensor).raw_repr())


@functools.cache
def _is_predictable(operator: torch._ops.OpOverload) -> bool:
    """Whether a key can contain everything that the operator's result depends on."""
    if operator.namespace != "aten" or operator in (aten.lift.default, aten.lift_fresh.default):
        return False
    if operator.overloadpacket in STORAGES:  # these may depend on the GPU
        return False
    # indexing by a mask never gets here, because fake masks have no values
    return operator is aten.index.Tensor or not any(tag in operator.tags for tag in _UNPREDICTABLE)


@dataclass(frozen=True)
class _Traits:
    """The properties of an operator that decide what the keys of its calls contain."""

    is_view: bool
    returns_new_memory: bool
    """Whether the operator writes into no argument, and no result is a view of one."""
    has_meta_kernel: bool
    """Whether its meta kernel gives what FakeTensorMode gives."""
    ignores_numbers: bool
    """Whether the result and workspace depend only on the types of plain numbers, not on their values. An optimizer
    passes other numbers in every step."""


@functools.cache
def _traits_of(operator: torch._ops.OpOverload) -> _Traits:
    return _Traits(
        operator.is_view,
        all(argument.alias_info is None for argument in operator._schema.arguments),
        operator in META_KERNELS or torch.Tag.pointwise in operator.tags or _returns_what_it_writes(operator),
        (torch.Tag.pointwise in operator.tags or _is_foreach(operator)) and operator.overloadpacket not in RULES,
    )


def _returns_what_it_writes(operator: torch._ops.OpOverload) -> bool:
    """Whether all results are arguments that the operator writes into, in place or as ``out``."""
    returns = operator._schema.returns
    return bool(returns) and all(each.alias_info is not None and each.alias_info.is_write for each in returns)


def _is_foreach(operator: torch._ops.OpOverload) -> bool:
    return operator._opname.startswith("_foreach_")


def _writes_lists_of_same_shapes(operator: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """Whether a call writes into lists of tensors of the same shapes, so that it cannot fail, and returns nothing. Such
    a call can skip FakeTensorMode, which would visit each of an optimizer's tensors."""
    if not _is_foreach(operator) or operator._schema.returns:
        return False
    lists = [value for value in args if isinstance(value, (list, tuple)) and tensors_in(value[:1])]
    shapes = [[tensor.shape for tensor in tensors] for tensors in lists]
    return bool(shapes) and all(each == shapes[0] for each in shapes)


def _nothing() -> Recipe:
    """A recipe that returns None. Each is a new object, because workspaces are cached under their call's recipe."""
    return lambda cache, given: None


# ---------------------------------------------------------------- recipes
@dataclass(frozen=True)
class _Places:
    """The first place of each argument, and of each argument's storage, among the arguments of a call."""

    of_tensor: dict[int, int]
    """By the tensor's ``id``."""
    of_storage: dict[int, int]

    @staticmethod
    def of(given: Tensors) -> _Places:
        backwards = [*enumerate(given)][::-1]  # of several places, the first is written last and stays
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
        return _nothing()
    if id(result) in places.of_tensor:
        place = places.of_tensor[id(result)]
        return lambda cache, given: given[place]
    if type(result) is not FakeTensor or result.requires_grad or not _is_plain(result):
        return None
    shared = places.of_storage.get(result.untyped_storage()._cdata)
    size, stride, dtype, device = tuple(result.shape), result.stride(), result.dtype, result.device
    if shared is None:
        return lambda cache, given: cache.new_memory(size, stride, dtype, device)
    if not is_view:  # its key has no storage offset
        return None
    place, offset = shared, result.storage_offset()
    return lambda cache, given: cache.same_memory(given[place], size, stride, offset, dtype, device)


def _are_alike(result: Any, again: Any) -> bool:
    theirs, ours = tensors_in(result), tensors_in(again)
    # results may share a new storage with each other, which recipes do not make
    num_storages = [len({tensor.untyped_storage()._cdata for tensor in some}) for some in (theirs, ours)]
    return num_storages[0] == num_storages[1] and [*map(_described, theirs)] == [*map(_described, ours)]


def _described(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        _kind_of(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(),
        tensor.untyped_storage().nbytes(), tensor.requires_grad, vars(tensor),
    )  # fmt: skip
