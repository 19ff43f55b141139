"""Native sparse attention in pure torch: a chunk of queries at a time reads only the keys that it attends to.

Held for backward are the selected blocks and the compressed keys and values; gathered keys, scores and probabilities
are recomputed chunk by chunk. 16-bit inputs are upcast to float32, keys and values at once and queries by the chunk:
scores of a trained model reach tens, and rounding them to 16 bits would be the largest error of all.
"""

# B batch, T tokens, G key-value heads, R query heads of each, N = B x G, D width of a head, L places of a compression
# block, M compressed blocks, C queries of a chunk, X = C x R, K keys that a query may read, n selected blocks;
# Z x Y is N x X, or in the selected branch (N x C) x R

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..derivatives import first_derivative_only, without_autocast
from ..launches import num_tiles
from .arguments import NUM_BRANCHES, Blocks, NsaOptions, NsaTensors, nsa_form, scale_of
from .branches import Branch, CompressedBranch, SelectedBranch, WindowBranch, as_batch
from .compression import add_gradient_of_places, add_gradient_of_tokens, compress, place_weights
from .selection import NONE_SELECTED, SharedTokens, probabilities_in_float64, select_blocks

COMPRESSED, SELECTED, WINDOW = range(NUM_BRANCHES)


@nsa_form
def chunked_nsa(tensors: NsaTensors, options: NsaOptions) -> torch.Tensor:
    """Equals ``sum(gate * attention(q, keys, values))`` over compressed, selected and window keys, scores never whole.

    Peak above inputs in a 16-bit train step, ``C = queries_per_chunk``, ``H = G*R`` and ``M`` compressed blocks: output
    and gradient of q, ``4*B*T*H*D``; k and v in float32 and their sums, ``16*B*T*G*D``; the selection,
    ``4*B*T*G*num_selected``; and the largest tensors of a chunk, gathered keys or their gradients
    ``4*B*C*G*num_selected*select_block*D``, or compressed weights and their gradients ``12*B*C*H*M``. Nothing has
    two axes of ``T``. Backward may run more than once.
    """
    return _Chunked.apply(*tensors, options, tensors.wants_gradient)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        *inputs, options, wants_gradient = given
        tensors = NsaTensors(*inputs)
        with without_autocast(tensors.q_BTGRD):
            selecting_k_NMD, v_NMD = _compressed(tensors, options)
            k_NMD = selecting_k_NMD.to(v_NMD.dtype)
            call = _Call(tensors, k_NMD, v_NMD, options)
            out_BTGRD, selected_NTn = _forward(call, selecting_k_NMD, wants_gradient)
        if wants_gradient:
            ctx.save_for_backward(*tensors, k_NMD, v_NMD, selected_NTn)
        ctx.options = options
        return out_BTGRD

    @staticmethod
    @first_derivative_only("nsa")
    def backward(ctx: Any, upstream_BTGRD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *inputs, k_NMD, v_NMD, selected_NTn = ctx.saved_tensors
        tensors = NsaTensors(*inputs)
        with without_autocast(upstream_BTGRD):
            call = _Call(tensors, k_NMD, v_NMD, ctx.options)
            wants_q, wants_k, wants_v, wants_gates, wants_places = ctx.needs_input_grad[:5]
            sums = _Sums(call, wants_k, wants_v, wants_places)
            grad_q, grad_gates = _backward(call, upstream_BTGRD, selected_NTn, sums, wants_q, wants_gates)
            grad_k, grad_v, grad_places = sums.finished(call, tensors.position_embedding_LD)
        return grad_q, grad_k, grad_v, grad_gates, grad_places, None, None


@dataclass(frozen=True)
class _Chunk:
    """Queries that are computed together: their slice of T, their positions, and those repeated for every head."""

    tokens: slice
    query_C: torch.Tensor
    query_X: torch.Tensor


class _Call:
    """The tensors and options that all chunks of a call share. Keys and values have the dtype ``wide``, >= float32."""

    def __init__(self, tensors: NsaTensors, k_NMD: torch.Tensor, v_NMD: torch.Tensor, blocks: NsaOptions) -> None:
        self.q_BTGRD, self.gates_BTGR3, self.k_NMD, self.v_NMD = tensors.q_BTGRD, tensors.gates_BTGR3, k_NMD, v_NMD
        self.blocks, self.scale, self.wide = blocks, scale_of(tensors.q_BTGRD, blocks.scale), k_NMD.dtype
        start_M = torch.arange(k_NMD.shape[1], device=k_NMD.device) * blocks.compress_stride
        self.end_M = start_M + (blocks.compress_block - 1)
        # contiguous, for the selected branch gathers their rows
        self.k_BTGD, self.v_BTGD = (_contiguous(x_BTGD, self.wide) for x_BTGD in (tensors.k_BTGD, tensors.v_BTGD))
        self.nothing = k_NMD.new_zeros(1, 1, 1)

    def rows(self, x_BTGRD: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
        """Return the rows of a chunk, head by head: ``[N, X, ...]``, contiguous and upcast."""
        batch, _, groups, _, width = x_BTGRD.shape
        x_BGCRD = x_BTGRD[:, chunk.tokens].transpose(1, 2)
        return _contiguous(x_BGCRD, self.wide).view(batch * groups, -1, width)

    def chunks(self) -> Iterator[_Chunk]:
        _, num_tokens, _, heads, _ = self.q_BTGRD.shape
        queries_per_chunk = self.blocks.queries_per_chunk
        query_T = torch.arange(num_tokens, device=self.q_BTGRD.device)
        query_TR = query_T.repeat_interleave(heads)
        for start in range(0, num_tokens, queries_per_chunk):
            stop = min(start + queries_per_chunk, num_tokens)
            yield _Chunk(slice(start, stop), query_T[start:stop], query_TR[start * heads : stop * heads])

    def compressed_branch(self, chunk: _Chunk) -> CompressedBranch | None:
        """Return the compressed branch, or None where no block is complete for any query of the chunk."""
        blocks, tokens = self.blocks, chunk.tokens
        if not blocks.num_compressed(tokens.stop):
            return None
        # all that overlap a selection block up to the last query's, complete or not: selection indexes them
        overlapping = slice(num_tiles(blocks.num_selectable(tokens.stop) * blocks.select_block, blocks.compress_stride))
        hidden_XM = self.end_M[overlapping] > chunk.query_X[:, None]
        none_complete = tokens.start < blocks.compress_block - 1
        return CompressedBranch(self.k_NMD[:, overlapping], self.v_NMD[:, overlapping], hidden_XM, none_complete)

    def token_branches(self, chunk: _Chunk, selected_NCn: torch.Tensor) -> Iterator[tuple[int, Branch]]:
        yield SELECTED, SelectedBranch(self.k_BTGD, self.v_BTGD, selected_NCn, chunk.query_C, self.blocks)
        yield WINDOW, WindowBranch(self.k_BTGD, self.v_BTGD, chunk.query_X, chunk.tokens, self.blocks)

    def weights(self, branch: Branch, q_NXD: torch.Tensor) -> torch.Tensor:
        """Return the softmax of the scores, ``[Z, Y, K]``, zeros for a query that sees nothing."""
        q_ZYD = as_batch(q_NXD, branch)
        scores_ZYK = torch.baddbmm(self.nothing, q_ZYD, branch.keys().mT, beta=0, alpha=self.scale)
        weights_ZYK = scores_ZYK.masked_fill_(branch.hidden, torch.finfo(self.wide).min).softmax(-1)
        return weights_ZYK.masked_fill_(branch.hidden, 0) if branch.may_see_nothing else weights_ZYK


def _contiguous(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``x`` contiguous and in ``dtype``: itself if it is both, else one copy."""
    return x.to(dtype, memory_format=torch.contiguous_format).contiguous()


def _write_rows(x_BCGRD: torch.Tensor, rows_NXD: torch.Tensor) -> None:
    """Write ``[N, X, ...]`` to ``[B, C, G, R, ...]``, the same rows in the order of the inputs."""
    batch, num_queries, groups, heads, width = x_BCGRD.shape
    x_BCGRD.copy_(rows_NXD.view(batch, groups, num_queries, heads, width).transpose(1, 2))


# ---------------------------------------------------------------- forward
def _compressed(tensors: NsaTensors, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """Return compressed keys, in float64 because they select blocks, and values, in float32 or wider, ``[N, M, D]``."""
    _, k_BTGD, v_BTGD, _, position_embedding_LD = tensors
    num_blocks = blocks.num_compressed(k_BTGD.shape[1])
    weight_LD = place_weights(position_embedding_LD, blocks.compress_block, k_BTGD, torch.float64)
    wide_LD = weight_LD.to(torch.promote_types(v_BTGD.dtype, torch.float32))
    k_BMGD = compress(k_BTGD, weight_LD, blocks.compress_stride, num_blocks)
    v_BMGD = compress(v_BTGD, wide_LD, blocks.compress_stride, num_blocks)
    k_NMD, v_NMD = (x_BMGD.transpose(1, 2).contiguous().flatten(0, 1) for x_BMGD in (k_BMGD, v_BMGD))
    return k_NMD, v_NMD


def _forward(
    call: _Call, selecting_k_NMD: torch.Tensor, keeps_selection: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    q_BTGRD, blocks = call.q_BTGRD, call.blocks
    batch, num_tokens, groups, _, _ = q_BTGRD.shape
    out_BTGRD = torch.empty_like(q_BTGRD, memory_format=torch.contiguous_format)
    selected_NTn = None
    if keeps_selection:
        size = (batch * groups, num_tokens, blocks.num_selected)
        selected_NTn = q_BTGRD.new_full(size, NONE_SELECTED, dtype=torch.int32)
    shared = SharedTokens(blocks, num_tokens, q_BTGRD.device)
    for chunk in call.chunks():
        q_NXD = call.rows(q_BTGRD, chunk)
        gates = call.rows(call.gates_BTGR3, chunk).split(1, dim=-1)
        sum_NXD = torch.zeros_like(q_NXD)
        compressed = call.compressed_branch(chunk)
        selected_NCn = _selected(call, q_NXD, selecting_k_NMD, shared, chunk, compressed)
        if selected_NTn is not None:
            selected_NTn[:, chunk.tokens, : selected_NCn.shape[-1]].copy_(selected_NCn)
        if compressed is not None:
            sum_NXD.addcmul_(_attend(call, compressed, q_NXD), gates[COMPRESSED])
        for kind, branch in call.token_branches(chunk, selected_NCn):
            sum_NXD.addcmul_(_attend(call, branch, q_NXD), gates[kind])
        _write_rows(out_BTGRD[:, chunk.tokens], sum_NXD)
    return out_BTGRD, selected_NTn


def _selected(
    call: _Call,
    q_NXD: torch.Tensor,
    selecting_k_NMD: torch.Tensor,
    shared: SharedTokens,
    chunk: _Chunk,
    compressed: CompressedBranch | None,
) -> torch.Tensor:
    """Return the blocks that each query of a chunk reads, ``[N, C, n]``."""
    blocks, num_queries = call.blocks, chunk.query_C.shape[0]
    num_selectable = blocks.num_selectable(chunk.tokens.stop)
    if compressed is None:
        scores_NCS = q_NXD.new_zeros(q_NXD.shape[0], num_queries, num_selectable, dtype=torch.float64)
    else:
        overlapping = slice(compressed.k.shape[1])
        weights_NXM = probabilities_in_float64(q_NXD, selecting_k_NMD[:, overlapping], compressed.hidden, call.scale)
        weights_NCM = weights_NXM.unflatten(1, (num_queries, -1)).sum(2)
        del weights_NXM
        scores_NCS = shared.scores(weights_NCM, num_selectable)
    own_C1 = (chunk.query_C // blocks.select_block)[:, None]
    return select_blocks(scores_NCS, own_C1, blocks.num_selected)


def _attend(call: _Call, branch: Branch, q_NXD: torch.Tensor) -> torch.Tensor:
    """Return the softmax attention of a chunk of queries to the keys of one branch."""
    weights_ZYK = call.weights(branch, q_NXD)
    return torch.bmm(weights_ZYK, branch.values()).view_as(q_NXD)


# ---------------------------------------------------------------- backward
def _backward(
    call: _Call,
    upstream_BTGRD: torch.Tensor,
    selected_NTn: torch.Tensor,
    sums: _Sums,
    wants_q: bool,
    wants_gates: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of q and of the gates, where wanted; add those of keys and values to ``sums``."""
    grad_q_BTGRD, grad_gates_BTGR3 = (
        torch.empty_like(tensor, memory_format=torch.contiguous_format) if wanted else None
        for tensor, wanted in ((call.q_BTGRD, wants_q), (call.gates_BTGR3, wants_gates))
    )
    for chunk in call.chunks():
        tokens = chunk.tokens
        rows = _Rows(call, upstream_BTGRD, chunk)
        compressed = call.compressed_branch(chunk)
        if compressed is not None:
            _branch_backward(call, compressed, COMPRESSED, rows, sums.k_NMD, sums.v_NMD)
        selected_NCn = selected_NTn[:, tokens, : call.blocks.num_selectable(tokens.stop)]
        for kind, branch in call.token_branches(chunk, selected_NCn):
            _branch_backward(call, branch, kind, rows, sums.k_BTGD, sums.v_BTGD)
        if grad_q_BTGRD is not None:
            _write_rows(grad_q_BTGRD[:, tokens], rows.grad_q_NXD)
        if grad_gates_BTGR3 is not None:
            _write_rows(grad_gates_BTGR3[:, tokens], torch.cat(rows.grad_gates, dim=-1))
    return grad_q_BTGRD, grad_gates_BTGR3


class _Rows:
    """The queries of a chunk, head by head, with their upstream gradients, and their gradients as they are summed."""

    def __init__(self, call: _Call, upstream_BTGRD: torch.Tensor, chunk: _Chunk) -> None:
        self.q_NXD, gates_NX3 = call.rows(call.q_BTGRD, chunk), call.rows(call.gates_BTGR3, chunk)
        self.upstream_NXD = call.rows(upstream_BTGRD, chunk)
        self.grad_q_NXD = torch.zeros_like(self.q_NXD)
        # [N, X, 1] for each branch
        self.gates, self.grad_gates = gates_NX3.split(1, dim=-1), torch.zeros_like(gates_NX3).split(1, dim=-1)


def _branch_backward(
    call: _Call, branch: Branch, kind: int, rows: _Rows, sum_k: torch.Tensor | None, sum_v: torch.Tensor | None
) -> None:
    """Add the gradients of one branch to those of its queries, keys and values, and write that of its gate."""
    weights_ZYK = call.weights(branch, rows.q_NXD)
    values_ZKD = branch.values()
    out_NXD = torch.bmm(weights_ZYK, values_ZKD).view_as(rows.q_NXD)
    rows.grad_gates[kind].copy_(out_NXD.mul_(rows.upstream_NXD).sum(-1, keepdim=True))
    gated_ZYD = as_batch(rows.upstream_NXD * rows.gates[kind], branch)
    grad_ZYK = torch.bmm(gated_ZYD, values_ZKD.mT)
    del values_ZKD
    # in the order of torch's softmax backward: where one weight is nearly 1 its gradient is a small difference, and
    # exactly 0 where there is no other key
    total_ZY1 = (grad_ZYK * weights_ZYK).sum(-1, keepdim=True)
    grad_ZYK.sub_(total_ZY1).mul_(weights_ZYK).mul_(call.scale)
    # read the keys again: kept since the weights were made, they would be alive together with the values
    as_batch(rows.grad_q_NXD, branch).baddbmm_(grad_ZYK, branch.keys())
    if sum_v is not None:
        branch.add_gradient(sum_v, torch.bmm(weights_ZYK.mT, gated_ZYD))
    del weights_ZYK
    if sum_k is not None:
        branch.add_gradient(sum_k, torch.bmm(grad_ZYK.mT, as_batch(rows.q_NXD, branch)))


class _Sums:
    """The sums of the gradients of keys and values; None where a gradient is not wanted."""

    def __init__(self, call: _Call, wants_k: bool, wants_v: bool, wants_places: bool) -> None:
        def zeros(like: torch.Tensor, wanted: bool) -> torch.Tensor | None:
            return torch.zeros_like(like) if wanted else None

        self.k_BTGD, self.v_BTGD = zeros(call.k_BTGD, wants_k), zeros(call.v_BTGD, wants_v)
        self.k_NMD = zeros(call.k_NMD, wants_k or wants_places)
        self.v_NMD = zeros(call.v_NMD, wants_v or wants_places)
        self.wants_places = wants_places

    def finished(
        self, call: _Call, position_embedding_LD: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of k, v and the position embedding; compressed blocks pass theirs on to their tokens."""
        stride, dtype = call.blocks.compress_stride, call.q_BTGRD.dtype
        weight_LD = place_weights(position_embedding_LD, call.blocks.compress_block, call.k_BTGD, call.wide)
        places_LD = torch.zeros_like(weight_LD) if self.wants_places else None
        both = ((call.k_BTGD, self.k_BTGD, self.k_NMD), (call.v_BTGD, self.v_BTGD, self.v_NMD))
        for x_BTGD, sum_BTGD, sum_NMD in both:
            if sum_NMD is None or not sum_NMD.shape[1]:
                continue
            grad_BMGD = sum_NMD.unflatten(0, (x_BTGD.shape[0], -1)).transpose(1, 2)
            if sum_BTGD is not None:
                add_gradient_of_tokens(sum_BTGD, grad_BMGD, weight_LD, stride)
            if places_LD is not None:
                add_gradient_of_places(places_LD, grad_BMGD, x_BTGD, stride)
        grad_k, grad_v, grad_places = (
            None if total is None else total.to(dtype) for total in (self.k_BTGD, self.v_BTGD, places_LD)
        )
        return grad_k, grad_v, grad_places
