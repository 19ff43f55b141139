"""Runs one operator on fake tensors, by a cached recipe or in FakeTensorMode, and gives results CUDA's layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .attention import OUTPUTS_ON_CUDA
from .fake_result_cache import NOT_HANDLED, FakeResultCache, Recipe
from .gpus import GPU
from .hide_dispatch_modes import hide_python_key, show_python_key
from .peers import returned_argument
from .workspace import Call, storage_bytes
from .workspace.rules import tensors_in

aten = torch.ops.aten


def run_on_fakes(
    gpu: GPU,
    cache: FakeResultCache,
    operator: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: list[torch.Tensor],
) -> tuple[Any, Recipe | None]:
    """Run an operator and return its result, and the cached recipe for it or None. ``given`` are the tensors among its
    arguments."""
    key = cache.key_of(operator, args, kwargs)
    recipe = None if key is None else cache.get(key, operator, args)
    if recipe is not None:
        return recipe(cache, given), recipe
    cache.mode.cache_enabled = key is None  # one cache is enough: ours or FakeTensorMode's
    if cache.hides_modes:
        show_python_key(given)
    try:
        result = NOT_HANDLED if key is None else cache.new(operator, args, kwargs, given)
        if result is NOT_HANDLED:
            result = operator(*args, **kwargs)
        result = _as_on_cuda(Call(gpu, operator, args, kwargs, result))
    finally:
        if cache.hides_modes:
            hide_python_key(given)
    if cache.hides_modes:
        hide_python_key(tensors_in(result))
    if key is not None and key == cache.key_of(operator, args, kwargs):  # the operator changed no argument's shape
        recipe = cache.put(key, operator, given, result)
    return result, recipe


def _as_on_cuda(call: Call) -> Any:
    """The results of a call, with the GPU's storage sizes and layouts where fake kernels return others."""
    size = storage_bytes(call)
    if size is not None:
        call.outputs.untyped_storage().resize_(size)
    if (given := returned_argument(call.operator, call.args, call.kwargs)) is not None:
        return given
    change = _CHANGES.get(call.operator)
    return call.outputs if change is None else change(call)


def _with_contiguous_gradient(call: Call) -> Any:
    """Make the input's gradient contiguous, as CUDA does. The fake kernel copies the upstream gradient's layout."""
    gradient, *others = call.outputs
    if gradient is None or gradient.is_contiguous():
        return call.outputs
    return torch.empty_like(gradient, memory_format=torch.contiguous_format), *others


_CHANGES: dict[Any, Callable[[Call], Any]] = {
    **OUTPUTS_ON_CUDA,
    aten.native_layer_norm_backward.default: _with_contiguous_gradient,
    aten._fused_rms_norm_backward.default: _with_contiguous_gradient,
}
