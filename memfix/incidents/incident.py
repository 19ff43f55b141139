"""The declaration of an incident, and its configs. Each ``incident.py`` has one :class:`Incident`, called ``incident``.

The train step, the training loop, the profile and the fit use nothing else of an incident.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree

from ..errors import UsageError, did_you_mean
from ..meters.base import Meter
from ..progress import Say
from .config import CheckpointConfig, DataConfig, OptimizerConfig, ReportSwitches, RunConfig, TrainingConfig
from .examples import Examples
from .profile import ReportedFigure, ReportedRun
from .schema import read_sections
from .staged_reading import Asides, StagedReading
from .stand_in import StandIns

Batch = Any
"""Tensors in any nesting of tuples, lists and dicts. ``data`` returns them on the CPU."""


def num_examples(batch: Batch) -> int:
    """The length of the first tensor of a batch."""
    return len(next(leaf for leaf in _pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)))


@dataclass(frozen=True)
class Growth:
    """A key of the config that ``memfix fit`` can grow: ``Growth("model.layers", unit="layers")``.

    Only multiples of ``multiple_of(config)`` are tried. ``keeps_stand_ins`` says that the stand-ins do not depend on
    the key, so they are measured once.
    """

    key: str
    unit: str
    multiple_of: Callable[[RunConfig], int] = lambda config: 1
    keeps_stand_ins: bool = False


@dataclass(frozen=True, kw_only=True)
class Incident:
    """A model, its data and its loss, and what its report says about their memory.

    Needed to train:

    - ``package``: the ``__package__`` of the incident's folder; its last part is the incident's name.
    - ``model_schema``, ``data_schema``, ``optimization_schema``: frozen dataclasses of the config's ``model``, ``data``
      and ``optimization`` sections, with fields made by :func:`memfix.incidents.schema.setting`.
    - ``resolved(config)``: sets the keys that follow from other keys; refuses keys that contradict each other.
    - ``require_device(config, device)``: refuses a config that cannot run on the device.
    - ``build(config)``: makes the model in float32, on torch's default device, from torch's global generator.
    - ``data(config)``: opens the data of a run and returns a function from :class:`Examples` to their batch.
    - ``loss(model, batch)``: the sum of the losses of all targets of a batch. It calls the model once: sharded
      parameters are whole only inside that call.
    - ``num_targets(batch)``: how many targets that sum has. A step's loss is the mean over the targets of all its
      forwards and processes.
    - ``quality(loss)``: a measure of the result that ``memfix train`` shows beside a step's loss, in words.
    - ``examples_per_epoch(config)``: how many examples the data have; None if they do not end.
    - ``layers(model)``: modules that are sharded one by one, so that only one of them is whole at a time.

    For the profile and the fit:

    - ``config``: the file in ``configs/`` that describes the report's own step.
    - ``capacity``: the memory of the report's card; None for the memory of the GPU that is measured.
    - ``grows``: what ``memfix fit`` can grow, the default first.
    - ``describe(config)``: describes the run in a profile's title.
    - ``stand_ins(config, meter, say)``: replacements for what is slow to simulate; None where none are needed.
    - ``warm_up(batch)``: a part of the batch that is enough for a simulated warm-up.
    - ``asides(model, batch, asides)``: a context manager around the first step, which may measure stages of its own.
    - ``reported_figures(measured)``: the report's figures for stages, by stage name.
    - ``conclusions(measured)``: sentences below the table.
    - ``runs``: the report's table of configurations; measured when the report's own step is profiled.
    - ``num_parameters(config)``: how many parameters the model has, for that table.
    """

    package: str
    model_schema: type[Any]
    build: Callable[[RunConfig], torch.nn.Module]
    data: Callable[[RunConfig], Callable[[Examples], Batch]]
    loss: Callable[[torch.nn.Module, Batch], torch.Tensor]
    data_schema: type[DataConfig] = DataConfig
    optimization_schema: type[ReportSwitches] = ReportSwitches
    resolved: Callable[[RunConfig], RunConfig] = lambda config: config
    require_device: Callable[[RunConfig, torch.device], None] = lambda config, device: None
    num_targets: Callable[[Batch], int] = num_examples
    quality: Callable[[float], str] | None = None
    examples_per_epoch: Callable[[RunConfig], int] | None = None
    layers: Callable[[Any], Iterable[torch.nn.Module]] = lambda model: ()
    config: str
    capacity: str | None = None
    grows: tuple[Growth, ...] = (Growth("training.batch_size", unit="examples"),)
    describe: Callable[[RunConfig], Iterable[str]] = lambda config: ()
    stand_ins: Callable[[RunConfig, Meter, Say], StandIns | None] = lambda config, meter, say: None
    warm_up: Callable[[Batch], Batch] = lambda batch: batch
    asides: Callable[[Any, Batch, Asides], AbstractContextManager[object]] = lambda model, batch, asides: nullcontext()
    reported_figures: Callable[[StagedReading], Mapping[str, ReportedFigure]] = lambda measured: {}
    conclusions: Callable[[StagedReading], Iterable[str]] = lambda measured: ()
    runs: tuple[ReportedRun, ...] = ()
    num_parameters: Callable[[RunConfig], int] | None = None

    @property
    def name(self) -> str:
        return self.package.rpartition(".")[2]


def load_config(incident: Incident, file: Path | str, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a run from a file, with keys overridden by ``section.key=value``.

    ``file`` is a path, or the name of a config that comes with the incident, with or without ``.yaml``.
    """
    path = find_config(incident, Path(file))
    return incident.resolved(RunConfig(**read_sections(path, sections(incident), overrides), name=path.stem))


def find_config(incident: Incident, path: Path) -> Path:
    """``path`` if it exists; otherwise the incident's own config of that name."""
    if path.exists():
        return path
    own = own_configs(incident)
    name = str(path if path.suffix else path.with_suffix(".yaml"))
    if name not in own:
        raise UsageError(
            f"no config file {name}, and {incident.name} comes with none of that name{did_you_mean(name, own)}"
        )
    return own[name]


def own_configs(incident: Incident) -> dict[str, Path]:
    """The configs that come with the incident, by file name."""
    folder = Path(str(importlib.resources.files(incident.package) / "configs"))
    return {file.name: file for file in sorted(folder.glob("*.yaml"))}


def sections(incident: Incident) -> dict[str, type[Any]]:
    """The dataclass of each section, by the section's name, in the order of a file."""
    return {
        "model": incident.model_schema,
        "data": incident.data_schema,
        "training": TrainingConfig,
        "optimizer": OptimizerConfig,
        "checkpoint": CheckpointConfig,
        "optimization": incident.optimization_schema,
    }
