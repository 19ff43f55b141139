"""The reference: KDA with every token's transition matrix and write materialised, and then a scan over them."""

# B batch, T tokens, H heads, K width of a key, V width of a value, S sequences

from __future__ import annotations

import torch


def naive_kda(
    q_BTHK: torch.Tensor,
    k_BTHK: torch.Tensor,
    v_BTHV: torch.Tensor,
    g_BTHK: torch.Tensor,
    beta_BTH: torch.Tensor,
    initial_state_SHKV: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``S = transition_t @ S + write_t; o_t = scale * S^T q_t``, with all transitions and writes made first.

    Four tensors of ``[B, T, H, K, K]`` are alive while the transitions are made, and again in backward; two are held
    between forward and backward. The dtype of the computation is float32 or wider.
    """
    wide = torch.promote_types(q_BTHK.dtype, torch.float32)
    scale = q_BTHK.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, g, beta = (tensor.to(wide) for tensor in (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH))
    transitions_BTHKK, writes_BTHKV = _transitions_and_writes(k, v, g, beta)
    transitions, writes, queries = transitions_BTHKK.unbind(1), writes_BTHKV.unbind(1), q.unbind(1)

    if initial_state_SHKV is None:
        num_states = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        initial_state_SHKV = writes_BTHKV.new_zeros(num_states, *writes_BTHKV.shape[2:])
    if cu_seqlens is None:
        spans = [(0, len(queries), initial_state_SHKV)]
    else:
        bounds = cu_seqlens.tolist()
        spans = list(zip(bounds, bounds[1:], initial_state_SHKV.split(1), strict=False))
    outputs, final_states = [], []
    for start, stop, state_BHKV in spans:
        for t in range(start, stop):
            state_BHKV = transitions[t] @ state_BHKV + writes[t]
            outputs.append((queries[t].unsqueeze(-2) @ state_BHKV).squeeze(-2))
        final_states.append(state_BHKV)
    o_BTHV = (scale * torch.stack(outputs, dim=1)).to(q_BTHK.dtype)
    return o_BTHV, torch.cat(final_states)


def _transitions_and_writes(
    k_BTHK: torch.Tensor, v_BTHV: torch.Tensor, g_BTHK: torch.Tensor, beta_BTH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``Diag(a) - beta k (k*a)^T`` and ``beta k v^T`` of every token, with ``a = exp(g)``."""
    decay_BTHK = g_BTHK.exp()
    written_BTHK = beta_BTH.unsqueeze(-1) * k_BTHK
    decay_diag = torch.diag_embed(decay_BTHK)
    forget_rank1 = written_BTHK.unsqueeze(-1) * (k_BTHK * decay_BTHK).unsqueeze(-2)
    transitions_BTHKK = decay_diag - forget_rank1
    writes_BTHKV = written_BTHK.unsqueeze(-1) * v_BTHV.unsqueeze(-2)
    return transitions_BTHKK, writes_BTHKV
