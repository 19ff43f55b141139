"""Parameters of lazy modules, such as ``nn.LazyLinear``: on the simulated GPU they get memory with their shape.

A fake tensor cannot have the class of a parameter or buffer without a shape. So until the first forward such a tensor
is a real one, and its later device and dtype are recorded. On exit the modules are as they were.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import parameter as lazy
from torch.utils.weak import WeakTensorKeyDictionary

from .patches import Patch, applied

_KINDS: tuple[Any, ...] = (lazy.UninitializedParameter, lazy.UninitializedBuffer)
_MIXIN: Any = lazy.UninitializedTensorMixin  # type: ignore[attr-defined]


@contextlib.contextmanager
def shaped_on_gpu() -> Iterator[None]:
    """Inside, tensors without a shape get one on the device to which they were moved, or on which they were made."""
    apply: Any = torch.nn.Module._apply
    factories: Any = WeakTensorKeyDictionary()  # tensor without a shape -> its later device and dtype
    undo: list[Callable[[], None]] = []

    def maker(kind: Any) -> Callable[..., Any]:
        make = kind.__new__

        def made(cls: Any, *args: Any, device: Any = None, dtype: Any = None, **kwargs: Any) -> Any:
            tensor = make(cls, *args, device="cpu", dtype=dtype, **kwargs)
            factories[tensor] = {"device": device, "dtype": dtype}
            return tensor

        return made

    def moved(module: torch.nn.Module, move: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        members: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        found = [{name: each for name, each in some.items() if isinstance(each, _KINDS)} for some in members]
        if any(found):
            undo.append(_restore_of(module))
        for some, shapeless in zip(members, found, strict=True):
            for tensor in shapeless.values():
                like = move(torch.empty(0, **factories.get(tensor, {"dtype": tensor.dtype})))
                factories[tensor] = {"device": like.device, "dtype": like.dtype}
            some.update(dict.fromkeys(shapeless))
        apply(module, move, *args, **kwargs)
        for some, shapeless in zip(members, found, strict=True):
            some.update(shapeless)
        return module

    def shaped(tensor: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        factory = factories.get(tensor, {})
        data = torch.empty(shape, device=device or factory.get("device"), dtype=dtype or factory.get("dtype"))
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        torch.utils.swap_tensors(tensor, torch.nn.Parameter(data, tensor.requires_grad) if is_parameter else data)

    patches: list[Patch] = [
        *((kind, "__new__", maker(kind)) for kind in _KINDS),
        (_MIXIN, "materialize", shaped),
        (torch.nn.Module, "_apply", moved),
    ]
    try:
        with applied(patches):
            yield
    finally:
        for restore in reversed(undo):
            restore()


def _restore_of(module: torch.nn.Module) -> Callable[[], None]:
    """Return a function that makes a module lazy again: its class, its hooks, and its parameters without a shape."""
    now, kind = weakref.ref(module), type(module)
    before = {name: value.copy() if isinstance(value, dict) else value for name, value in vars(module).items()}

    def restore() -> None:
        if (module := now()) is not None:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(before)

    return restore
