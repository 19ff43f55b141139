"""Patches that let Dynamo and Inductor compile for the simulated GPU, without a device and without timing kernels."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..patches import Patch, Patches, always, nothing
from ..storages import is_on_gpu
from ..triton_driver import TritonDriver
from ..workspace.rules import tensors_in
from . import generated_code
from .compilation import Compilation
from .generated_code import Kernel
from .process_state import cache_folder

Compiling = Callable[[], contextlib.AbstractContextManager[None]]

_OVERRIDES = {
    "compile_threads": 1,
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "autotune_local_cache": False,
    "autotune_remote_cache": False,
    "bundled_autotune_remote_cache": False,
    "triton.autotune_at_compile_time": False,
    "cpp.vec_isa_ok": False,  # else Inductor runs the C++ compiler to test it
}
_TIMED = "torch.compile with max-autotune: kernels are chosen by timing them, measured as without it"
_DOUBTFUL = {
    "triton.cudagraphs": "torch.compile with CUDA graphs: measured as without them, and without their memory pools",
    "max_autotune": _TIMED,
    "max_autotune_gemm": _TIMED,
    "coordinate_descent_tuning": _TIMED,
    "cpp_wrapper": "torch.compile with cpp_wrapper: measured with Inductor's wrapper in Python",
}
"""Settings of Inductor that are switched off -> the note for a step that has them on."""
DYNAMIC = "torch.compile with dynamic sizes: one code for all sizes, counted at those of the step"
PADDED = "Inductor pads the operands of a product if a timing says so: assumed that it does"

_SAME_NAME = """current_device set_device device_count stream current_stream set_stream synchronize
get_device_properties memory_allocated is_bf16_supported""".split()
_OTHER_NAME = {"exchange_device": "_exchange_device", "maybe_exchange_device": "_maybe_exchange_device"}


def load() -> None:
    """Import the compilers and fill Dynamo's tables, which must not see the stubs of the simulated GPU."""
    import torch._functorch.aot_autograd
    import torch._inductor.async_compile
    import torch._inductor.codegen.cuda.device_op_overrides
    import torch._inductor.compile_fx
    import torch._inductor.fx_passes.pad_mm
    import torch._inductor.select_algorithm  # noqa: F401
    from torch._dynamo.device_interface import get_interface_for_device
    from torch._dynamo.trace_rules import get_torch_obj_rule_map

    get_torch_obj_rule_map()
    get_interface_for_device("cuda")


@contextlib.contextmanager
def settings(folder: str) -> Iterator[None]:
    """Inside, the compilers read and write no cache on disk and start no other processes."""
    import torch._dynamo.config as of_dynamo
    import torch._functorch.config as of_autograd
    import torch._inductor.config as of_inductor

    with (
        cache_folder(folder),
        warnings.catch_warnings(),
        of_inductor.patch({**_known(of_inductor, _OVERRIDES), **dict.fromkeys(_known(of_inductor, _DOUBTFUL), False)}),
        of_autograd.patch(_known(of_autograd, {"enable_autograd_cache": False, "enable_remote_autograd_cache": False})),
        of_dynamo.patch(
            _known(of_dynamo, {"automatic_dynamic_local_pgo": False, "automatic_dynamic_remote_pgo": False})
        ),
    ):
        warnings.simplefilter("ignore")
        yield


