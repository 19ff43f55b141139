"""The checks of the claims of this report, one file per subject, and the evidence that they share."""

# B batch, T tokens, H heads, K key width, V value width, C tokens of a chunk

from __future__ import annotations

import functools
from typing import Any

import torch

from ....laws import NAIVE
from ....units import parse_bytes
from ... import evidence
from ..incident import LayerGrowth, incident, layer_growth

CAPACITY_BYTES = parse_bytes(incident.capacity or "")

# parts of source lines: the subtraction that failed, in naive and, for each chunk, in the reported fix
SUBTRACTION = "= decay_diag - forget_rank1"
DIAGONAL = "decay_diag = torch.diag_embed"


class Evidence(evidence.Evidence):
    incident_name, op = "kda_transitions", "kda"

    @property
    def dims(self) -> dict[str, int]:
        """B batch, T tokens, H heads, K key width, V value width, C tokens of a chunk, e item size."""
        case = self.case.formula_values
        return {**{name: case[name] for name in "BTHKVe"}, "C": case["chunk_size"]}

    @property
    def elements(self) -> int:
        """The number of elements of one tensor of transitions."""
        return self.evaluate("B*T*H*K*K")

    @property
    def full_bytes(self) -> int:
        """The bytes of one tensor of transitions in float32."""
        return self.evaluate("B*T*H*K*K*e")

    @property
    def full_tensors_at_failure(self) -> int:
        """How many tensors of the transitions' size are alive in naive KDA when the line that failed has run."""
        return sum(buffer.bytes == self.full_bytes for buffer in self.alive_after(NAIVE, SUBTRACTION))

    # ---------------------------------------------------------------- real tensors, on the CPU
    def tensors(self, num_tokens: int, *, heads: int = 2, width: int = 8, batch: int = 2) -> list[torch.Tensor]:
        """q, k, v, g and beta in float64, all of which require a gradient; every call draws the same values."""
        draw = torch.Generator().manual_seed(num_tokens)
        shape = (batch, num_tokens, heads, width)
        q, k, v, g = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(4))
        beta = torch.rand(shape[:-1], generator=draw, dtype=torch.float64)
        made = (q, torch.nn.functional.normalize(k, dim=-1), v, -g.abs(), beta)
        return [tensor.requires_grad_() for tensor in made]

    def computed(self, form: str, num_tokens: int, **options: Any) -> list[torch.Tensor]:
        """The output, the final state, and the gradients of all inputs."""
        tensors = self.tensors(num_tokens)
        outputs = self.contract().function(form)(*tensors, **options)
        total = sum((output * output.detach().cos()).sum() for output in outputs)
        return [*(output.detach() for output in outputs), *torch.autograd.grad(total, tensors)]

    # ---------------------------------------------------------------- slow: the report's model
    @functools.cached_property
    def dense_layers(self) -> LayerGrowth:
        """What each layer of hn_xs with naive KDA adds to a train step, and how many fit the report's card."""
        return layer_growth(self.config(f"model.kda_form={NAIVE}"), CAPACITY_BYTES, self.meter, self.say)
