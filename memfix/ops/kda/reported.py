"""The fix as the incident report shipped it: transitions and writes made in chunks, then joined by ``torch.cat``.

It is kept to show where it fails. A chunk's temporaries are small, but the list of chunks and the whole that ``cat``
makes are alive together. The scan then reads the whole, which training also holds for backward.
"""

# B batch, T tokens, H heads, K width of a key, V width of a value, S sequences

from __future__ import annotations

import torch

from ..derivatives import without_autocast
from .arguments import DEFAULT_CHUNK_SIZE, KdaOptions, KdaTensors, Outputs, kda_form, scale_of


@kda_form
def reported_kda(tensors: KdaTensors, options: KdaOptions) -> Outputs:
    """Equals ``S = transition_t @ S + write_t; o_t = scale * S^T q_t``.

    The peak does not depend on the chunk size: four ``[B, T, H, K, K]``, of the chunks and of what ``cat`` makes.
    """
    q_BTHK = tensors.q_BTHK
    scale = scale_of(q_BTHK, options.scale)
    q, k, v, g, beta = (tensor.to(tensors.wide) for tensor in tensors.inputs)
    transitions_BTHKK, writes_BTHKV = precompute_updates(k, v, g, beta, memory_chunk_size=options.chunk_size)
    tokens = list(zip(transitions_BTHKK.unbind(1), writes_BTHKV.unbind(1), q.unbind(1), strict=True))
    state_SHKV = tensors.initial_state_SHKV
    if state_SHKV is None:
        state_SHKV = q.new_zeros(tensors.state_size)
    outputs, final_states = [], []
    with without_autocast(q_BTHK):
        for span in tensors.spans:
            state_BHKV = state_SHKV[span.states]
            for transition_BHKK, write_BHKV, q_BHK in tokens[span.tokens]:
                state_BHKV = transition_BHKK @ state_BHKV + write_BHKV
                outputs.append((q_BHK.unsqueeze(-2) @ state_BHKV).squeeze(-2))
            final_states.append(state_BHKV)
    return (scale * torch.stack(outputs, dim=1)).to(q_BTHK.dtype), torch.cat(final_states)


def precompute_updates(
    k_BTHK: torch.Tensor,
    v_BTHV: torch.Tensor,
    g_BTHK: torch.Tensor,
    beta_BTH: torch.Tensor,
    memory_chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The report's function: return ``Diag(a) - beta k (k*a)^T`` and ``beta k v^T``, made a chunk at a time."""
    chunks = zip(
        *(tensor.split(memory_chunk_size, dim=1) for tensor in (k_BTHK, v_BTHV, g_BTHK, beta_BTH)), strict=True
    )
    made = [_transitions_and_writes(*chunk) for chunk in chunks]
    transitions, writes = zip(*made, strict=True)
    return torch.cat(transitions, dim=1), torch.cat(writes, dim=1)


def _transitions_and_writes(
    k_BCHK: torch.Tensor, v_BCHV: torch.Tensor, g_BCHK: torch.Tensor, beta_BCH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    decay_BCHK = g_BCHK.exp()
    written_BCHK = beta_BCH.unsqueeze(-1) * k_BCHK
    decay_diag = torch.diag_embed(decay_BCHK)
    forget_rank1 = written_BCHK.unsqueeze(-1) * (k_BCHK * decay_BCHK).unsqueeze(-2)
    transitions_BCHKK = decay_diag - forget_rank1
    return transitions_BCHKK, written_BCHK.unsqueeze(-1) * v_BCHV.unsqueeze(-2)
