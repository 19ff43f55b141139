"""Stages, named intervals of a step: the step calls ``stage("loss")`` where each begins.

The call does nothing unless a meter listens, so it can stay in the code like a profiler's annotation. Imports no torch.
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
    """A named interval of a step. Bytes count everything live, including what existed before the step."""

    name: str
    start_bytes: int
    end_bytes: int
    peak_bytes: int
    alive_at_end: tuple[Allocation, ...] = field(default=(), repr=False)
    """The step's own allocations, largest first; empty for a meter that sees no single buffers."""
    alive_at_peak: tuple[Allocation, ...] = field(default=(), repr=False)

    @property
    def added_bytes(self) -> int:
        return self.end_bytes - self.start_bytes

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Stage:
        rows = {key: tuple(Allocation(**row) for row in data[key]) for key in ("alive_at_end", "alive_at_peak")}
        return cls(**{**data, **rows})


def stage(name: str | None) -> None:
    """End the current stage and begin the one called ``name``; None begins no other."""
    listener = _listener.get()
    if listener is not None:
        listener(name)


@contextmanager
def listening(listener: Callable[[str | None], None] | None) -> Iterator[None]:
    """Call ``listener`` with the name of every stage that begins inside the block. None silences an outer listener."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def stages_of(timeline: Timeline) -> tuple[Stage, ...]:
    """The stages of a timeline, in order."""
    return tuple(_stage_of(timeline, *span) for span in timeline.stage_spans())


def _stage_of(timeline: Timeline, start: int, end: int, name: str) -> Stage:
    live = timeline.live_bytes
    # include the event before the stage, so that a stage without events still has bytes
    peak_event = max(range(start - 1, end), key=live.__getitem__)
    return Stage(
        name,
        live[start - 1],
        live[end - 1],
        live[peak_event],
        timeline.rows_at(end - 1),
        timeline.rows_at(peak_event),
    )
