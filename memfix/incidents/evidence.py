"""Measurements for the checks of claims: readings of an op's forms, of train steps, and recorded results of a GPU.

An incident may derive its own ``Evidence`` and add what only its report needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..checks.examine import meter_of
from ..checks.form_call import FormCall
from ..checks.inputs import Draw
from ..checks.measuring import measure_phases
from ..checks.memory import bytes_of
from ..contract import Case, Contract
from ..formula import Formula
from ..laws import NAIVE, Phase
from ..meters import get_meter
from ..meters.base import Reading
from ..meters.timeline import Buffer, Timeline
from ..progress import Say, silent
from ..registry import contracts
from . import get_incident
from .config import RunConfig
from .distributed import ALONE_ON_CPU
from .incident import Incident, load_config
from .judging import NotMeasured
from .profile import Profile, Row, kept_runs
from .profile_step import H200_RESULTS, later_step_bytes, profile, run_bytes
from .training import StepReport, train

CASE = "incident"


class Evidence:
    """The measurements of one run of the checks. Each measurement is made once, when a check first needs it.

    ``op`` is the op that the report is about; a check may name another. ``say`` is called with progress messages.
    ``results`` is the folder with the results of an H200.
    """

    incident_name: ClassVar[str] = ""
    op: ClassVar[str] = ""

    def __init__(self, say: Say = silent, results: Path = H200_RESULTS) -> None:
        self.say, self._results = say, results
        self.meter = get_meter("simulated", "H200")
        self._readings: dict[tuple[str, str, str], dict[Phase, Reading]] = {}

    # ---------------------------------------------------------------- sizes
    @property
    def dims(self) -> dict[str, int]:
        """The values of the names in formulas: the dims of the incident's case, and ``e``, the item size."""
        return self.case.formula_values if self.op else {}

    def evaluate(self, formula: str, **dims: int) -> int:
        """The value of a formula; ``dims`` override the case's: ``evaluate("B*T*V*e", T=4096)``."""
        return Formula(formula).evaluate({**self.dims, **dims})

    # ---------------------------------------------------------------- an op's forms at the incident, simulated
    def contract(self, op: str = "") -> Contract:
        (found,) = contracts([op or self.op])
        return found

    @property
    def case(self) -> Case:
        return self.contract().cases[CASE]

    def reading(self, form: str, phase: Phase, *, op: str = "", **changed: Any) -> Reading:
        """The reading of a form at the incident's case. ``changed`` overrides dims, choices or the dtype."""
        contract = self.contract(op)
        case = contract.cases[CASE]
        case = contract.case_of(CASE, {**case.settings, "dtype": case.dtype, "present": case.present, **changed})
        known = self._readings.setdefault((contract.name, form, case.spelled()), {})
        if phase not in known:
            settings = "".join(f" {name}={value}" for name, value in changed.items())
            self.say(f"{contract.name}/{form} [{CASE}, {phase}]{settings}")
            # a train step also measures what is held after its forward
            phases: tuple[Phase, ...] = ("held", "train") if phase == "train" else (phase,)
            known.update(measure_phases(FormCall(contract, form, Draw(case)), phases, meter_of(contract, self.meter)))
        return known[phase]

    def peak(self, form: str, phase: Phase, **of: Any) -> int:
        """The peak bytes of a form. ``of`` are the options of :meth:`reading`."""
        return bytes_of(self.reading(form, phase, **of), phase)

    def times_below(self, form: str, phase: Phase, **of: Any) -> float:
        """How many times smaller the peak of ``form`` is than that of naive."""
        return self.reading(form, phase, **of).times_below(self.reading(NAIVE, phase, **of))

    def timeline(self, form: str, phase: Phase = "forward", **of: Any) -> Timeline:
        timeline = self.reading(form, phase, **of).timeline
        assert timeline is not None
        return timeline

    def made_by(self, form: str, code: str = "", *, function: str = "", **of: Any) -> list[Buffer]:
        """The buffers that the form's forward allocates in lines that contain ``code``, in ``function`` if given."""
        buffers = self.timeline(form, **of).buffers
        return [b for b in buffers if b.line and code in b.line.text and function in ("", b.line.function)]

    def alive_after(self, form: str, code: str, **of: Any) -> list[Buffer]:
        """The buffers alive in the form's forward when a source line that contains ``code`` first allocates."""
        return list(self.timeline(form, **of).alive_at(self.made_by(form, code, **of)[0].born))

    def largest(self, form: str, **of: Any) -> int:
        """The largest single allocation of the form's forward."""
        return max(buffer.bytes for buffer in self.timeline(form, **of).buffers if buffer.born)

    # ---------------------------------------------------------------- train steps of the incident's model, simulated
    @functools.cached_property
    def incident(self) -> Incident:
        """The declared incident, with a cache for its stand-ins, so that they are measured once per config."""
        declared = get_incident(self.incident_name)
        measured = functools.cache(lambda config: declared.stand_ins(config, self.meter, self.say))
        return dataclasses.replace(declared, stand_ins=lambda config, meter, say: measured(config))

    def config(self, *overrides: str, file: str = "") -> RunConfig:
        """The config of the report's run, or of ``file``, with keys overridden by ``section.key=value``."""
        return load_config(self.incident, file or self.incident.config, overrides)

    def model(self, *overrides: str) -> Any:
        """The model of a run, on the meta device."""
        with torch.device("meta"):
            return self.incident.build(self.config(*overrides))

    @functools.cache  # noqa: B019 (one evidence a process, and it lives as long)
    def profile(self, *overrides: str, world_size: int = 1) -> Profile:
        """The profile of a run's first step on one rank of ``world_size``, as ``memfix profile`` measures it."""
        return profile(self.incident, self.config(*overrides), world_size=world_size, say=self.say)

    def rows(self, *overrides: str, world_size: int = 1) -> dict[str, Row]:
        """The rows of :meth:`profile`, by the name of their stage."""
        return {row.stage.name: row for row in self.profile(*overrides, world_size=world_size).rows}

    @functools.cache  # noqa: B019
    def later_step_bytes(self, *overrides: str, world_size: int = 1) -> int:
        """The peak of a step after the first, including everything that existed before the step."""
        config = self.config(*overrides)
        self.say(f"{self.incident_name} {config.name}: a train step on one rank of {world_size}")
        return later_step_bytes(self.incident, config, self.meter, self.say, world_size=world_size)

    @functools.cache  # noqa: B019
    def run_bytes(self, name: str) -> int:
        """The peak of a later step of the run ``name`` in the report's table of configurations."""
        (run,) = (run for run in self.incident.runs if run.name == name)
        self.say(f"{self.incident_name}: {name}")
        return run_bytes(self.incident, run, self.meter, self.say)

    def train(self, *overrides: str, file: str = "") -> list[StepReport]:
        """Train as ``memfix train`` does, in this process on the CPU, and return the reports of all steps."""
        with fixed_seed():
            return list(train(self.incident, self.config(*overrides, file=file), ALONE_ON_CPU))

    # ---------------------------------------------------------------- results of a GPU
    def h200(self, file: str, key: str, *, command: str) -> Any:
        """The value that ``command`` recorded on the H200 under ``key`` of a JSON file in the repository."""
        path = self._results / file
        found = json.loads(path.read_text(encoding="utf-8")).get(key) if path.is_file() else None
        if not found:
            raise NotMeasured(f"needs a GPU: {command}")
        return found

    def comparison(self, op: str, table: str) -> Any:
        """The entries that ``benchmarks.compare`` recorded on the H200 for a table of an op."""
        return self.h200(f"{op}_{table}.json", "speed", command=f"python -m benchmarks.compare {op} --table {table}")

    def run_times_s(self, name: str) -> tuple[float, ...]:
        """The seconds of a later step of the run ``name`` of the report's table on the H200, sorted."""
        file = f"profile_{self.incident_name}.json"
        kept = kept_runs(self.incident.runs, self._results / file).get(name)
        if kept is None or not kept.times_s:
            raise NotMeasured(f"needs a GPU: memfix profile {self.incident_name} --meter cuda --json {file}")
        return tuple(sorted(kept.times_s))

    def speed_ratios(self, form: str, *, op: str = "") -> dict[str, float]:
        """The time of the form over that of naive on the H200, by case; both were timed in turns in one process."""
        op = op or self.op
        command = f"memfix check {op} --speed --device cuda"
        ratios = {
            found["case"]: found["figures"]["ratio"]
            for found in self.h200("speed.json", "findings", command=command)
            if (found["check"], found["op"], found["form"]) == ("speed", op, form)
        }
        if not ratios:
            raise NotMeasured(f"needs a GPU: {command}")
        return ratios


# ---------------------------------------------------------------- code that runs on the CPU
def raised(function: Callable[..., object], *args: object, **options: object) -> str:
    """The name of the error that a call raises, or ``nothing``."""
    try:
        function(*args, **options)
    except Exception as error:
        return type(error).__name__
    return "nothing"


def default_of(function: Callable[..., object], parameter: str) -> Any:
    return inspect.signature(function).parameters[parameter].default


@contextlib.contextmanager
def fixed_seed(seed: int = 0) -> Iterator[None]:
    """Seed torch's generator inside the block, and restore its state afterwards."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        yield
