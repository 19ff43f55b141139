"""Moves real weights to the simulated GPU and back. A parameter stays the same object, as optimizers refer to it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from .hide_dispatch_modes import moved_to
from .optimizers import remember_class
from .patches import Patch, applied


@contextlib.contextmanager
def weights_restored() -> Iterator[None]:
    """On exit, undo ``module.to(device)``, ``.half()``, ``x.data = ...`` and the like for real weights.

    On a GPU ``module.to(device)`` sets each parameter's data. A real tensor cannot take a fake tensor's data, so both
    tensors are swapped, and swapped back on exit. Buffers, gradients and optimizer states are put back too. Only real
    tensors, and weak references to modules, parameters and optimizers, are kept, so that what the step drops is freed.
    """
    apply = torch.nn.Module._apply
    data_of: Any = torch.Tensor.data  # a descriptor
    undo: list[Callable[[], None]] = []
    stepped = weakref.WeakSet[torch.optim.Optimizer]()

    def moved(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        is_real = any(map(_is_real, (*module._parameters.values(), *module._buffers.values())))
        if not is_real:
            return _applied_to_fakes(apply, module, *args, **kwargs)
        undo.append(_restore_of_module(module))
        with applied([(torch.__future__, "get_swap_module_params_on_conversion", lambda: True)]):
            return apply(module, *args, **kwargs)

    def swap(one: torch.Tensor, other: torch.Tensor) -> None:
        if _is_real(one):
            undo.append(_restore_of_swap(one, other))
        _swapped(one, other)

    def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
        if _is_real(tensor) == _is_real(data):
            if isinstance(tensor, FakeTensor) and tensor.fake_device != data.device:
                with moved_to(data.device, tensor, data):
                    data_of.__set__(tensor, data)
            else:
                data_of.__set__(tensor, data)
        elif isinstance(tensor, torch.nn.Parameter):
            swap(tensor, torch.nn.Parameter(data, tensor.requires_grad))
        else:
            swap(tensor, data.detach().requires_grad_(tensor.requires_grad))

    def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer not in stepped:
            stepped.add(optimizer)
            undo.append(_restore_of_optimizer(optimizer))

    hook = register_optimizer_step_pre_hook(before_step)
    patches: list[Patch] = [
        (torch.nn.Module, "_apply", moved),
        (torch.utils, "swap_tensors", swap),
        (torch.Tensor, "data", property(data_of.__get__, set_data)),
    ]
    try:
        with applied(patches):
            yield
    finally:
        hook.remove()
        for restore in reversed(undo):
            restore()


def _applied_to_fakes(
    apply: Callable[..., torch.nn.Module], module: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True
) -> torch.nn.Module:
    """Convert a module as torch does one of plain tensors: it sets their data, and swaps only fake tensors, which a
    graph would then go on to use under their old name."""
    future = torch.__future__
    on_meta = any(one is not None and one.device.type == "meta" for one in module._parameters.values())
    if on_meta or future.get_swap_module_params_on_conversion() or future.get_overwrite_module_params_on_conversion():
        return apply(module, fn, recurse)
    for child in module.children() if recurse else ():
        child._apply(fn)
    parameters = module._parameters
    for parameter in parameters.values():
        for tensor in () if parameter is None else (parameter, parameter.grad):
            if tensor is not None:
                with torch.no_grad():
                    made = fn(tensor)
                    if made.device.type == "meta":  # torch sets no data of another kind
                        return apply(module, fn, False)
                    tensor.data = made
    module._parameters = {}
    try:
        return apply(module, fn, False)
    finally:
        module._parameters = parameters


def _is_real(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and not isinstance(tensor, FakeTensor)


def _restore_of_module(module: torch.nn.Module) -> Callable[[], None]:
    """Return a function that puts back the buffers of a module and the gradients of its parameters."""
    module_now, buffers = weakref.ref(module), _without_fakes(module._buffers)
    gradients = [
        (weakref.ref(each), _same_later(each.grad)) for each in module._parameters.values() if each is not None
    ]

    def restore() -> None:
        for parameter_now, gradient_now in gradients:
            if (parameter := parameter_now()) is not None:
                parameter.grad = gradient_now()
        if (module := module_now()) is not None:
            _refill(module._buffers, buffers)

    return restore


def _same_later(gradient: torch.Tensor | None) -> Callable[[], torch.Tensor | None]:
    """Return a function that gives the gradient, or a tensor with its data if the gradient was freed meanwhile. Only
    a weak reference is kept, because a gradient that moves to the GPU must not stay alive there."""
    if gradient is None or not _is_real(gradient):
        return lambda: None
    with torch._C._DisableTorchDispatch():
        gradient_now, numbers = weakref.ref(gradient), gradient.detach()
    return lambda: numbers if (found := gradient_now()) is None else found


def _restore_of_swap(one: torch.Tensor, other: torch.Tensor) -> Callable[[], None]:
    """Return a function that swaps the tensors back. It keeps ``other`` alive, which gets the real data."""
    one_now = weakref.ref(one)

    def restore() -> None:
        if (one := one_now()) is not None:
            _swapped(one, other)

    return restore


def _restore_of_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that puts back the state of an optimizer. It keeps no tensor of the simulated GPU: those of an
    optimizer that resumed from a state dict must be freed with it."""
    optimizer_now = weakref.ref(optimizer)
    state = [
        (_weakly(key), _without_fakes(held) if isinstance(held, dict) else held)
        for key, held in optimizer.state.items()
        if isinstance(held, dict) or not _has_fakes(held)
    ]

    def restore() -> None:
        if (optimizer := optimizer_now()) is None:
            return
        now, before = dict(optimizer.state), {key: values for found, values in state if (key := found()) is not None}
        for key, values in before.items():
            if isinstance(held := now.get(key), dict) and isinstance(values, dict):
                _refill(held, values)
                before[key] = held
        _refill(optimizer.state, before)

    return restore


def _weakly(key: Any) -> Callable[[], Any]:
    """A function that returns the key of an optimizer's state, or None if it was a tensor that was freed."""
    return weakref.ref(key) if isinstance(key, torch.Tensor) else lambda: key


def _without_fakes(held: dict[Any, Any]) -> dict[Any, Any]:
    """The values without fake tensors, with copies of lists and dicts, which a step may extend."""
    return {key: tree_map(lambda value: value, value) for key, value in held.items() if not _has_fakes(value)}


def _has_fakes(value: Any) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(value))


def _refill(held: dict[Any, Any], before: dict[Any, Any]) -> None:
    held.clear()
    held.update(before)


def _swapped(one: torch.Tensor, other: torch.Tensor) -> None:
    """Swap two tensors like ``torch.utils.swap_tensors``, but allow weak references, which every fake tensor has."""
    kinds = type(one), type(other)
    for name in ("__class__", "__dict__"):
        value = getattr(one, name)
        setattr(one, name, getattr(other, name))
        setattr(other, name, value)
    torch._C._swap_tensor_impl(one, other)
    for tensor, kind in zip((one, other), kinds, strict=True):
        remember_class(tensor, kind)
