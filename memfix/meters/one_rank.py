"""Makes this process one rank of a fake process group: collectives return at once, with buffers of full size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import MeasurementError, UsageError

Mesh = Mapping[str, int] | Sequence[int]
"""The sizes of a mesh of ranks, by the names of its dimensions or in order. One may be -1, and is then computed."""

_REST = -1


@dataclass(frozen=True)
class World:
    """A number of ranks (``size``), and the ``sizes`` and ``names`` of their mesh's dimensions if there is a mesh."""

    size: int = 1
    sizes: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, world_size: int | None, mesh: Mesh | None) -> World:
        """The world for a world size, a mesh, or both. Raises if they contradict each other."""
        if world_size is not None and world_size < 1:
            raise UsageError(f"world_size must be at least 1, got {world_size}")
        if mesh is None:
            return cls(world_size or 1)
        names = tuple(mesh) if isinstance(mesh, Mapping) else ()
        sizes = _sizes(mesh)
        if not sizes or any(not isinstance(size, int) or size < 1 for size in sizes if size != _REST):
            raise UsageError(f"mesh must have sizes of at least 1, such as {{'data': 4, 'tensor': 2}}, got {mesh!r}")
        known = math.prod(size for size in sizes if size != _REST)
        if _REST in sizes:
            if sizes.count(_REST) > 1 or world_size is None:
                raise UsageError(f"mesh {mesh!r}: one size may be -1, the rest of the ranks, and needs a world_size")
            if world_size % known:
                raise UsageError(f"world_size must be a multiple of {known} for mesh {mesh!r}, got {world_size}")
            sizes = tuple(world_size // known if size == _REST else size for size in sizes)
        elif world_size not in (None, known):
            raise UsageError(f"world_size must be {known}, the ranks of mesh {mesh!r}, got {world_size}")
        return cls(math.prod(sizes), sizes, names)

    def require(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise UsageError(f"rank must be at least 0 and below world_size ({self.size}), got {rank}")

    def mesh_on(self, device: str) -> Any:
        """Make the ``DeviceMesh``. Call it inside :func:`one_rank_of`."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(device.partition(":")[0], self.sizes, mesh_dim_names=self.names or None)


def known_ranks(mesh: Mesh) -> int | None:
    """The product of a mesh's known sizes; None if no size is -1."""
    sizes = _sizes(mesh)
    return math.prod(size for size in sizes if size != _REST) if _REST in sizes else None


def _sizes(mesh: Mesh) -> tuple[int, ...]:
    values = mesh.values() if isinstance(mesh, Mapping) else mesh
    return tuple(values) if isinstance(values, Iterable) else ()


@contextmanager
def one_rank_of(world_size: int, rank: int = 0) -> Iterator[None]:
    """Inside, this process is ``rank`` of ``world_size`` in a fake process group."""
    World.of(world_size, None).require(rank)
    import torch.distributed as dist

    if not dist.is_available():
        raise MeasurementError("this torch has no torch.distributed, so it cannot be one rank of many")
    if dist.is_initialized():
        raise MeasurementError("this process is a rank of another group already; simulate in a process of its own")
    import torch.distributed.tensor  # noqa: F401  before a simulation, which patches it
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    _forget_other_ranks()
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_other_ranks()


def _forget_other_ranks() -> None:
    """Clear DTensor's caches: meshes of the same shape are equal keys, but each rank of a mesh has other shards."""
    import torch
    from torch.distributed.tensor import DTensor, _random, _redistribute

    _random._rng_tracker = None  # it is bound to a mesh
    propagator = DTensor._op_dispatcher.sharding_propagator
    caches = [
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None),
        getattr(propagator.propagate_op_sharding, "cache_clear", None),
        getattr(getattr(_redistribute, "_gen_transform_infos", None), "cache_clear", None),
        getattr(_redistribute, "clear_redistribute_planner_cache", None),
    ]
    for clear in caches:  # not every torch has all of them
        if clear is not None:
            clear()
