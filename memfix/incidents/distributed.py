"""Distributed runs: joins the processes that torchrun started, and shards a model over them (FSDP2)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..errors import UsageError

# the environment variables that torchrun sets for each process
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """This process and its place among all processes of the run."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sums(self, *values: float) -> list[float]:
        """Each value summed over all processes."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, value: int) -> int:
        return int(self._reduced([value], dist.ReduceOp.MAX)[0])

    def gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The ``tensor`` of every process, on the CPU, in the order of ranks."""
        if self.size == 1:
            return [tensor.cpu()]
        mine = tensor.to(self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine)
        return [one.cpu() for one in everyone]

    def _reduced(self, values: Iterable[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        # float64 is exact for counts below 2**53
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        if self.size > 1:
            dist.all_reduce(tensor, operation)
        return tensor.tolist()


ALONE_ON_CPU = World(0, 1, torch.device("cpu"))


@contextmanager
def joined(device: str) -> Iterator[World]:
    """Join the processes that torchrun started, or run alone. ``device`` is ``cpu``, ``cuda`` or ``auto``."""
    rank, size, local_rank = _place()
    world = World(rank, size, _device(device, local_rank))
    if size == 1:
        yield world
        return
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    try:
        dist.init_process_group("nccl" if world.device.type == "cuda" else "gloo")
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"process {rank} of {size} cannot meet the others: {error}") from None
    yield world
    # not after an error: other processes may be waiting for this one, and this call would wait for them in turn
    dist.destroy_process_group()


def _place() -> tuple[int, int, int]:
    given = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if "RANK" not in given and "WORLD_SIZE" not in given:
        return 0, 1, 0
    missing = [name for name in VARIABLES if name not in given]
    how = "start several processes with torchrun --nproc_per_node=2 -m memfix train ..., or unset them for one"
    if missing:
        raise UsageError(f"{', '.join(given)} set but {', '.join(missing)} not: {how}")
    try:
        rank, size, local_rank = (int(given[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    except ValueError:
        shown = ", ".join(f"{name}={given[name]}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        raise UsageError(f"{shown}: these must be ints; {how}") from None
    if not 0 <= rank < size:
        raise UsageError(f"RANK must be at least 0 and below WORLD_SIZE, got {rank} and {size}: {how}")
    return rank, size, local_rank


def _device(device: str, local_rank: int) -> torch.device:
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError("training.device is cuda, but torch sees no GPU; use training.device=cpu")
    if local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"process {local_rank} of this machine has no GPU: torch sees {torch.cuda.device_count()}; "
            f"start with --nproc_per_node={torch.cuda.device_count()}, or use training.device=cpu"
        )
    return torch.device("cuda", local_rank)


def shard(
    model: torch.nn.Module,
    layers: Iterable[torch.nn.Module],
    world: World,
    *,
    gathered: torch.dtype,
    reduced: torch.dtype,
) -> None:
    """Shard the parameters of ``model`` over all processes: each of ``layers`` on its own, the rest together.

    Gradients and optimizer states are sharded as the parameters are. A layer's parameters are gathered in dtype
    ``gathered`` when the layer runs. Gradients are summed over processes in dtype ``reduced``, not averaged, because
    the loss was already divided by the number of all targets.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():  # even in a simulation the mesh must be a real tensor of rank numbers
        mesh = DeviceMesh(world.device.type, torch.arange(world.size, device="cpu"))
    # inputs are not cast, because ids and positions must not be rounded
    policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=reduced, cast_forward_inputs=False)
    for part in (*layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            # otherwise FSDP2 divides as part of the reduction, which gloo does not support
            part.set_force_sum_reduction_for_comms(True)
