"""Operators without a fake kernel, as the parts that their CUDA kernels are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses import fake_tensor

aten = torch.ops.aten

_BOXES_PER_WORD = 64


def _suppress_boxes(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """``torchvision.ops.nms``: boxes in the order of their scores, and a bit for each pair that overlaps."""
    count = dets.shape[0]
    order = scores.sort(stable=True, dim=0, descending=True)[1]
    in_order = dets.index_select(0, order).contiguous()
    num_words = count * ((count + _BOXES_PER_WORD - 1) // _BOXES_PER_WORD)
    overlaps = torch.empty(num_words, dtype=torch.int64, device=dets.device)
    is_kept = torch.empty(count, dtype=torch.bool, device=dets.device)
    kept = order.masked_select(is_kept)
    del in_order, overlaps  # they are alive until the end
    return kept


# ---------------------------------------------------------------- the fast path of transformer encoders
def _encode(
    src: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    *weights: Any,
) -> torch.Tensor:
    """``nn.TransformerEncoderLayer`` in inference. ``weights`` are those of both norms and both linear layers, then an
    optional mask and its kind."""
    weight_1, bias_1, weight_2, bias_2, *linear = weights[:8]
    if src.numel() == 0:
        return src.clone()
    x = src
    if norm_first:
        x = F.layer_norm(x, (embed_dim,), weight_1, bias_1, eps)
    packed = (qkv_weight, qkv_bias, proj_weight, proj_bias)
    x = _attend(x, x, x, embed_dim, num_heads, *packed, weights[8] if len(weights) > 8 else None, False)[0]
    x.add_(src)
    if not norm_first:
        x = F.layer_norm(x, (embed_dim,), weight_1, bias_1, eps)
    before = x
    if norm_first:
        x = F.layer_norm(x, (embed_dim,), weight_2, bias_2, eps)
    rows = x.view(-1, x.shape[-1])
    hidden = aten._addmm_activation(linear[1], rows, linear[0].t(), use_gelu=use_gelu)
    x = hidden.view(*x.shape[:2], -1)
    del rows, hidden
    x = aten.addmm(linear[3], x.view(-1, x.shape[-1]), linear[2].t()).view(before.shape)
    x.add_(before)
    return x if norm_first else F.layer_norm(x, (embed_dim,), weight_2, bias_2, eps)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``nn.MultiheadAttention`` in inference, if queries, keys and values are one tensor: by a fused kernel if there is
    no mask, else by products whose probabilities are all in memory."""
    if not (query is key is value):
        raise fake_tensor.UnsupportedOperatorException(aten._native_multi_head_attention.default)
    batch, length, _ = query.shape
    heads = query.view(batch, length, num_heads, -1).transpose(1, 2)
    is_fused = mask is None and not need_weights and heads.shape[-1] % 8 == 0
    if is_fused and torch._fused_sdp_choice(heads, heads, heads) in _FLASH_OR_EFFICIENT:
        projected = F.linear(query, qkv_weight, qkv_bias)
        q, k, v = (part.view(batch, length, num_heads, -1).transpose(1, 2) for part in projected.chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, embed_dim)
        return F.linear(attended, proj_weight, proj_bias), None  # what was projected is alive until here
    projected = aten.mm(query.view(-1, embed_dim), qkv_weight.t()).view(batch, length, -1)
    q, k, v = aten._transform_bias_rescale_qkv(projected, qkv_bias, num_heads)
    del projected
    scores = q.reshape(-1, length, q.shape[-1]).bmm(k.reshape(-1, length, q.shape[-1]).transpose(1, 2))
    scores = scores.view(batch, num_heads, length, length)
    scores = scores.softmax(-1) if mask is None else aten._masked_softmax(scores, mask, 3, mask_type)
    aten.bmm.out(
        scores.view(-1, length, length), v.reshape(-1, length, q.shape[-1]), out=q.view(-1, length, q.shape[-1])
    )
    joined = q.transpose(1, 2).reshape(-1, embed_dim)
    result = aten.addmm(proj_bias, joined, proj_weight.t()).view(batch, length, -1)
    if not need_weights:
        return result, None
    return result, scores.sum(1) / num_heads if average_attn_weights else scores


def _least_squares(
    a: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[torch.Tensor, ...]:
    """``torch.linalg.lstsq`` by QR, the only driver on a GPU: copies of both, of which the second has room for the
    longer side. Without singular values, no shape depends on values."""
    is_vector = a.dim() - 1 == b.dim() and b.shape == a.shape[:-1]
    columns = b.unsqueeze(-1) if is_vector else b
    (rows, unknowns), batch = a.shape[-2:], torch.broadcast_shapes(a.shape[:-2], columns.shape[:-2])
    factors = a.expand(*batch, *a.shape[-2:]).mT.contiguous()
    solved = columns.new_zeros((*batch, columns.shape[-1], max(rows, unknowns))).mT
    solved[..., :rows, :].copy_(columns)
    del factors  # it is alive until here
    residuals = solved[..., unknowns:, :].square().sum(-2) if rows > unknowns else a.new_empty((0,))
    solution = solved[..., :unknowns, :]
    nothing = a.new_empty((0,)), a.new_empty((0,))
    rank, singular = nothing[0].to(torch.int64), nothing[1]
    return solution.squeeze(-1) if is_vector else solution, residuals, rank, singular


_FLASH_OR_EFFICIENT = (1, 2)

PARTS: dict[str, Callable[..., Any]] = {
    "torchvision.nms": _suppress_boxes,
    "aten._transformer_encoder_layer_fwd": _encode,
    "aten._native_multi_head_attention": _attend,
    "aten.linalg_lstsq": _least_squares,
}
"""The name of an operator -> a function that runs its parts."""

UNBOUNDED = frozenset(("aten.linalg_lstsq",))
"""Operators in ``PARTS`` whose kernels take a workspace that is not among their parts."""
