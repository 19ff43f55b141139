"""Measure the ranks of a world whose memory can differ, and find the largest."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import UsageError
from .measure import peak
from .meters.base import Reading, Step
from .meters.one_rank import Mesh, World
from .units import format_bytes

Place = tuple[int, ...]
"""The place of a rank in the mesh: its number along each dimension."""


@dataclass(frozen=True)
class RankReadings:
    """The readings of the ranks that were measured, by rank."""

    world: World
    readings: Mapping[int, Reading]
    are_named: bool = False
    """Whether the caller named the ranks. Otherwise each unmeasured rank lies between two with the same bytes."""

    @property
    def largest_rank(self) -> int:
        """The rank that needs most memory: what exists before its step, and the step's highest peak."""
        return max(self.readings, key=lambda rank: _bytes_of(self.readings[rank]))

    @property
    def largest(self) -> Reading:
        """The reading of the largest rank."""
        return self.readings[self.largest_rank]

    def table(self) -> str:
        """A line for each measured rank, and one that says which were not."""
        lines = [f"  {'rank':>6}  {'place':<24}  {'before':>12}  {'peak':>12}  {'together':>12}"]
        for rank, reading in sorted(self.readings.items()):
            sizes = (reading.base_bytes, reading.highest_bytes, _bytes_of(reading))
            mark = "  largest" if rank == self.largest_rank else ""
            columns = "  ".join(f"{format_bytes(size):>12}" for size in sizes)
            lines.append(f"  {rank:>6}  {self._spelled(rank):<24}  {columns}{mark}")
        left_out = self.world.size - len(self.readings)
        if left_out:
            why = "" if self.are_named else ": each lies between alike ones"
            lines.append(f"  {left_out:,} of {self.world.size:,} ranks were not measured{why}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The readings as plain data for JSON."""
        readings = {str(rank): reading.as_dict() for rank, reading in sorted(self.readings.items())}
        return {"world_size": self.world.size, "largest_rank": self.largest_rank, "readings": readings}

    def _spelled(self, rank: int) -> str:
        place = place_of(rank, self.world.sizes)
        return " ".join(map("{} {}".format, self.world.names, place)) if self.world.names else "-".join(map(str, place))


def peak_of_ranks(
    build: Callable[..., Step],
    *,
    world_size: int | None = None,
    mesh: Mesh | None = None,
    ranks: Iterable[int] | None = None,
    **options: Any,
) -> RankReadings:
    """The peaks of the ranks that can differ, as :func:`memfix.peak` measures each with ``options``.

    Along each dimension of the mesh, or over all ranks without one, the first, the middle and the last rank are
    measured. Between two that differ, as between stages of a pipeline or uneven shards, further ranks are measured;
    between two that agree none is. Then every combination of numbers that differ is measured. ``ranks`` names the
    ranks to measure instead.
    """
    world = World.of(world_size, mesh)
    if world_size is None and mesh is None:
        raise UsageError("peak_of_ranks needs a world_size, a mesh, or both")
    if "rank" in options:
        raise UsageError("peak_of_ranks measures several ranks: name them by ranks, not by rank")
    if not world.sizes:
        world = dataclasses.replace(world, sizes=(world.size,))
    found: dict[int, Reading] = {}

    def reading_of(rank: int) -> Reading:
        if rank not in found:
            reading = peak(build, world_size=world.size, mesh=mesh, rank=rank, **options)
            found[rank] = dataclasses.replace(reading, timeline=None)  # the timelines of many ranks take much memory
        return found[rank]

    if ranks is not None:
        chosen = list(ranks)
        for rank in chosen:
            world.require(rank)
        if not chosen:
            raise UsageError("ranks must name at least one rank, got none")
    else:
        along = [_that_differ(size, _reader(reading_of, world.sizes, dim)) for dim, size in enumerate(world.sizes)]
        chosen = [rank_at(place, world.sizes) for place in itertools.product(*along)]
    for rank in chosen:
        reading_of(rank)
    return RankReadings(world, found, are_named=ranks is not None)


def _reader(reading_of: Callable[[int], Reading], sizes: Place, dim: int) -> Callable[[int], tuple[int, ...]]:
    """Return a function that reads the rank with a number along ``dim`` and 0 along the other dimensions."""

    def read(number: int) -> tuple[int, ...]:
        reading = reading_of(rank_at(tuple(number if at == dim else 0 for at in range(len(sizes))), sizes))
        return reading.base_bytes, reading.peak_bytes, reading.highest_bytes

    return read


def _that_differ(size: int, read: Callable[[int], tuple[int, ...]]) -> list[int]:
    """Return one number for each run of numbers with the same bytes."""
    known = {number: read(number) for number in sorted({0, size // 2, size - 1})}
    gaps = list(itertools.pairwise(known))
    while gaps:
        low, high = gaps.pop()
        if high - low > 1 and known[low] != known[high]:
            middle = (low + high) // 2
            known[middle] = read(middle)
            gaps += [(low, middle), (middle, high)]
    numbers = sorted(known)
    return [number for at, number in enumerate(numbers) if at == 0 or known[number] != known[numbers[at - 1]]]


def rank_at(place: Place, sizes: Place) -> int:
    """Return the rank at a place of a mesh. The last dimension runs fastest."""
    rank = 0
    for number, size in zip(place, sizes, strict=True):
        rank = rank * size + number
    return rank


def place_of(rank: int, sizes: Place) -> Place:
    """Return the place of a rank in a mesh."""
    return tuple(rank // math.prod(sizes[dim + 1 :]) % size for dim, size in enumerate(sizes))


def _bytes_of(reading: Reading) -> int:
    return reading.base_bytes + reading.highest_bytes
