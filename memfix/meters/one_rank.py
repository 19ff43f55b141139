"""Makes this process one rank of many, without the others: collectives return at once, with buffers of full size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import MeasurementError, UsageError


@contextmanager
def one_rank_of(world_size: int, rank: int = 0) -> Iterator[None]:
    """Inside, this process is ``rank`` of ``world_size`` in a fake process group."""
    if world_size < 1:
        raise UsageError(f"world_size must be at least 1, got {world_size}")
    if not 0 <= rank < world_size:
        raise UsageError(f"rank must be at least 0 and below world_size ({world_size}), got {rank}")
    if world_size == 1:
        yield
        return
    import torch.distributed as dist

    if not dist.is_available():
        raise MeasurementError("this torch has no torch.distributed, so it cannot be one rank of many")
    if dist.is_initialized():
        raise MeasurementError("this process is a rank of another group already; simulate in a process of its own")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
