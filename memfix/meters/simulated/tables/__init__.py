"""Calibration tables, the results of ``memfix calibrate`` on a GPU: which workspace rules hold, and measured bytes.

There is one JSON file per GPU. A user's own table takes precedence over the one that memfix ships.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ....errors import MemfixError
from ..gpus import GPU

SHIPPED = Path(__file__).parent
"""The folder of the tables that memfix ships."""


@dataclass(frozen=True)
class Standing:
    """How many calls of an operator were measured, for how many its rule was wrong, and for how many there was none."""

    calls: int = 0
    missed: int = 0
    unknown: int = 0


@dataclass(frozen=True)
class Table:
    gpu: GPU
    surroundings: Mapping[str, str]
    operators: Mapping[str, Standing] = field(default_factory=dict)
    measured: Mapping[str, int] = field(default_factory=dict)
    """Signature of a call -> its hidden bytes, for calls that no rule derives."""
    convolutions: Mapping[str, int] = field(default_factory=dict)
    """A convolution, as ``cudnn.Convolution`` spells it -> the bytes of the workspace that cuDNN took for it."""

    @property
    def cudnn(self) -> int | None:
        """The version of cuDNN that was measured, such as 91900 for 9.19.0."""
        number = self.surroundings.get("cudnn")
        return None if number is None else int(number)

    def doubt(self, operator: Any) -> str | None:
        """Why the rule of ``operator`` may be inexact; None if it is exact."""
        standing = self.operators.get(str(operator.overloadpacket))
        if standing is None or standing.calls == standing.unknown:
            return f"the rule for {operator} is assumed: no call of it was measured on {self.gpu.name}"
        if standing.missed:
            return f"the rule for {operator} missed {standing.missed} of {standing.calls} calls on {self.gpu.name}"
        return None

    def updated(self, newer: Table) -> Table:
        """This table with the results of a later run. For an operator that had misses only the later run counts, and
        the workspaces of another cuDNN version are dropped."""
        operators = dict(self.operators)
        for name, now in newer.operators.items():
            before = operators.get(name, Standing())
            operators[name] = now if before.missed else replace(now, calls=max(now.calls, before.calls))
        convolutions = {**(self.convolutions if self.cudnn == newer.cudnn else {}), **newer.convolutions}
        return Table(newer.gpu, newer.surroundings, operators, {**self.measured, **newer.measured}, convolutions)

    def as_text(self) -> str:
        """The JSON text, with one operator or call per line in a stable order."""
        data = {
            "gpu": asdict(self.gpu),
            "surroundings": dict(self.surroundings),
            "operators": {name: asdict(standing) for name, standing in sorted(self.operators.items())},
            "measured": dict(sorted(self.measured.items())),
            "convolutions": dict(sorted(self.convolutions.items())),
        }
        lines = [f"{json.dumps(key)}: {_block(value)}" for key, value in data.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"


def _block(entries: Mapping[str, Any]) -> str:
    return "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in entries.items()) + "\n}"


def own_tables() -> Path:
    """The folder of the user's own tables."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "memfix" / "tables"


@functools.cache
def table_of(gpu: GPU) -> Table | None:
    """The table of this GPU; None if it was never measured."""
    for folder in (own_tables(), SHIPPED):
        path = folder / file_name(gpu)
        if path.exists():
            return read_table(path)
    return None


def file_name(gpu: GPU) -> str:
    return f"{gpu.name.lower()}.json"


def read_table(path: Path) -> Table:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        gpu = GPU(**{**data["gpu"], "capability": tuple(data["gpu"]["capability"])})
        operators = {name: Standing(**standing) for name, standing in data["operators"].items()}
        measured, convolutions = (
            {call: int(size) for call, size in calls.items()}
            for calls in (data["measured"], data.get("convolutions", {}))  # older tables have none
        )
        return Table(gpu, dict(data["surroundings"]), operators, measured, convolutions)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MemfixError(f"{path}: not a table of memfix calibrate ({error}); delete it or write it anew") from None
