"""One rank of a sharded run, on one simulated GPU: torch's own FSDP2 with ranks beside it that are not there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import MeasurementError


@contextmanager
def one_rank_of(world_size: int) -> Iterator[None]:
    """Inside, this process is rank 0 of ``world_size``, and every collective returns at once."""
    if dist.is_initialized():
        raise MeasurementError("this process is a rank of another group already; simulate in a process of its own")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Shard parameters, gradients and what the optimizer keeps, layer by layer, over all ranks."""
    with _disable_current_modes():  # the mesh is a real tensor of rank numbers
        mesh = DeviceMesh("cuda", torch.arange(dist.get_world_size()))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
