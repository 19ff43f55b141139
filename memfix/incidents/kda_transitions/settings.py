"""What a profile is of: a run as ``memfix train`` reads it, and a card for it to fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...fit import bytes_of_capacity
from ..config import RunConfig, find_config, load_config
from ..train_state import require_one_forward
from .trainable import ModelConfig

INCIDENT = "kda_transitions"
REPORT_CONFIG = "hn_xs.yaml"
REPORT_CAPACITY = "24GiB"  # of the report's RTX 3090


@dataclass(frozen=True)
class ProfileSettings:
    name: str
    run: RunConfig
    capacity_bytes: int

    def __post_init__(self) -> None:
        require_one_forward(self.run)

    def with_model(self, **changed: Any) -> ProfileSettings:
        """The same with other keys of the model."""
        model = dataclasses.replace(self.run.model, **changed)
        return dataclasses.replace(self, run=dataclasses.replace(self.run, model=model))

    @property
    def is_of_the_report(self) -> bool:
        """Whether the report's figures are of this shape: batch 16, 256 tokens, 8 heads of 64."""
        run = self.run
        shape = (run.batch_size, run.data.context_length, run.model.heads, run.model.head_width)
        return shape == (16, 256, 8, 64)

    def as_dict(self) -> dict[str, Any]:
        return {"config": self.name, "capacity_bytes": self.capacity_bytes, **self.run.as_dict()}


def settings_of(
    config: str = REPORT_CONFIG, overrides: Sequence[str] = (), capacity: int | str = REPORT_CAPACITY
) -> ProfileSettings:
    """Of a config file or one that comes with the incident, by name, with ``section.key=value`` in place of its own."""
    path = find_config(INCIDENT, Path(config))
    return ProfileSettings(path.stem, load_config(path, ModelConfig, overrides), bytes_of_capacity(capacity))
