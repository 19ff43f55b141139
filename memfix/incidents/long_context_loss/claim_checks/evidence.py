"""What the checks of this report's claims go by: sizes, readings and profiles, each made once and when it is needed."""

# N tokens, C tokens of a chunk, D width, V vocabulary

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ....checks.inputs import Draw, StepOf
from ....checks.memory import bytes_of
from ....contract import Contract
from ....formula import Formula
from ....laws import Phase
from ....meters import get_meter
from ....meters.base import Reading
from ....registry import contracts
from ....units import GiB
from ...config import RunConfig, load_config
from ...measured_step import repeated_reading
from ...profile import Profile
from ...profile_step import profile
from ..incident import incident
from ..model import SIZES, Decoder, build_model, private_tables

SIZE = SIZES["4B"]
CAPACITY_BYTES = int(94.97 * GiB)
# the report's table, in the GiB that its figures turn out to be
AFTER_FIRST_LAYER_BYTES, AFTER_FORWARD_BYTES = int(25.87 * GiB), int(62.97 * GiB)
TINY_TOKENS, TINY_ITEM_BYTES = 300, 2


def report_config(*overrides: str) -> RunConfig:
    """The report's step, with keys overridden."""
    return load_config(incident, incident.config, overrides)


def _tiny_config() -> RunConfig:
    return report_config(
        "model.size=tiny", "model.attention_type=dense", "model.loss_form=recompute",
        f"data.context_length={TINY_TOKENS}",
    )  # fmt: skip


class Evidence:
    """Of one run of the checks. ``say`` is told what takes a while."""

    def __init__(self, say: Callable[[str], object] = lambda doing: None) -> None:
        self._say = say
        self.meter = get_meter("simulated", "H200")
        (self.contract,) = contracts(["linear_cross_entropy"])
        self.case = self.contract.cases["incident"]
        self._readings: dict[tuple[str, Phase, bool], Reading] = {}

    @functools.cached_property
    def dims(self) -> dict[str, int]:
        """B batch, T tokens, D width, V vocabulary, C tokens of a chunk, L layers, K head width, e item size."""
        case = self.case.formula_values
        return {
            "B": report_config().batch_size,
            "T": case["N"],
            "D": case["D"],
            "V": case["V"],
            "C": case["rows_per_chunk"],
            "e": case["e"],
            "L": SIZE.layers,
            "K": SIZE.head_width,
        }

    def bytes(self, formula: str) -> int:
        return Formula(formula).evaluate(self.dims)

    @property
    def logits_bytes(self) -> int:
        return self.bytes("B*T*V*e")

    @property
    def layer_inputs_bytes(self) -> int:
        """What checkpointing keeps of all layers."""
        return self.bytes("L*B*T*D*e")

    # ---------------------------------------------------------------- the loss alone
    def reading(self, form: str, phase: Phase, *, in_float32: bool = False) -> Reading:
        """A form of the loss at the incident, above its inputs; ``in_float32``: with logits cast to it."""
        key = (form, phase, in_float32)
        if key not in self._readings:
            self._say(f"linear_cross_entropy/{form} [incident, {phase}]")
            contract = _in_float32(self.contract) if in_float32 else self.contract
            draw = Draw(contract.cases[self.case.name])
            self._readings[key] = self.meter.measure(StepOf(contract, form, draw, phase))
        return self._readings[key]

    def peak(self, form: str, phase: Phase, *, in_float32: bool = False) -> int:
        return bytes_of(self.reading(form, phase, in_float32=in_float32), phase)

    # ---------------------------------------------------------------- the model
    @functools.cached_property
    def model(self) -> Decoder:
        """The report's, without a byte behind it."""
        return build_model("4B", device="meta", dtype=torch.bfloat16)

    @property
    def parameter_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.model.parameters())

    @functools.cached_property
    def table_bytes(self) -> int:
        """Of a RoPE table in every layer."""
        tables = private_tables(SIZE, self.dims["T"], device="meta", dtype=torch.bfloat16)
        return sum(part.nbytes for pair in tables for part in pair)

    @functools.cached_property
    def tiny(self) -> Profile:
        """One train step of the tiny model, checkpointed."""
        return profile(incident, _tiny_config(), say=self._say)

    @functools.cached_property
    def tiny_sharded(self) -> Profile:
        """The same step on one rank of two."""
        return profile(incident, _tiny_config(), world_size=2, say=self._say)

    # ---------------------------------------------------------------- slow: the whole model at 131,072 tokens
    @functools.cached_property
    def profile(self) -> Profile:
        return profile(incident, report_config(), say=self._say)

    @functools.cached_property
    def sharded(self) -> Reading:
        """A later step on one rank of two."""
        config = report_config()
        stand_ins = incident.stand_ins(config, self.meter, self._say)
        self._say("4B: a train step on one rank of two")
        return repeated_reading(incident, config, self.meter, world_size=2, stand_ins=stand_ins)


def _in_float32(contract: Contract) -> Contract:
    """The old loss and the reported loop with their logits cast to float32, as the report says of its intermediates."""
    case = contract.cases["incident"]
    return Contract(
        contract.name,
        naive=_naive_in_float32,
        forms={"reported": _reported_in_float32},
        dims=contract.dims,
        inputs=[dataclasses.replace(spec, sometimes=None) for spec in contract.inputs if not spec.optional],
        cases={case.name: {**case.dims, "dtype": case.dtype}},
    )


def _naive_in_float32(hidden_ND: torch.Tensor, weight_VD: torch.Tensor, target_N: torch.Tensor) -> torch.Tensor:
    logits_NV = F.linear(hidden_ND, weight_VD)  # has a name, as in the report's code, and so outlives its cast
    return F.cross_entropy(logits_NV.float(), target_N)


def _reported_in_float32(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, target_N: torch.Tensor, *, rows_per_chunk: int
) -> torch.Tensor:
    total = torch.zeros((), device=hidden_ND.device)
    for hidden_CD, target_C in zip(hidden_ND.split(rows_per_chunk), target_N.split(rows_per_chunk), strict=True):
        logits_CV = F.linear(hidden_CD, weight_VD)
        total = total + F.cross_entropy(logits_CV.float(), target_C, reduction="sum")
    return total / target_N.numel()
