"""Measures the peak of any code: of a step that you build, or of a function call with existing tensors."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from .errors import MeasurementError, UsageError
from .meters import usable_meter
from .meters.base import Meter, Reading, Step
from .meters.one_rank import Mesh, World, one_rank_of


def peak(
    build: Callable[..., Step],
    *,
    meter: str = "simulated",
    gpu: str = "H200",
    warmup: int = 1,
    world_size: int | None = None,
    rank: int = 0,
    mesh: Mesh | None = None,
    assume: Mapping[str, Any] | None = None,
) -> Reading:
    """The peak of one step. ``build(device)`` makes state on that device and returns the step, without arguments.

    The step runs ``warmup`` times unmeasured, then once measured. ``meter="simulated"`` simulates ``gpu``,
    ``meter="cuda"`` runs on a real GPU, and ``meter="host"`` counts host memory, also of steps without torch.

    With ``world_size`` the step is that of one ``rank`` among so many: FSDP2, DTensor and other code on
    ``torch.distributed`` finds a process group whose other ranks are fake. With ``mesh``, such as
    ``{"data": 4, "tensor": 2}``, the step is built by ``build(device, mesh)``, where ``mesh`` is the ``DeviceMesh`` of
    these sizes; ``world_size`` is then their product, or what a size of -1 is to be found from.

    ``assume`` decides values that a simulated step does not have, such as the choices of a router. A key is a line
    (``moe.py:12``, as notes name it), a function or a module; a value is a tensor or a number, a function from the
    undecided tensor to one, ``"even"`` or ``"worst"``.
    """
    world = World.of(world_size, mesh)
    world.require(rank)
    if warmup < 0:
        raise UsageError(f"warmup is how often the step runs before it is measured, at least 0; got {warmup}")
    if assume and meter != "simulated":
        raise UsageError(f"assume decides values that only the simulated meter lacks, got meter={meter!r}")
    chosen = usable_meter(meter, gpu, assume)

    if mesh is not None:
        _require_takes_a_mesh(build)

    def checked(device: str) -> Step:
        step = build(device) if mesh is None else build(device, world.mesh_on(device))
        if not callable(step):
            raise UsageError(f"build must return the step to measure, a function without arguments; got {step!r}")
        return step

    is_one_of_many = world_size is not None or mesh is not None
    with one_rank_of(world.size, rank) if is_one_of_many else contextlib.nullcontext():
        return chosen.measure(checked, warmup=warmup)


def _require_takes_a_mesh(build: Callable[..., Step]) -> None:
    try:
        inspect.signature(build).bind("cuda", object())
    except TypeError:
        raise UsageError(
            f"with mesh, the step is built by build(device, mesh), which {build!r} does not take"
        ) from None
    except ValueError:  # a callable without a signature
        pass


def peak_of_call(
    meter: Meter,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    backward: bool,
) -> Reading:
    """The peak of ``function(*args, **kwargs)``, and of its backward if requested, above its arguments.

    Tensors, and the parameters of a module that is called, are copied to the meter's device with the same shapes,
    strides and shared storages; the caller's own are not changed.
    """

    def build(device: str) -> Step:
        import torch

        moved = _Moved(device)
        call_args, call_kwargs = moved.value(args), moved.value(dict(kwargs))
        call = function
        if isinstance(function, torch.nn.Module):
            call = moved.module(function)
        upstreams: list[torch.Tensor] = []

        def step() -> object:
            with torch.set_grad_enabled(backward):
                result = call(*call_args, **call_kwargs)
            if not backward:
                return result
            outputs = [t for t in _tensors_in(result) if t.requires_grad]
            if not outputs:
                raise MeasurementError("backward=True, but no result of the call requires a gradient")
            if not upstreams:
                upstreams.extend(torch.ones_like(output) for output in outputs)
            torch.autograd.backward(outputs, upstreams)
            moved.clear_gradients()
            return None

        return step

    return meter.measure(build)


class _Moved:
    """Copies a caller's tensors to another device. Tensors that shared a storage still share one."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._by_tensor: dict[int, Any] = {}
        self._by_storage: dict[int, Any] = {}

    def value(self, value: Any) -> Any:
        """``value`` with every tensor in its lists, tuples and dicts moved."""
        import torch

        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, (list, tuple)):
            moved = [self.value(item) for item in value]
            return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
        if isinstance(value, dict):
            return {key: self.value(item) for key, item in value.items()}
        return value

    def tensor(self, tensor: Any) -> Any:
        import torch

        if id(tensor) not in self._by_tensor:
            if tensor.layout is not torch.strided:
                raise MeasurementError(f"only strided tensors can be measured, got layout {tensor.layout}")
            with torch.no_grad():
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._by_storage or storage.nbytes() == 0:
                    flat = tensor.as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
                    self._by_storage[storage.data_ptr()] = self._copied(flat)
                base = self._by_storage[storage.data_ptr()].view(tensor.dtype)
                moved = base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).detach()
            self._by_tensor[id(tensor)] = moved.requires_grad_(tensor.requires_grad)
        return self._by_tensor[id(tensor)]

    def _copied(self, flat: Any) -> Any:
        import torch
        from torch._subclasses.fake_tensor import FakeTensor

        target = torch.empty(flat.shape, dtype=flat.dtype, device=self.device)
        # a fake tensor has no values to copy
        return target if isinstance(target, FakeTensor) else target.copy_(flat)

    def module(self, module: Any) -> Callable[..., Any]:
        import torch

        state = {name: self.tensor(t) for name, t in (*module.named_parameters(), *module.named_buffers())}
        return lambda *args, **kwargs: torch.func.functional_call(module, state, args, kwargs)

    def clear_gradients(self) -> None:
        for tensor in self._by_tensor.values():
            tensor.grad = None


def _tensors_in(value: Any) -> list[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [t for item in value for t in _tensors_in(item)] if isinstance(value, (list, tuple)) else []
