"""The protocol of a meter, and the ``Reading`` that every meter returns. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..units import format_bytes
from .difference import Change, changes
from .hints import likely_cause
from .stages import Stage
from .timeline import Allocation, Timeline, table_lines

if TYPE_CHECKING:
    from .simulated.gpus import GPU
    from .simulated.launches import Launch

Step = Callable[[], object]
StepBuilder = Callable[[str], Step]
"""``build(device)`` makes the state on that device and returns the step to measure, a function without arguments."""


@dataclass(frozen=True)
class Reading:
    """The memory of one step, in exact bytes.

    ``peak_bytes`` is requested memory above what was live just before the step (``base_bytes``). ``held_bytes`` is what
    the step left live while its result was referenced, ``leaked_bytes`` what stayed live after the result was dropped.
    ``allocated_bytes`` is the peak with the allocator's rounding, ``reserved_bytes`` what it took from the device.
    ``cyclic_bytes`` of GPU memory were freed only when Python's cycle collector ran.
    """

    meter: str
    device: str
    peak_bytes: int
    base_bytes: int
    held_bytes: int
    leaked_bytes: int
    allocated_bytes: int
    granularity_bytes: int = 1
    reserved_bytes: int | None = None
    cyclic_bytes: int = 0
    exact: bool = True
    at_least: int | None = None
    """The lowest peak that the assumptions allow, and ``at_most`` the highest; None without assumptions or bounds."""
    at_most: int | None = None
    notes: tuple[str, ...] = ()
    alive_at_peak: tuple[Allocation, ...] = ()
    kept: tuple[Allocation, ...] = ()
    """Allocations of the warm-up that stay alive, such as a cache or an optimizer's state. Simulated meter only."""
    stages: tuple[Stage, ...] = ()
    """The stages that the step names by :func:`memfix.meters.stages.stage`, in order."""
    timeline: Timeline | None = field(default=None, repr=False, compare=False)
    """Every buffer of the step, for pictures; None for a meter that does not see buffers. JSON leaves it out."""

    @property
    def highest_bytes(self) -> int:
        """The highest peak that the assumptions allow; without bounds, the peak."""
        return self.peak_bytes if self.at_most is None else self.at_most

    @property
    def total_bytes(self) -> int:
        """The peak plus the bytes live before the step: all that the step needs on a GPU."""
        return self.base_bytes + self.peak_bytes

    @property
    def certainty(self) -> str:
        """``exact``, ``an estimate``, or its bounds."""
        if self.at_least is None or self.at_most is None:
            return "exact" if self.exact else "an estimate"
        return f"an estimate, {format_bytes(self.at_least)} to {format_bytes(self.at_most)}"

    def times_below(self, other: Reading) -> float:
        """How many times smaller this peak is than the other's."""
        return other.peak_bytes / self.peak_bytes if self.peak_bytes else float("inf")

    def diff(self, other: Reading) -> tuple[Change, ...]:
        """The rows that differ between the two peaks, the largest growth first."""
        return changes(other.alive_at_peak, self.alive_at_peak)

    def kept_reading(self) -> Reading:
        """The memory that the warm-up calls left alive (``kept``), as a reading of its own."""
        size = sum(allocation.bytes for allocation in self.kept)
        return dataclasses.replace(
            self, peak_bytes=size, held_bytes=size, leaked_bytes=0, cyclic_bytes=0, allocated_bytes=size,
            alive_at_peak=self.kept, kept=(), stages=(), timeline=None,
        )  # fmt: skip

    @property
    def hint(self) -> str | None:
        """The likely cause of this peak; None if it does not look like a known one."""
        return likely_cause(self.alive_at_peak, self.timeline)

    def table(self, rows: int = 8) -> str:
        """A table of the allocations that were alive at the peak, largest first."""
        return "\n".join(self.table_lines(rows))

    def table_lines(self, rows: int = 8) -> list[str]:
        """The lines of :meth:`table`."""
        return [f"  {line}" for line in table_lines(self.alive_at_peak, rows)]

    def as_dict(self) -> dict[str, Any]:
        """The reading as plain data for JSON, without its timeline."""
        data = dataclasses.asdict(dataclasses.replace(self, timeline=None))
        return {key: value for key, value in data.items() if value or key not in ("kept", "stages", "cyclic_bytes")}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Reading:
        """The inverse of :meth:`as_dict`."""
        fields = {**data, "notes": tuple(data["notes"])}
        for name in ("alive_at_peak", "kept"):
            fields[name] = tuple(Allocation(**allocation) for allocation in data.get(name, ()))
        fields["stages"] = tuple(Stage.from_dict(stage) for stage in data.get("stages", ()))
        return cls(**fields)


class Simulation(Protocol):
    """Methods that only the simulated meter has; see :class:`memfix.meters.simulated.SimulatedMeter`."""

    gpu: GPU

    def measure_first_calls(self, build: Callable[[str], Iterator[Step]]) -> list[Reading]: ...
    def launches(self, build: StepBuilder) -> list[Launch]: ...


class Meter(Protocol):
    """Measures the memory of a step."""

    name: str

    @property
    def simulation(self) -> Simulation | None:
        """The simulated GPU behind this meter; None if the meter really runs steps."""
        ...

    def unavailable_reason(self) -> str | None:
        """Why this meter cannot run here, and what to do about it; None if it can."""
        ...

    def measure(self, build: StepBuilder, *, warmup: int = 1) -> Reading:
        """Build the step, run it ``warmup`` times unmeasured, then once measured."""
        ...

    def capacity_bytes(self) -> int | None:
        """The bytes that a step and its inputs may take together; None for no limit."""
        ...

    def expecting(self, total_bytes: int) -> Meter:
        """This meter for a step that takes ``total_bytes`` with its inputs. A GPU meter may leave the rest of the GPU's
        memory to other processes."""
        ...
