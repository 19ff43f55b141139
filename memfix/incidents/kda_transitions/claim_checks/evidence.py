"""What the checks of this report's claims go by: sizes and readings, each made once and when it is needed."""

# B batch, T tokens, H heads, K key width, V value width, C tokens of a chunk

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ....checks.inputs import Draw, StepOf
from ....checks.memory import bytes_of
from ....formula import Formula
from ....laws import NAIVE, Phase
from ....meters import get_meter
from ....meters.base import Reading
from ....meters.timeline import Buffer, Timeline
from ....ops.kda.contract import contract
from ....units import parse_bytes
from ...config import load_config
from ..incident import Grown, grown, incident

CAPACITY_BYTES = parse_bytes(incident.capacity or "")

# the statement that failed, in naive and, a chunk at a time, in the reported fix
SUBTRACTION = "= decay_diag - forget_rank1"
DIAGONAL = "decay_diag = torch.diag_embed"


class Evidence:
    """Of one run of the checks. ``say`` is told what takes a while."""

    def __init__(self, say: Callable[[str], object] = lambda doing: None) -> None:
        self._say = say
        self.meter = get_meter("simulated", "H200")
        self.contract = contract
        self.case = contract.cases["incident"]
        self._readings: dict[tuple[Any, ...], Reading] = {}

    @functools.cached_property
    def dims(self) -> dict[str, int]:
        """B batch, T tokens, H heads, K key width, V value width, C tokens of a chunk, e item size."""
        case = self.case.formula_values
        return {**{name: case[name] for name in "BTHKVe"}, "C": case["chunk_size"]}

    def bytes(self, formula: str) -> int:
        return Formula(formula).evaluate(self.dims)

    @property
    def elements(self) -> int:
        """Of one tensor of transitions."""
        return self.bytes("B*T*H*K*K")

    @property
    def full_bytes(self) -> int:
        """The same in float32."""
        return self.bytes("B*T*H*K*K*e")

    # ---------------------------------------------------------------- the op alone, at the incident
    def reading(self, form: str, phase: Phase, **changed: Any) -> Reading:
        """Above the inputs; ``changed`` are other dims, or another dtype, than the incident's."""
        key = (form, phase, *sorted(changed.items()))
        if key not in self._readings:
            self._say(
                f"kda/{form} [incident, {phase}] {' '.join(f'{name}={value}' for name, value in changed.items())}"
            )
            settings = {**self.case.settings, "dtype": self.case.dtype, **changed}
            draw = Draw(self.contract.case_of(self.case.name, settings))
            self._readings[key] = self.meter.measure(StepOf(self.contract, form, draw, phase))
        return self._readings[key]

    def peak(self, form: str, phase: Phase, **changed: Any) -> int:
        return bytes_of(self.reading(form, phase, **changed), phase)

    def made_by(self, form: str, code: str, **changed: Any) -> list[Buffer]:
        """What the form's forward makes in lines that contain ``code``."""
        timeline = self._timeline(form, **changed)
        return [buffer for buffer in timeline.buffers if buffer.line and code in buffer.line.text]

    def made_in(self, form: str, function: str) -> list[int]:
        """Sizes of what the form's forward makes in a function of this name."""
        buffers = self._timeline(form).buffers
        return [buffer.bytes for buffer in buffers if buffer.line and buffer.line.function == function]

    def full_tensors_at(self, form: str, code: str) -> int:
        """How many tensors of transitions' size are alive when the line has run that contains ``code``."""
        timeline = self._timeline(form)
        event = self.made_by(form, code)[0].born
        return sum(buffer.bytes == self.full_bytes for buffer in timeline.alive_at(event))

    def largest(self, form: str) -> int:
        """The largest single allocation of the form's forward."""
        return max(buffer.bytes for buffer in self._timeline(form).buffers if buffer.born)

    def _timeline(self, form: str, **changed: Any) -> Timeline:
        timeline = self.reading(form, "forward", **changed).timeline
        assert timeline is not None
        return timeline

    # ---------------------------------------------------------------- real tensors, on the CPU
    def tensors(self, num_tokens: int, *, heads: int = 2, width: int = 8, batch: int = 2) -> list[torch.Tensor]:
        """q, k, v, g and beta in float64, all of which need a gradient; the same at each call."""
        draw = torch.Generator().manual_seed(num_tokens)
        shape = (batch, num_tokens, heads, width)
        q, k, v, g = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(4))
        beta = torch.rand(shape[:-1], generator=draw, dtype=torch.float64)
        made = (q, torch.nn.functional.normalize(k, dim=-1), v, -g.abs(), beta)
        return [tensor.requires_grad_() for tensor in made]

    def computed(self, form: str, num_tokens: int, **options: Any) -> list[torch.Tensor]:
        """Output, final state, and the gradients of all inputs."""
        tensors = self.tensors(num_tokens)
        outputs = self.contract.function(form)(*tensors, **options)
        total = sum((output * output.detach().cos()).sum() for output in outputs)
        return [*(output.detach() for output in outputs), *torch.autograd.grad(total, tensors)]

    # ---------------------------------------------------------------- slow: the report's model
    @functools.cached_property
    def dense_layers(self) -> Grown:
        """What each dense layer of hn_xs adds to a train step, and how many fit the report's card."""
        config = load_config(incident, incident.config, [f"model.kda_form={NAIVE}"])
        return grown(config, CAPACITY_BYTES, self.meter, self._say)
