"""Run probes on this machine's GPU and tabulate what they measure."""

from __future__ import annotations

import gc
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import MeterUnavailable
from ..meters.base import StepBuilder
from ..meters.simulated.gpus import GPU, GPUS, plain_name
from ..meters.simulated.tables import Standing, Table
from ..meters.simulated.workspace.cudnn import Convolution
from ..progress import Say, silent
from ..provenance import describe
from . import probes
from .convolutions import workspaces
from .observe import Observation, OperatorWatch
from .probes.registry import PROBES


def all_probes() -> Mapping[str, StepBuilder]:
    """Import all modules of probes and return the probes by name."""
    for module in pkgutil.iter_modules(probes.__path__):
        importlib.import_module(f"{probes.__name__}.{module.name}")
    return PROBES


@dataclass(frozen=True)
class Calibration:
    table: Table
    observations: tuple[Observation, ...]
    failures: Mapping[str, str]
    """Name of a probe that failed -> its error."""


def calibrate(
    chosen: Mapping[str, StepBuilder],
    convolutions: Iterable[Convolution] = (),
    say: Say = silent,
) -> Calibration:
    """Run the probes, and measure the workspace of the convolutions, on this machine's GPU."""
    import torch

    if not torch.cuda.is_available():
        raise MeterUnavailable("calibrating needs a GPU, and torch sees none; without --run the known tables are shown")
    gpu = this_gpu()
    watch = OperatorWatch(gpu)
    failures = {}
    gc.collect()
    gc.freeze()  # the collection after every probe then skips all older objects
    for name, build in chosen.items():
        say(name)
        try:
            _run_watched(build, watch)
        except Exception as error:  # a probe that this GPU or torch cannot run must not stop the others
            failures[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        gc.collect()
        if torch.cuda.memory_reserved() > gpu.memory_bytes // 2:
            torch.cuda.empty_cache()
    gc.unfreeze()
    observations = tuple(watch.observations.values())
    surroundings = {**describe(), "cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    table = replace(_tabulated(gpu, surroundings, observations), convolutions=workspaces(convolutions, say))
    return Calibration(table, observations, failures)


def _run_watched(build: StepBuilder, watch: OperatorWatch) -> None:
    import torch

    step = build("cuda")
    step()  # libraries allocate what they keep
    torch.cuda.synchronize()
    with torch.autograd.set_multithreading_enabled(False), watch:
        step()


def _tabulated(gpu: GPU, surroundings: Mapping[str, str], observations: Iterable[Observation]) -> Table:
    operators: dict[str, Standing] = {}
    for seen in observations:
        so_far = operators.get(seen.operator, Standing())
        operators[seen.operator] = Standing(
            so_far.calls + 1, so_far.missed + int(seen.is_mispredicted), so_far.unknown + int(seen.predicted is None)
        )
    measured = {
        seen.signature: seen.measured
        for seen in observations
        if seen.predicted is None and not seen.is_mispredicted and not seen.depends_on_values
    }
    return Table(gpu, surroundings, operators, measured)


def this_gpu() -> GPU:
    """The description of this machine's GPU: the known one, or else one made from torch's device properties."""
    import torch

    properties: Any = torch.cuda.get_device_properties(0)
    name = plain_name(properties.name)
    if name in GPUS:
        return GPUS[name]
    return GPU(
        name=name,
        capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        threads_per_multiprocessor=properties.max_threads_per_multi_processor,
        memory_bytes=properties.total_memory,
        shared_memory_bytes=properties.shared_memory_per_block_optin,
        l2_bytes=properties.L2_cache_size,
        prefers_cudnn_attention=properties.major in (9, 10),
    )
