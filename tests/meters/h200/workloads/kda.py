"""Linear recurrences in plain torch: KDA with its transition matrices written out, and a gated scan."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from memfix.meters.base import Step

from .registry import Workloads, drop_gradients, leaf

WORKLOADS = Workloads()


def _inputs(device: str, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decay, key, value and write strength of one sequence."""
    batch, heads, width = 1, 8, 128
    decay = torch.rand(batch, tokens, heads, width, device=device).requires_grad_()
    key, value = (leaf(batch, tokens, heads, width, device=device, dtype=torch.float32) for _ in range(2))
    strength = torch.rand(batch, tokens, heads, 1, device=device).requires_grad_()
    return decay, key, value, strength


def _transitions(decay: torch.Tensor, key: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
    return torch.diag_embed(decay) - (strength * key).unsqueeze(-1) * (key * decay).unsqueeze(-2)


@WORKLOADS.add
def kda_dense(device: str) -> Step:
    decay, key, value, strength = _inputs(device, tokens=2048)

    def step() -> None:
        drop_gradients(decay, key, value, strength)
        _transitions(decay, key, strength).sum().backward()

    return step


@WORKLOADS.add
def kda_dense_scan(device: str) -> Step:
    tokens = 128
    decay, key, value, strength = _inputs(device, tokens)

    def step() -> None:
        drop_gradients(decay, key, value, strength)
        transitions = _transitions(decay, key, strength)
        updates = (strength * key).unsqueeze(-1) * value.unsqueeze(-2)
        state = torch.zeros_like(transitions[:, 0])
        outputs = []
        for token in range(tokens):
            state = transitions[:, token] @ state + updates[:, token]
            outputs.append((key[:, token].unsqueeze(-2) @ state).squeeze(-2))
        torch.stack(outputs, 1).sum().backward()

    return step


@WORKLOADS.add
def kda_chunk64(device: str) -> Step:
    tokens, tokens_per_chunk = 256, 64
    inputs = _inputs(device, tokens)

    def chunk(
        state: torch.Tensor, decay: torch.Tensor, key: torch.Tensor, value: torch.Tensor, strength: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        transitions = _transitions(decay, key, strength)
        updates = (strength * key).unsqueeze(-1) * value.unsqueeze(-2)
        # written out a second time: who holds the state is part of the workload
        outputs = []
        for token in range(decay.shape[1]):
            state = transitions[:, token] @ state + updates[:, token]
            outputs.append((key[:, token].unsqueeze(-2) @ state).squeeze(-2))
        return state, torch.stack(outputs, 1)

    def step() -> None:
        drop_gradients(*inputs)
        batch, _, heads, width = inputs[0].shape
        state = torch.zeros(batch, heads, width, width, device=device)
        outputs = []
        for start in range(0, tokens, tokens_per_chunk):
            of_chunk = (tensor[:, start : start + tokens_per_chunk] for tensor in inputs)
            state, output = checkpoint(chunk, state, *of_chunk, use_reentrant=False)
            outputs.append(output)
        torch.cat(outputs, 1).sum().backward()

    return step


@WORKLOADS.add
def scan_elementwise(device: str) -> Step:
    batch, tokens, width = 256, 128, 4096
    x, gate = (leaf(batch, tokens, width, device=device) for _ in range(2))

    def step() -> None:
        drop_gradients(x, gate)
        state = torch.zeros(batch, width, device=device, dtype=torch.bfloat16)
        states = []
        for token in range(tokens):
            state = torch.sigmoid(gate[:, token]) * state + x[:, token]
            states.append(state)
        torch.stack(states, 1).sum().backward()

    return step
