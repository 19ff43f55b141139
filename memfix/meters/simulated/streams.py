"""The streams of the simulated GPU, and which of them is current. Operators run at once, on any stream."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable
from typing import Any

import torch

from .patches import Patch, always, nothing

_IN_A_POOL = 32
"""So many streams of a priority exist: torch hands them out in turns."""
DEFAULT = None
"""The name of the default stream."""


RECORDED = "record_stream: memory may be freed late, when the other stream is done; the bounds are at once and never"
GRADIENTS = (
    "a backward through several streams: gradients that pass between them may be freed late, when the other stream is"
    " done; the bounds are at once and never"
)


class StreamsOfGraphs:
    """The streams of all threads on which operators ran that are differentiated.

    The engine runs the backward of an operator on the stream of its forward. A gradient that passes to another stream
    is recorded there (``record_stream``), so that the allocator frees it only when that stream is done.
    """

    def __init__(self) -> None:
        self.is_any_other = False
        """Whether a stream other than the default one was ever current."""
        self.names: set[Hashable] = set()

    def add(self, name: Hashable) -> bool:
        """Add the stream of an operator or of a call of backward. Returns whether there are several."""
        self.names.add(name)
        return len(self.names) > 1


class Streams(threading.local):
    """The name of a thread's current stream."""

    def __init__(self, of_graphs: StreamsOfGraphs) -> None:
        self._current: Hashable = DEFAULT
        self.of_graphs = of_graphs

    @property
    def current(self) -> Hashable:
        return self._current

    @current.setter
    def current(self, name: Hashable) -> None:
        self._current = name
        self.of_graphs.is_any_other |= name is not DEFAULT


def patches(streams: Streams) -> list[Patch]:
    cuda = torch.cuda
    num_made: Counter[bool] = Counter()

    class Stream(_Stream):
        """A stream of the pool: a step that makes a new one each time gets all of them in turns."""

        def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
            is_urgent = priority < 0
            super().__init__(streams, (is_urgent, num_made[is_urgent] % _IN_A_POOL))
            num_made[is_urgent] += 1

    class External(Stream):
        def __init__(self, stream_ptr: int = 0, device: Any = None, **kwargs: Any) -> None:
            _Stream.__init__(self, streams, stream_ptr or DEFAULT)

    def current(*args: Any, **kwargs: Any) -> Stream:
        made = Stream.__new__(Stream)
        _Stream.__init__(made, streams, streams.current)
        return made

    def set_stream(stream: Any) -> None:
        if stream is not None:
            streams.current = getattr(stream, "name", DEFAULT)

    default = External()
    return [
        (cuda, "current_stream", current),
        # another function: Dynamo handles each function once
        (torch.accelerator, "current_stream", lambda *args: current()),
        (torch.accelerator, "set_stream", set_stream),
        (cuda, "default_stream", always(default)),
        (cuda, "set_stream", set_stream),
        (cuda, "stream", lambda stream: _On(streams, stream)),
        (cuda, "Stream", Stream),
        (cuda, "ExternalStream", External),
        (cuda, "Event", _Event),
    ]


class _On:
    """A context manager that makes a stream the current one."""

    def __init__(self, streams: Streams, stream: Any) -> None:
        self.stream = stream
        self._streams = streams
        self._before: list[Hashable] = []

    def __enter__(self) -> None:
        self._before.append(self._streams.current)
        if self.stream is not None:
            self._streams.current = getattr(self.stream, "name", DEFAULT)

    def __exit__(self, *exception: object) -> None:
        self._streams.current = self._before.pop()


class _Silent:
    """An object of which any method does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cuda", 0)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return nothing

    def query(self) -> bool:
        return True


class _Stream(_Silent):
    def __init__(self, streams: Streams, name: Hashable) -> None:
        super().__init__()
        self.name = name
        self.cuda_stream = self.stream_id = self.device_index = self.priority = 0
        self.device_type = 1  # CUDA
        self._on = _On(streams, self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __enter__(self) -> _Stream:
        self._on.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._on.__exit__()

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, -5)

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Event(_Silent):
    def elapsed_time(self, end_event: Any) -> float:
        return 1.0
