"""What torch says while the GPU is simulated: answers of ``torch.cuda``, and checks by which Python code chooses
its path, all as on the GPU described. ``patched`` puts everything back.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.optim.optimizer
import torch.utils._foreach_utils
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor

from .gpus import GPU
from .tracking import StorageTracker

_Patch = tuple[Any, str, Any]


@contextlib.contextmanager
def patched(gpu: GPU, tracker: StorageTracker) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            *_cuda(gpu),
            *_paths(tracker),
            *_memory(tracker),
            *_compiled(tracker),
            *_traced(tracker),
            *_triton(),
        ):
            if hasattr(owner, name):  # not every torch has every one
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
        yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _cuda(gpu: GPU) -> list[_Patch]:
    cuda = torch.cuda
    silent = """synchronize empty_cache ipc_collect init _lazy_init set_device set_stream manual_seed manual_seed_all
    seed seed_all set_rng_state set_rng_state_all reset_accumulated_memory_stats""".split()
    stream = _Stream()
    return [
        (fake_tensor, "init_gpu_context", _nothing),
        (fake_tensor, "run_fallback_kernel", _no_real_tensors),
        (cuda.random, "_lazy_init", _nothing),
        (cuda, "initial_seed", _always(0)),
        *((cuda, name, _nothing) for name in silent),
        (cuda, "is_available", _always(True)),
        (cuda, "is_initialized", _always(True)),
        (cuda, "device_count", _always(1)),
        (cuda, "current_device", _always(0)),
        (cuda, "_exchange_device", _always(0)),
        (cuda, "_maybe_exchange_device", _always(0)),
        (cuda, "get_device_capability", _always(gpu.capability)),
        (cuda, "get_device_name", _always(f"NVIDIA {gpu.name} (simulated)")),
        (cuda, "get_device_properties", _always(_Properties(gpu))),
        (cuda, "get_rng_state", lambda *a, **k: torch.zeros(16, dtype=torch.uint8)),
        (cuda, "is_bf16_supported", _always(gpu.capability >= (8, 0))),
        (cuda, "is_tf32_supported", _always(gpu.capability >= (8, 0))),
        (cuda, "is_current_stream_capturing", _always(False)),
        (cuda, "current_stream", _always(stream)),
        (cuda, "default_stream", _always(stream)),
        (cuda, "stream", lambda stream: contextlib.nullcontext()),
        (cuda, "Stream", _Stream),
        (cuda, "Event", _Event),
        (torch, "Generator", _Generator),
        *((cuda.nvtx, name, _nothing) for name in ("range_push", "range_pop", "range_start", "range_end", "mark")),
    ]


def _memory(tracker: StorageTracker) -> list[_Patch]:
    """Questions about memory, answered from the ledger; and one method that does not pass the dispatcher."""
    cuda, ledger = torch.cuda, tracker.ledger
    total = tracker.gpu.memory_bytes
    real_resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = real_resize(storage, size)
        tracker.resized(storage)
        return result

    def stats(*args: Any, **kwargs: Any) -> dict[str, int]:
        return {
            f"{name}_bytes.all.{word}": getattr(mark, field)
            for name, mark in (("requested", ledger.requested), ("allocated", ledger.allocated))
            for word, field in (("current", "live"), ("peak", "peak"))
        }

    answers = {
        "memory_stats": stats,
        "memory_summary": _always("simulated by memfix"),
        "mem_get_info": lambda *a, **k: (total - ledger.allocated.live, total),
        "memory_allocated": lambda *a, **k: ledger.allocated.live,
        "max_memory_allocated": lambda *a, **k: ledger.allocated.peak,
        "memory_reserved": lambda *a, **k: ledger.allocated.live,
        "max_memory_reserved": lambda *a, **k: ledger.allocated.peak,
        "reset_peak_memory_stats": _nothing,  # the reading's own peak must not be lost
    }
    return [
        *((module, name, answer) for module in (cuda, cuda.memory) for name, answer in answers.items()),
        (torch.UntypedStorage, "resize_", resize_),
    ]


def _paths(tracker: StorageTracker) -> list[_Patch]:
    """Python code that asks for a tensor's type or values, and would leave CUDA's path for a fake one."""
    real_einsum = torch.functional.einsum

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        tracker.note("record_stream: memory is taken to be free once unreferenced, not when the other stream is done")

    def printed(tensor: Any, **kwargs: Any) -> str:
        tracker.note("a tensor is printed, and what formatting it takes on a GPU is not known")
        return f"tensor(..., size={tuple(tensor.shape)}, dtype={tensor.dtype}, device='{tensor.device}')"

    def step_if_finite(scaler: Any, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        tracker.note("GradScaler: assumed that no gradient overflowed")
        return optimizer.step(*args, **kwargs)

    def einsum(*args: Any) -> Any:
        given = args[-1] if len(args) == 2 and isinstance(args[-1], (list, tuple)) else args
        if (
            sum(isinstance(operand, torch.Tensor) for operand in given) > 2
            and not torch.backends.opt_einsum.is_available()
        ):
            tracker.note("einsum of three or more: contracted from left to right, as opt_einsum is not installed here")
        return real_einsum(*args)

    real_numpy, real_format = torch.Tensor.numpy, torch.Tensor.__format__

    def numpy(tensor: torch.Tensor, *, force: bool = False) -> Any:
        constant = getattr(tensor, "constant", None)
        needs_grad = torch.is_grad_enabled() and tensor.requires_grad
        is_torchs_error = not force and (tensor.device.type != "cpu" or needs_grad)
        if isinstance(tensor, FakeTensor) and constant is None and not is_torchs_error:
            raise fake_tensor.DataDependentOutputException("Tensor.numpy")  # type: ignore[arg-type]
        return real_numpy(tensor if constant is None else constant, force=force)

    def formatted(tensor: torch.Tensor, spec: str) -> str:
        is_number = isinstance(tensor, FakeTensor) and tensor.dim() == 0
        return format(tensor.item(), spec) if is_number else real_format(tensor, spec)

    holders = (sys.modules["torch.optim.optimizer"], sys.modules["torch.utils._foreach_utils"])
    known: list[Any] = [module for module in holders if hasattr(module, "_foreach_supported_types")]

    def recurrent(name: str) -> Callable[..., Any]:
        real = getattr(torch._VF, name)

        def run(*args: Any) -> Any:
            if not torch.backends.cudnn.enabled:
                return real(*args)
            tracker.note(f"{name}: cuDNN runs it on a GPU, in buffers of its own; here it is a loop over the steps")
            with torch.backends.cudnn.flags(enabled=False):
                return real(*args)

        return run

    return [
        *((torch._VF, name, recurrent(name)) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
        (torch._subclasses, "FakeTensor", _NotOurs),
        *((m, "_foreach_supported_types", [*m._foreach_supported_types, FakeTensor]) for m in known),
        (torch.utils, "swap_tensors", _swap_tensors),
        (torch.Tensor, "record_stream", record_stream),
        (torch._tensor_str, "_str", printed),
        (torch.Tensor, "numpy", numpy),
        (torch.Tensor, "__format__", formatted),
        (torch.Tensor, "pin_memory", lambda tensor, *args, **kwargs: tensor),  # memory of the host is not counted
        (torch.amp.GradScaler, "_maybe_opt_step", step_if_finite),
        (torch.nn.init, "_no_grad_trunc_normal_", _filled),  # draws again what lies outside, until nothing does
        (torch.functional, "einsum", einsum),
        (torch, "einsum", einsum),
    ]


def _compiled(tracker: StorageTracker) -> list[_Patch]:
    """A compiled region runs eager here, since Inductor cannot be simulated; the reading says so."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None:
        return []
    real: Callable[..., Any] = eval_frame._callback_from_stance

    def from_stance(callback: Any) -> Any:
        if not callable(callback):
            return real(callback)
        tracker.note("a region under torch.compile ran eager: what Inductor would allocate is not known")
        return None

    return [(eval_frame, "_callback_from_stance", from_stance)]


