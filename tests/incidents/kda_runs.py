"""The report's run, shrunken to what takes a second on a CPU."""

from __future__ import annotations

from memfix.incidents.config import RunConfig
from memfix.incidents.incident import load_config
from memfix.incidents.kda_transitions.incident import incident

SHRUNKEN = (
    "model.layers=2", "model.width=16", "model.heads=2", "model.head_width=8", "model.ffn_width=24",
    "model.vocabulary=64", "data.context_length=20", "data.states=16", "training.batch_tokens=40", "training.steps=4",
    "training.device=cpu", "optimizer.learning_rate=1e-2", "optimizer.warmup_steps=0",
)  # fmt: skip


def shrunken(*overrides: str, name: str = "hn_xs.yaml") -> RunConfig:
    return load_config(incident, name, (*SHRUNKEN, *overrides))
