"""Where probes are kept. A probe is built like any step that a meter measures, at each point of its ranges."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ...meters.base import Step, StepBuilder

PROBES: dict[str, StepBuilder] = {}


def probe(**ranges: Sequence[Any]) -> Callable[[Callable[..., Step]], Callable[..., Step]]:
    """Register ``build(device, **values)`` for every combination of values, named ``sort_rows[rows=64,dtype=...]``."""

    def register(build: Callable[..., Step]) -> Callable[..., Step]:
        for values in itertools.product(*ranges.values()):
            chosen = dict(zip(ranges, values, strict=True))
            spelled = ",".join(f"{name}={value}" for name, value in chosen.items()).replace("torch.", "")
            name = build.__name__.strip("_") + (f"[{spelled}]" if spelled else "")
            assert name not in PROBES, f"two probes are called {name}"
            PROBES[name] = functools.partial(build, **chosen)
        return build

    return register
