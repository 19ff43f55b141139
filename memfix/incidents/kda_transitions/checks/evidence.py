"""What the checks of this report measure beside readings of its op: real calls of it, and layers of its model."""

# B batch, T tokens, H heads, K key width, V value width, C tokens of a chunk

from __future__ import annotations

import functools
from typing import Any

import torch

from ....laws import NAIVE
from ....units import parse_bytes
from ... import evidence
from ..incident import Grown, grown, incident

CAPACITY_BYTES = parse_bytes(incident.capacity or "")

# the statement that failed, in naive and, a chunk at a time, in the reported fix
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
        """Of one tensor of transitions."""
        return self.bytes("B*T*H*K*K")

    @property
    def full_bytes(self) -> int:
        """The same in float32."""
        return self.bytes("B*T*H*K*K*e")

    @property
    def full_tensors_at_failure(self) -> int:
        """How many tensors of transitions' size are alive in dense KDA when the line that failed has run."""
        return sum(buffer.bytes == self.full_bytes for buffer in self.alive_after(NAIVE, SUBTRACTION))

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
        outputs = self.contract().function(form)(*tensors, **options)
        total = sum((output * output.detach().cos()).sum() for output in outputs)
        return [*(output.detach() for output in outputs), *torch.autograd.grad(total, tensors)]

    # ---------------------------------------------------------------- slow: the report's model
    @functools.cached_property
    def dense_layers(self) -> Grown:
        """What each dense layer of hn_xs adds to a train step, and how many fit the report's card."""
        return grown(self.config(f"model.kda_form={NAIVE}"), CAPACITY_BYTES, self.meter, self.say)
