"""KDA token by token on the state, without transition matrices: ``kda_mode: sequential`` of the incident report."""

# B batch, T tokens, H heads, K width of a key, V width of a value, S sequences

from __future__ import annotations

import torch

from ..derivatives import without_autocast
from .arguments import KdaOptions, KdaTensors, Outputs, kda_form, scale_of


@kda_form
def sequential_kda(tensors: KdaTensors, options: KdaOptions) -> Outputs:
    """Equals ``S = (I - beta k k^T) Diag(exp(g)) S + beta k v^T; o = scale * S^T q``, token by token.

    Without gradients the peak is a few states. Autograd saves the state of every token, ``T*K*V`` numbers per head:
    less than transitions and writes, more than the chunked forms.
    """
    q_BTHK, wide = tensors.q_BTHK, tensors.wide
    scale = scale_of(q_BTHK, options.scale)
    state_SHKV = tensors.initial_state_SHKV
    if state_SHKV is None:
        state_SHKV = q_BTHK.new_zeros(tensors.state_size, dtype=wide)
    tokens = list(zip(*(tensor.unbind(1) for tensor in tensors.inputs), strict=True))
    outputs, final_states = [], []
    with without_autocast(q_BTHK):
        for span in tensors.spans:
            # later states inherit the strides of the first, and matmul would copy one that is not contiguous
            state_BHKV = state_SHKV[span.states].contiguous()
            for token in tokens[span.tokens]:
                q_BHK, k_BHK, v_BHV, g_BHK, beta_BH = (part.to(wide) for part in token)
                o_BHV, state_BHKV = step(q_BHK, k_BHK, v_BHV, g_BHK, beta_BH, state_BHKV, scale)
                outputs.append(o_BHV.to(q_BTHK.dtype))
            final_states.append(state_BHKV)
    return torch.stack(outputs, dim=1), torch.cat(final_states)


def step(
    q_BHK: torch.Tensor,
    k_BHK: torch.Tensor,
    v_BHV: torch.Tensor,
    g_BHK: torch.Tensor,
    beta_BH: torch.Tensor,
    state_BHKV: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of one token and the state after it. All tensors have one dtype.

    For the read the decay multiplies the key, not the state, so autograd saves one state per token, not two.
    """
    decay_BHK = g_BHK.exp()
    read_BHV = _read(state_BHKV, k_BHK * decay_BHK)
    change_BHV = beta_BH.unsqueeze(-1) * (v_BHV - read_BHV)
    decayed_BHKV = state_BHKV * decay_BHK.unsqueeze(-1)
    state_BHKV = torch.addcmul(decayed_BHKV, k_BHK.unsqueeze(-1), change_BHV.unsqueeze(-2))
    return scale * _read(state_BHKV, q_BHK), state_BHKV


def _read(state_BHKV: torch.Tensor, key_BHK: torch.Tensor) -> torch.Tensor:
    return (key_BHK.unsqueeze(-2) @ state_BHKV).squeeze(-2)
