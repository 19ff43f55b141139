"""Patches for Python code in torch and Triton that does not take CUDA's path for a fake tensor: code that checks a
tensor's type, reads its values, traces or scripts a function, or launches a kernel.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.optim.optimizer
import torch.utils._foreach_utils
import torch.utils.data.dataloader
from torch import _meta_registrations
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from ...cuda_kernels import CudaKernel
from . import watched_numbers
from .kernel_writes import written_arguments
from .launches import Launch
from .patches import Patch, nothing
from .tracking import StorageTracker
from .watched_numbers import watching
from .workspace.memory_formats import suggested_format

_MOST_IN_AN_ARRAY, _MOST_IN_A_LIST = 1 << 30, 32 << 20
"""The bytes of a tensor of unknown values up to which Python code can read it whole. A list takes eight times more."""


def patches(tracker: StorageTracker) -> list[Patch]:
    return [
        *_by_type(), *_layers(tracker), *_data_loading(), *_scripted(tracker), *_sharding_inference(), *_sent_objects(),
        *_reducer(), *_triton(tracker), *_cuda_kernels(tracker), *watched_numbers.patches(tracker.answers.outcomes),
    ]  # fmt: skip


def hidden_from_compilers(tracker: StorageTracker) -> list[Patch]:
    """The patches that would mislead a compiler, and are suspended while one runs."""
    return [(torch._subclasses, "FakeTensor", _NoFakeTensor), *_by_value(tracker), *_einsum(tracker), *_traced(tracker)]


def _by_type() -> list[Patch]:
    """Patch code that checks the class of a tensor."""
    holders = (sys.modules["torch.optim.optimizer"], sys.modules["torch.utils._foreach_utils"])
    known: list[Any] = [module for module in holders if hasattr(module, "_foreach_supported_types")]
    return [
        (fake_tensor, "init_gpu_context", nothing),
        (fake_tensor, "run_fallback_kernel", _no_real_tensors),
        *((m, "_foreach_supported_types", [*m._foreach_supported_types, FakeTensor]) for m in known),
        (torch.Tensor, "type", _cast_to_old_type(torch.Tensor.type)),
        (torch.Tensor, "pin_memory", lambda tensor, *args, **kwargs: tensor),  # host memory is not counted
    ]


def _cast_to_old_type(real: Callable[..., Any]) -> Callable[..., Any]:
    """``tensor.type`` that takes ``torch.cuda.HalfTensor`` and its name too, which a build without CUDA lacks."""

    def cast(tensor: torch.Tensor, kind: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(kind, str) and kind.startswith("torch.cuda."):
            kind = getattr(torch.cuda, kind.removeprefix("torch.cuda."), kind)
        if isinstance(dtype := getattr(kind, "dtype", None), torch.dtype):
            return tensor.to("cuda", dtype, *args, **kwargs)
        return real(tensor, kind, *args, **kwargs)

    return cast


def _by_value(tracker: StorageTracker) -> list[Patch]:
    """Patch code that reads values."""
    real_text: Callable[..., str] = torch._tensor_str._str
    real_numpy, real_list, real_format = torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__format__

    def printed(tensor: Any, **kwargs: Any) -> str:
        if not isinstance(tensor, FakeTensor):
            with torch._C._DisableTorchDispatch():
                return real_text(tensor, **kwargs)
        tracker.note("a tensor is printed, and what formatting it takes on a GPU is not known")
        return f"tensor(..., size={tuple(tensor.shape)}, dtype={tensor.dtype}, device='{tensor.device}')"

    def numpy(tensor: torch.Tensor, *, force: bool = False) -> Any:
        needs_grad = torch.is_grad_enabled() and tensor.requires_grad
        is_torchs_error = not force and (tensor.device.type != "cpu" or needs_grad)
        if not isinstance(tensor, FakeTensor) or is_torchs_error:
            return real_numpy(tensor, force=force)
        value = tracker.values_read(tensor, _MOST_IN_AN_ARRAY)
        if value is None:
            raise fake_tensor.DataDependentOutputException("Tensor.numpy")  # type: ignore[arg-type]
        with torch._C._DisableTorchDispatch():
            return real_numpy(value)

    def tolist(tensor: torch.Tensor) -> Any:
        value = tracker.values_read(tensor, _MOST_IN_A_LIST)
        if value is None:
            raise fake_tensor.DataDependentOutputException("Tensor.tolist")  # type: ignore[arg-type]
        with torch._C._DisableTorchDispatch():
            return real_list(value)

    def formatted(tensor: torch.Tensor, spec: str) -> str:
        is_number = isinstance(tensor, FakeTensor) and tensor.dim() == 0
        return format(tensor.item(), spec) if is_number else real_format(tensor, spec)

    def of_list(real: Callable[..., Any]) -> Callable[..., Any]:
        def make(data: Any, *args: Any, **kwargs: Any) -> Any:
            leaves = [*_leaves(data)] if isinstance(data, (list, tuple)) else []
            if not any(isinstance(leaf, FakeTensor) for leaf in leaves):
                return real(data, *args, **kwargs)
            kinds = (leaf.dtype if isinstance(leaf, torch.Tensor) else real(leaf).dtype for leaf in leaves)
            if kwargs.get("dtype") is None and not args:
                kwargs["dtype"] = functools.reduce(torch.promote_types, kinds)
            return real(_numbers(data), *args, **kwargs)

        return make

    return [
        *((torch, name, of_list(getattr(torch, name))) for name in ("tensor", "as_tensor")),
        (torch._tensor_str, "_str", printed),
        (torch.Tensor, "numpy", numpy),
        (torch.Tensor, "__format__", formatted),
        (FakeTensor, "tolist", watching(tolist, tracker.is_assumed)),
        (torch.Tensor, "item", watching(torch.Tensor.item, tracker.is_assumed)),
        (logging.getLogger(fake_tensor.__name__), "disabled", True),  # it logs errors that are raised anyway
        (torch.nn.init, "_no_grad_trunc_normal_", _filled),  # redraws until all values are within bounds
    ]


def _leaves(data: Any) -> Iterator[Any]:
    for one in data:
        yield from _leaves(one) if isinstance(one, (list, tuple)) else (one,)


def _numbers(data: Any) -> Any:
    """Nested lists in which each fake tensor is replaced by its numbers, which torch reads one by one in C++."""
    if isinstance(data, (list, tuple)):
        return [_numbers(one) for one in data]
    return data.tolist() if isinstance(data, FakeTensor) else data


def _layers(tracker: StorageTracker) -> list[Patch]:
    """Patch functions whose code path depends on the machine (RNNs, convolution layouts), and ``record_stream``."""

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        tracker.record_stream(tensor)

    def recurrent(name: str) -> Callable[..., Any]:
        real = getattr(torch._VF, name)

        def run(*args: Any) -> Any:
            if not torch.backends.cudnn.enabled:
                return real(*args)
            tracker.note(f"{name}: cuDNN runs it on a GPU, in buffers of its own; here it is a loop over the steps")
            with torch.backends.cudnn.flags(enabled=False):
                return real(*args)

        return run

    real_check = _meta_registrations.rnn_cell_checkSizes

    def check_sizes_of_cell(*given: Any) -> None:
        """Torch's check, which fails for a cell without biases in torch 2.13."""
        if None not in given:
            real_check(*given)

    real_format = torch._C._conv_determine_backend_memory_format

    def format_of_convolution(image: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
        """The memory format that cuDNN chooses: channels last if the image or the weight has it."""
        by_cudnn = image.device.type == "cuda" and torch.backends.cudnn.enabled and backend.name.startswith("Slow")
        if not by_cudnn or image.dtype == torch.float64:
            return real_format(image, weight, backend)
        last = torch.channels_last if weight.dim() == 4 else torch.channels_last_3d
        return last if last in (suggested_format(image), suggested_format(weight)) else torch.contiguous_format

    return [
        (torch._C, "_conv_determine_backend_memory_format", format_of_convolution),
        (_meta_registrations, "rnn_cell_checkSizes", check_sizes_of_cell),
        *((torch._VF, name, recurrent(name)) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
        (torch.Tensor, "record_stream", record_stream),
    ]


def _einsum(tracker: StorageTracker) -> list[Patch]:
    real_einsum = torch.functional.einsum

    def einsum(*args: Any) -> Any:
        given = args[-1] if len(args) == 2 and isinstance(args[-1], (list, tuple)) else args
        num_operands = sum(isinstance(operand, torch.Tensor) for operand in given)
        if num_operands > 2 and not torch.backends.opt_einsum.is_available():
            tracker.note("einsum of three or more: contracted from left to right, as opt_einsum is not installed here")
        return real_einsum(*args)

    return [(torch.functional, "einsum", einsum), (torch, "einsum", einsum)]


def _data_loading() -> list[Patch]:
    """Load data in this process: a DataLoader's worker processes could not send fake tensors, and host memory is not
    counted."""
    data = torch.utils.data.dataloader

    def iterator(loader: Any) -> Any:
        given, loader.num_workers = (loader.num_workers, loader.timeout), 0
        loader.timeout = 0
        try:
            return data._SingleProcessDataLoaderIter(loader)
        finally:
            loader.num_workers, loader.timeout = given

    return [(data.DataLoader, "_get_iterator", iterator)]


def _scripted(tracker: StorageTracker) -> list[Patch]:
    """Run TorchScript operator by operator, with a note. On a machine with a GPU, its compiler would launch fused
    kernels past the dispatcher, on memory that fake tensors lack. Kernels compiled before the step are dropped too."""

    def interpreted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(code: Any, *args: Any, **kwargs: Any) -> Any:
            tracker.note("TorchScript ran operator by operator: which of them its compiler fuses on a GPU is not known")
            code._debug_flush_compilation_cache()
            with torch.jit.optimized_execution(False):
                return real(code, *args, **kwargs)

        return call

    kinds = (torch._C.ScriptFunction, torch._C.ScriptMethod)
    return [(kind, "__call__", interpreted(kind.__call__)) for kind in kinds]


def _traced(tracker: StorageTracker) -> list[Patch]:
    """Add a note if ``make_fx`` traces a region, as ``torch.func.linearize`` does: tracing runs it an extra time."""
    proxy_tensor = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if proxy_tensor is None:
        return []
    real: Callable[..., Any] = proxy_tensor._MakefxTracer.trace

    def trace(tracer: Any, *args: Any) -> Any:
        tracker.note("a region is traced by make_fx, and what the tracer keeps is not known")
        return real(tracer, *args)

    return [(proxy_tensor._MakefxTracer, "trace", trace)]


def _sharding_inference() -> list[Patch]:
    """Keep DTensor's shape inference out of the count: it runs operators on fake tensors of the unsharded sizes."""
    sharding = sys.modules.get("torch.distributed.tensor._sharding_prop")
    if sharding is None:
        return []
    propagator = sharding.ShardingPropagator
    real: Callable[..., Any] = propagator._propagate_tensor_meta_non_cached

    def propagate(*args: Any) -> Any:
        with _disable_current_modes():
            return real(*args)

    return [(propagator, "_propagate_tensor_meta_non_cached", propagate)]


def _sent_objects() -> list[Patch]:
    """Give a pickled object that ranks exchange a tensor with known values."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None:
        return []

    def to_tensor(sent: Any, device: Any, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pickled = torch.tensor(list(pickle.dumps(sent)), dtype=torch.uint8)
        return pickled.to(device), torch.tensor([pickled.numel()]).to(device)

    return [(distributed, "_object_to_tensor", to_tensor)]


def _reducer() -> list[Patch]:
    """Keep the reducer of DistributedDataParallel from timing its first steps by events of a real GPU."""
    reducer = getattr(sys.modules.get("torch.distributed"), "Reducer", None)
    return [] if reducer is None else [(reducer, "prepare_for_forward", nothing)]


def _triton(tracker: StorageTracker) -> list[Patch]:
    """Skip Triton kernels. A launch allocates nothing: outputs and scratch buffers are tensors that exist before it."""
    if importlib.util.find_spec("triton") is None:
        return []
    from triton.runtime import autotuner, jit

    def launch(kernel: Any, *arguments: Any, **options: Any) -> None:
        tracker.values.forget_written(written_arguments(kernel, arguments, options))
        if tracker.launches is not None:
            tracker.launches.append(Launch.of(kernel, arguments, options))

    launchers: list[tuple[Any, str]] = [(jit.JITFunction, "run")]
    launchers += [(autotuner.Autotuner, "run"), (autotuner.Heuristics, "run")]
    if interpreter := sys.modules.get("triton.runtime.interpreter"):  # TRITON_INTERPRET=1
        interpreted = interpreter.InterpretedFunction
        has_run = hasattr(interpreted, "run")  # before Triton 3.6 the class has no run
        launchers.append((interpreted, "run") if has_run else (interpreter.GridExecutor, "__call__"))
    return [(launcher, name, launch) for launcher, name in launchers]


def _cuda_kernels(tracker: StorageTracker) -> list[Patch]:
    """Skip memfix's CUDA kernels, whose launch allocates nothing either, but check their arguments."""

    def launch(kernel: CudaKernel, grid: Any, block: Any, *arguments: Any, shared_bytes: int = 0) -> None:
        kernel.as_numbers(arguments, address_of=lambda _: 0)
        tracker.values.forget_written(kernel.written(arguments))
        if tracker.launches is not None:
            tracker.launches.append(Launch(kernel, (), {"shared_bytes": shared_bytes}))

    return [(CudaKernel, "launch", launch)]


def _no_real_tensors(fake_mode: Any, operator: Any, *args: Any) -> Any:
    """Replace torch's fallback, which runs an operator without a fake kernel on real tensors."""
    raise fake_tensor.UnsupportedOperatorException(operator)


def _filled(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return tensor.normal_()


class _NoFakeTensor:
    """A stand-in for ``FakeTensor`` in libraries that detect tracing by ``isinstance``: no tensor is an instance."""
