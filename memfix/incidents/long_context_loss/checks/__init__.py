"""The checks of the claims of this report, one file per subject, and the evidence that they share."""

# N tokens, C tokens of a chunk, D width, V vocabulary

from __future__ import annotations

import dataclasses
import functools

import torch
import torch.nn.functional as F

from ....contract import Contract
from ....registry import contracts
from ....units import GiB
from ... import evidence
from ...decoder_parts import num_parameters
from ..incident import REPORT_CAPACITY_BYTES
from ..model import SIZES, private_tables

SIZE = SIZES["4B"]
CAPACITY_BYTES = REPORT_CAPACITY_BYTES
# totals of the report's table; its figures turn out to be in GiB
AFTER_FIRST_LAYER_BYTES, AFTER_FORWARD_BYTES = int(25.87 * GiB), int(62.97 * GiB)
FLOAT32 = "linear_cross_entropy_float32"
# overrides for a checkpointed train step of the tiny model
TINY = ("model.size=tiny", "model.attention_type=dense", "model.loss_form=recompute", "data.context_length=300")


class Evidence(evidence.Evidence):
    incident_name, op = "long_context_loss", "linear_cross_entropy"

    @property
    def dims(self) -> dict[str, int]:
        """B batch, T tokens, D width, V vocabulary, C tokens of a chunk, L layers, K head width, e item size."""
        case = self.case.formula_values
        own = {"B": self.config().batch_size, "T": case["N"], "C": case["rows_per_chunk"]}
        return own | {name: case[name] for name in "DVe"} | {"L": SIZE.layers, "K": SIZE.head_width}

    @property
    def tiny_dims(self) -> dict[str, int]:
        """The dims of the tiny model's step, with the item size of bfloat16."""
        size = SIZES["tiny"]
        return {"T": self.config(*TINY).data.context_length, "D": size.width, "V": size.vocabulary, "e": 2}

    def contract(self, op: str = "") -> Contract:
        """The contract of ``op``; ``FLOAT32`` is the loss with its logits cast to float32."""
        return _float32_contract() if op == FLOAT32 else super().contract(op)

    @property
    def logits_bytes(self) -> int:
        return self.evaluate("B*T*V*e")

    @property
    def layer_inputs_bytes(self) -> int:
        """The bytes that checkpointing keeps: the inputs of all layers."""
        return self.evaluate("L*B*T*D*e")

    # ---------------------------------------------------------------- the model
    @functools.cached_property
    def parameter_bytes(self) -> int:
        """The bytes of the report's model, in bfloat16."""
        return 2 * num_parameters(self.model())

    @functools.cached_property
    def table_bytes(self) -> int:
        """The bytes of a RoPE table in every layer."""
        tables = private_tables(SIZE, self.dims["T"], device="meta", dtype=torch.bfloat16)
        return sum(part.nbytes for pair in tables for part in pair)

    @property
    def held_beside_loss_bytes(self) -> int:
        """The bytes of parameters, RoPE tables and the inputs of all layers."""
        return self.parameter_bytes + self.table_bytes + self.layer_inputs_bytes


@functools.cache
def _float32_contract() -> Contract:
    """The old loss and the reported loop with logits cast to float32, as the report describes its intermediates."""
    (contract,) = contracts([Evidence.op])
    case = contract.cases["incident"]
    return Contract(
        FLOAT32,
        naive=_naive_in_float32,
        forms={"reported": _reported_in_float32},
        dims=contract.dims,
        inputs=[dataclasses.replace(spec, sometimes=None) for spec in contract.inputs if not spec.optional],
        cases={case.name: {**case.dims, "dtype": case.dtype}},
    )


def _naive_in_float32(hidden_ND: torch.Tensor, weight_VD: torch.Tensor, target_N: torch.Tensor) -> torch.Tensor:
    # a variable, as in the report's code, keeps the logits alive after the cast
    logits_NV = F.linear(hidden_ND, weight_VD)
    return F.cross_entropy(logits_NV.float(), target_N)


def _reported_in_float32(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, target_N: torch.Tensor, *, rows_per_chunk: int
) -> torch.Tensor:
    total = torch.zeros((), device=hidden_ND.device)
    for hidden_CD, target_C in zip(hidden_ND.split(rows_per_chunk), target_N.split(rows_per_chunk), strict=True):
        logits_CV = F.linear(hidden_CD, weight_VD)
        total = total + F.cross_entropy(logits_CV.float(), target_C, reduction="sum")
    return total / target_N.numel()
