"""Patches for simulated tensors whose memory is handed on past the dispatcher: copies of storages, and DLPack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.dlpack
from torch._subclasses.fake_tensor import FakeTensor

from .patches import Patch


def patches() -> list[Patch]:
    return [*_of_storages(), *_dlpack()]


def _of_storages() -> list[Patch]:
    storage = torch.UntypedStorage

    def copied(real: Callable[..., Any], device: str) -> Callable[..., Any]:
        """``storage.clone()`` and the like, whose new storage no operator makes."""

        def copy(one: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
            if one.device.type != "meta":
                return real(one, *args, **kwargs)
            return torch.empty(one.nbytes(), dtype=torch.uint8, device=device).untyped_storage()

        return copy

    def shared(real: Callable[..., Any]) -> Callable[..., Any]:
        """``share_memory_()``, which does nothing to memory of a GPU."""

        def share(one: torch.UntypedStorage) -> Any:
            return one if one.device.type == "meta" else real(one)

        return share

    return [
        (storage, "clone", copied(storage.clone, "cuda")),
        (storage, "cpu", copied(storage.cpu, "cpu")),
        (storage, "share_memory_", shared(storage.share_memory_)),
    ]


class _Capsule:
    """What stands for a DLPack capsule of a simulated tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _dlpack() -> list[Patch]:
    real_from: Callable[..., Any] = torch.utils.dlpack.from_dlpack
    real_to: Callable[..., Any] = torch.Tensor.__dlpack__

    def to_capsule(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, FakeTensor):
            return real_to(tensor, *args, **kwargs)
        if tensor.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        return _Capsule(tensor.clone() if kwargs.get("copy") else tensor.detach())

    def from_capsule(given: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(given, FakeTensor):
            given = to_capsule(given, **kwargs)
        return given.tensor if isinstance(given, _Capsule) else real_from(given, *args, **kwargs)

    modules = (torch, torch.utils.dlpack)
    return [
        (torch.Tensor, "__dlpack__", to_capsule),
        *((module, "to_dlpack", to_capsule) for module in modules if hasattr(module, "to_dlpack")),
        *((module, "from_dlpack", from_capsule) for module in modules),
    ]