def _traced(tracker: StorageTracker) -> list[_Patch]:
    """A region that ``make_fx`` traces, as ``torch.func.linearize`` does, runs once more than it says."""
    proxy_tensor = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if proxy_tensor is None:
        return []
    real: Callable[..., Any] = proxy_tensor._MakefxTracer.trace

    def trace(tracer: Any, *args: Any) -> Any:
        tracker.note("a region is traced by make_fx, and what the tracer keeps is not known")
        return real(tracer, *args)

    return [(proxy_tensor._MakefxTracer, "trace", trace)]


def _no_real_tensors(fake_mode: Any, operator: Any, *args: Any) -> Any:
    """Without a fake of its own torch would try the operator on real tensors."""
    raise fake_tensor.UnsupportedOperatorException(operator)


def _triton() -> list[_Patch]:
    """A Triton launch allocates nothing by itself: its results and scratch are tensors made before it."""
    if importlib.util.find_spec("triton") is None:
        return []
    from triton.runtime import autotuner, jit

    launchers = (jit.JITFunction, autotuner.Autotuner, autotuner.Heuristics)
    return [(launcher, "run", _nothing) for launcher in launchers]


def _filled(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return tensor.normal_()


def _swap_tensors(one: torch.Tensor, other: torch.Tensor) -> None:
    """As torch's own, without its check for weak references: fake tensors always have one."""
    for name in ("__class__", "__dict__"):
        value = getattr(one, name)
        setattr(one, name, getattr(other, name))
        setattr(other, name, value)
    torch._C._swap_tensor_impl(one, other)


class _NotOurs:
    """What libraries find where they look for fake tensors, by which they would think that they are traced."""


class _Stream:
    """Does nothing, in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.cuda_stream = self.stream_id = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exception: Any) -> None:
        return None

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Event(_Stream):
    def elapsed_time(self, end_event: Any) -> float:
        return 1.0


class _AnyGenerator(type(torch.Generator)):  # type: ignore[misc]
    """Generators made before the simulation are generators too."""

    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, torch._C.Generator)


class _Generator(torch.Generator, metaclass=_AnyGenerator):
    """A CUDA generator where no CUDA is: fake tensors draw no numbers from it."""

    _device: torch.device

    def __new__(cls, device: Any = "cpu") -> Any:
        made = super().__new__(cls, device="cpu")  # type: ignore[call-arg]
        made._device = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device


class _Properties:
    """The fields of ``torch.cuda.get_device_properties`` by which libraries choose their kernels."""

    def __init__(self, gpu: GPU) -> None:
        self.name = f"NVIDIA {gpu.name} (simulated)"
        self.major, self.minor = gpu.capability
        self.multi_processor_count = gpu.multiprocessors
        self.max_threads_per_multi_processor = gpu.threads_per_multiprocessor
        self.total_memory = gpu.memory_bytes
        self.shared_memory_per_block_optin = gpu.shared_memory_bytes
        self.L2_cache_size = gpu.l2_bytes
        self.regs_per_multiprocessor = 65536
        self.warp_size = 32
        self.is_integrated = self.is_multi_gpu_board = 0
        self.gcnArchName = ""
