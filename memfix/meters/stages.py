"""Names for parts of a step, said by the step itself: ``stage("loss")`` is what happens from here on.

Where no meter listens it does nothing, so code may keep its marks, as it keeps those of a profiler. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from .timeline import Allocation, Timeline

_listener: ContextVar[Callable[[str | None], None] | None] = ContextVar("memfix_stage_listener", default=None)


@dataclass(frozen=True)
class Stage:
    """A part of a step that has a name. Bytes are all that is live, with what existed before the step."""

    name: str
    start_bytes: int
    end_bytes: int
    peak_bytes: int
    alive_at_end: tuple[Allocation, ...] = field(default=(), repr=False)
    """What the step had made, where the meter sees it; largest first."""
    alive_at_peak: tuple[Allocation, ...] = field(default=(), repr=False)

    @property
    def added_bytes(self) -> int:
        return self.end_bytes - self.start_bytes

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Stage:
        rows = {key: tuple(Allocation(**row) for row in data[key]) for key in ("alive_at_end", "alive_at_peak")}
        return cls(**{**data, **rows})


def stage(name: str | None) -> None:
    """What happens from here on is the part of the step called ``name``, or with None of no part."""
    listener = _listener.get()
    if listener is not None:
        listener(name)


@contextmanager
def listening(listener: Callable[[str | None], None] | None) -> Iterator[None]:
    """Inside, ``listener`` hears of every stage; with None nobody does, whoever listened before."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def stages_of(timeline: Timeline) -> tuple[Stage, ...]:
    """The parts that the step named, as its timeline shows them."""
    return tuple(_stage_of(timeline, *span) for span in timeline.marked_spans())


def _stage_of(timeline: Timeline, start: int, end: int, name: str) -> Stage:
    live = timeline.live_bytes
    # what is live before the first event of the stage belongs to it: a stage in which nothing happens has bytes too
    peak_event = max(range(start - 1, end), key=live.__getitem__)
    return Stage(
        name,
        live[start - 1],
        live[end - 1],
        live[peak_event],
        timeline.rows_at(end - 1),
        timeline.rows_at(peak_event),
    )