def _known(config: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The settings among ``values`` that this version of torch has."""
    return {name: value for name, value in values.items() if name in config._config}


def while_compiling(compilation: Compilation, compiling: Compiling) -> list[Patch]:
    """The patches of the compilers, to be applied while they run; inside ``compiling()`` they do."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides
    from torch._inductor.constant_folding import ConstantFolder
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
    from triton.runtime import driver

    cuda, guards = torch.cuda, torch._C._dynamo.guards
    names = {**dict(zip(_SAME_NAME, _SAME_NAME, strict=True)), **_OTHER_NAME}
    return [
        (FakeTensorMode, "avoid_device_init", property(always(True))),
        (proxy_tensor, "CONSTANT_NUMEL_LIMIT", -1),  # else make_fx computes with small constants on the GPU
        *((CudaInterface, name, staticmethod(getattr(cuda, theirs))) for name, theirs in names.items()),
        (CudaInterface, "get_raw_stream", staticmethod(always(0))),
        (CUDADeviceOpOverrides, "import_get_raw_stream_as", lambda _, name: f"{name} = lambda index: 0"),
        (AsyncCompile, "triton", lambda _, name, source, **_where: Kernel(name, source, compilation.tracker)),
        (AsyncCompile, "cpp_pybinding", always(nothing)),
        (guards, "_empty_strided_cpu", generated_code.empty_strided_cpu(compilation.tracker)),
        (guards, "_empty_strided_cuda", generated_code.empty_strided),
        (guards, "_reinterpret_tensor", generated_code.reinterpret_tensor(compilation.tracker)),
        (guards, "assert_alignment", always(None)),
        (guards, "copy_if_misaligned", generated_code.copy_if_misaligned),
        (pad_mm, "_should_pad", _pads(compilation)),
        *(
            (folder, "_deduce_value", _on_cpu(folder._deduce_value))
            for folder in (ConstantFolder, UniformValueConstantFolder)
        ),
        *_optimizers(compilation),
        *_guards(compilation),
        (torch._inductor.compile_fx, "compile_fx", _compile_fx(compilation, compiling)),
        (driver, "_active", TritonDriver(compilation.tracker.gpu)),
    ]


def while_running(compilation: Compilation) -> list[Patch]:
    """The patches for running compiled code, active from the first compilation to the end of the simulation."""
    from torch._inductor import compile_fx, utils
    from torch._inductor.output_code import CompiledFxGraph

    real: Callable[..., Any] = CompiledFxGraph.__call__

    def call(graph: Any, inputs: Any) -> Any:
        return compilation.run(real, graph, inputs)

    return [
        (CompiledFxGraph, "__call__", call),
        *((m, "copy_misaligned_inputs", generated_code.copy_misaligned_inputs) for m in (utils, compile_fx)),
        *_without_rng_state(compilation),
    ]


def _without_rng_state(compilation: Compilation) -> list[Patch]:
    """Run an operator that a checkpoint recomputes without restoring the RNG state, which takes no GPU memory."""
    from torch._prims import rng_prims

    operator = getattr(rng_prims, "graphsafe_run_with_rng_state", None)
    if operator is None:
        return []
    real: Callable[..., Any] = type(operator).__call__

    def call(wrapper: Any, inner: Any, *args: Any, rng_state: Any = None, **kwargs: Any) -> Any:
        if compilation.is_running:
            return real(wrapper, inner, *args, rng_state=rng_state, **kwargs)
        return inner(*args, **kwargs)

    return [(type(operator), "__call__", call)]


def _compile_fx(compilation: Compilation, compiling: Compiling) -> Callable[..., Any]:
    """Return a wrapper of Inductor's entry point that switches off, with notes, the settings that are not simulated."""
    import torch._inductor.config as config
    from torch._inductor import compile_fx

    real: Callable[..., Any] = compile_fx.compile_fx
    real_inner: Callable[..., Any] = compile_fx.compile_fx_inner

    def inner(module: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_other_devices(module)
        if compilation.is_running:
            return real_inner(module, *args, **kwargs)
        with compiling():  # a backward is compiled when it first runs
            return compilation.run(real_inner, module, *args, **kwargs)

    def compile_for_simulation(module: Any, inputs: Any, *args: Any, config_patches: Any = None, **kwargs: Any) -> Any:
        given = dict(config_patches or {})
        if any(isinstance(value, torch.SymInt) for value in inputs):
            compilation.doubts[DYNAMIC] = None
        for name, doubt in _known(config, _DOUBTFUL).items():
            if given.get(name, compilation.user_settings.get(name)):
                compilation.doubts[doubt] = None
            given.pop(name, None)
        kwargs.setdefault("inner_compile", inner)
        return real(module, inputs, *args, config_patches=given or None, **kwargs)

    return compile_for_simulation


def _refuse_other_devices(module: Any) -> None:
    """Raise if a graph uses a second GPU, or computes on the CPU, for which Inductor would generate C++.

    The region then runs eagerly. Operators on constants are allowed, because constants begin on the CPU.
    """
    for node in module.graph.nodes:
        for tensor in tensors_in(node.meta.get("val")):
            is_on_gpu(tensor)
            of_constants = all(node_input.op == "get_attr" for node_input in node.all_input_nodes)
            if node.op == "call_function" and tensor.device.type == "cpu" and not of_constants:
                raise NotImplementedError(f"{node.target} computes on the CPU")


def doubtful_settings() -> dict[str, Any]:
    """The user's process-wide values of the settings in ``_DOUBTFUL``."""
    import torch._inductor.config as config

    return {name: _setting(config, name) for name in _known(config, _DOUBTFUL)}


def _setting(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


def _pads(compilation: Compilation) -> Callable[..., bool]:
    """Return a replacement for ``pad_mm._should_pad``, which decides by timing the product with and without padding."""
    import torch._inductor.config as config
    from torch._inductor.fx_passes import pad_mm

    def should_pad(match: Any, left: Any, right: Any, operator: Any, added: Any = None) -> bool:
        rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
        if config.force_shape_pad:
            return True
        try:
            if not pad_mm.is_mm_compute_bound(int(rows), int(inner), int(columns), left.dtype):
                return False
        except Exception:  # symbolic sizes without a hint
            return False
        compilation.assumed[PADDED] = None
        return compilation.tracker.answers.scenario != "least"

    return should_pad


def _on_cpu(deduce: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Inductor's evaluation of one-element constants, to run it on the CPU instead of their device."""

    def deduce_on_cpu(*args: Any) -> Any:
        with _OnCpu():
            return deduce(*args)

    return deduce_on_cpu


class _OnCpu(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(kwargs.get("device"), "type", None) == "cuda":
            kwargs["device"] = torch.device("cpu")
        if func is torch.ops.prims.device_put.default:
            return args[0]
        return func(*args, **kwargs)


def _optimizers(compilation: Compilation) -> list[Patch]:
    """Count the state of a compiled optimizer: Dynamo allocates it while tracing, outside the compiled code."""
    from torch._dynamo.variables.optimizer import OptimizerVariable

    real_call: Callable[..., Any] = OptimizerVariable.call_method
    real_move: Callable[..., Any] = OptimizerVariable.move_step_if_cpu

    def call_method(variable: Any, tx: Any, name: str, *args: Any) -> Any:
        optimizer = variable.value
        if name != "_init_group" or not hasattr(optimizer, name):
            return real_call(variable, tx, name, *args)
        with Patches([(optimizer, name, _simulated(compilation, optimizer._init_group))]):
            return real_call(variable, tx, name, *args)

    return [
        (OptimizerVariable, "call_method", call_method),
        (OptimizerVariable, "move_step_if_cpu", _simulated(compilation, real_move)),
    ]


def _guards(compilation: Compilation) -> list[Patch]:
    """Build the guards of compiled code under the dispatch modes in which it runs, as guards compare dispatch keys."""
    from torch._dynamo.guards import CheckFunctionManager

    real: Callable[..., Any] = CheckFunctionManager.__init__

    def build(*args: Any, **kwargs: Any) -> None:
        with compilation.tracker.cache.mode, compilation.tracker:
            real(*args, **kwargs)

    return [(CheckFunctionManager, "__init__", build)]


def _simulated(compilation: Compilation, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with compilation.simulating():
            return function(*args, **kwargs)

    return run
