"""Native sparse attention in Triton: scores stay in registers, and blocks of keys are read in place.

Forward goes through the queries in chunks, only to bound one tensor: the scores by which blocks are selected. Backward
recomputes everything from the inputs and the selection; nothing else is held. One program sums the gradient of a key
over all rows that read it, which it finds by sorting the selection by block: no atomics, so results are deterministic.
"""

# B batch, T tokens, G key-value heads, R query heads of each, N = B x G, D width of a head, L places of a compression
# block, M compressed blocks, S selection blocks, C queries of a chunk, n selected blocks

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..derivatives import first_derivative_only, without_autocast
from ..dispatch import require_kernels
from ..launches import largest_power_of_two, launch, next_power_of_two, num_tiles
from .arguments import NUM_BRANCHES, NsaOptions, NsaTensors, nsa_form, scale_of, takes_kernels
from .chunked import chunked_nsa
from .compression import add_gradient_of_places, compress, place_weights

LEAST_CHANNELS = LEAST_ROWS = 16
"""The least sides of a tile in a product."""
FEW_CHANNELS = 96
"""With more channels, tiles have half as many rows, because registers would spill."""
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Tiles:
    """The tile of a kernel: its rows, which are heads of a few tokens, and its keys; loads in flight; warps.

    Tiles of 64 rows or more have at most two warps, for the reason that ``memfix.ops.kernels.product`` gives.
    """

    rows: int
    keys: int
    stages: int
    warps: int

    def __post_init__(self) -> None:
        if max(self.rows, self.keys) >= 64 and self.warps > 2:
            raise ValueError(f"64 rows or keys go with two warps at most, got {self}")


COMPRESSED = Tiles(rows=64, keys=32, stages=2, warps=2)
WINDOW = Tiles(rows=32, keys=32, stages=2, warps=2)
SELECTED = Tiles(rows=16, keys=32, stages=2, warps=1)
SCORE = Tiles(rows=64, keys=64, stages=2, warps=2)
EXACT = Tiles(rows=32, keys=32, stages=1, warps=4)
EXACT_PROGRAMS = 128
"""Programs per key-value head, each of which loops over tiles of doubtful queries. The host does not know how many
tiles there are, and a program without any would cost as much as a short one."""
EXACT_PARTS = 8
"""Programs that share the blocks of the same doubtful queries: there are few queries, and each has many blocks."""
SETTLE = Tiles(rows=16, keys=16, stages=1, warps=1)
MOST_NEAR = 8
"""How many blocks of a doubtful query are compared in float64; where more are near, their scores tie."""
SETTLED_AT_ONCE = 1024
"""Selection blocks that ``settle_blocks`` loads at a time."""
CHOSEN_AT_ONCE = 1
"""Queries per program of ``choose_blocks``."""
CHOSEN_BY_WARP = 2048
"""Selection blocks of a query per warp of ``choose_blocks``, which keeps all of them in registers."""
MOST_WARPS = 32
COMPRESSED_BACKWARD = Tiles(rows=32, keys=32, stages=2, warps=2)
WINDOW_BACKWARD = Tiles(rows=32, keys=32, stages=2, warps=2)
SELECTED_BACKWARD = Tiles(rows=16, keys=32, stages=2, warps=1)
COMPRESSED_KEYS = Tiles(rows=32, keys=32, stages=2, warps=2)
TOKEN_KEYS = Tiles(rows=32, keys=32, stages=2, warps=2)
FIRST_SEGMENT = 64
"""The length of a segment, in selection blocks: the gradients of the first block, which all tokens read, are summed by
one program per segment of tokens."""


@nsa_form
def triton_nsa(tensors: NsaTensors, options: NsaOptions) -> torch.Tensor:
    """Equals ``sum(gate * attention(q, keys, values))`` over compressed, selected and window keys, scores never whole.

    Peak above inputs in a train step, ``H = G*R``, ``e`` the item size, ``M`` compressed and ``S`` selection blocks:
    output and gradient of q, ``2*B*T*H*D*e``; gradients of k and v, ``2*B*T*G*D*e``; the selection sorted by
    block, ``12*B*T*G*num_selected``; nine numbers per row, ``36*B*T*H``; sums of the first block, ``B*T*G*D/8``;
    compressed keys, values and their gradients, ``B*G*M*D*(8 + 3*e)``. Forward takes ``4*B*G*queries_per_chunk*S`` for
    scores instead, and at most half of that for denominators in float64. Beside inputs, only the selection is held for
    backward. Products have operands of the working dtype and float32 sums. The form ``chunked`` runs instead for
    float64, widths above 256, more than 64 query heads per key-value head, and selection blocks that share more than
    256 tokens with a compressed block or overlap more than 512 of them.
    """
    q_BTGRD = tensors.q_BTGRD
    if not takes_kernels(q_BTGRD, options):
        return chunked_nsa(*tensors, **vars(options))
    require_kernels(q_BTGRD, instead="chunked")
    return _Nsa.apply(*tensors, options, tensors.wants_gradient)


class _Nsa(torch.autograd.Function):
    """The autograd function of the form. It saves the inputs as given; backward makes contiguous copies again."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        *tensors, options, wants_gradient = given
        call = _Call(NsaTensors(*tensors), options)
        with without_autocast(call.q_BTGRD):
            selecting_k_NMD = _compressed(call.k_BTGD, call, torch.float64)
            pieces = 1 if call.k_BTGD.dtype == torch.float32 else 2
            compressed = _Compressed(call, selecting_k_NMD, pieces=pieces)
            out_BTGRD, selected_NTn = _forward(call, compressed, selecting_k_NMD, wants_gradient)
        if wants_gradient:
            ctx.save_for_backward(*tensors, selected_NTn)
        ctx.options = options
        return out_BTGRD

    @staticmethod
    @first_derivative_only("nsa")
    def backward(ctx: Any, upstream_BTGRD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *tensors, selected_NTn = ctx.saved_tensors
        with without_autocast(upstream_BTGRD):
            call = _Call(NsaTensors(*tensors), ctx.options)
            gradients = _backward(call, upstream_BTGRD.contiguous(), selected_NTn, ctx.needs_input_grad[4])
        return *gradients, None, None


class _Call:
    """The inputs of a call, contiguous, and the kernel arguments that follow from them."""

    def __init__(self, tensors: NsaTensors, blocks: NsaOptions) -> None:
        self.inputs = tuple(x.contiguous() for x in tensors[:4])
        self.q_BTGRD, self.k_BTGD, self.v_BTGD, self.gates_BTGR3 = self.inputs
        self.position_embedding_LD, self.blocks = tensors.position_embedding_LD, blocks
        self.scale = scale_of(self.q_BTGRD, blocks.scale)
        self.scales = self.scale * LOG2_E, self.scale  # for exponents of 2, and of e
        batch, self.num_tokens, groups, heads, _ = self.q_BTGRD.shape
        self.num_items = batch * groups  # N
        self.num_rows = self.num_items * self.num_tokens * heads
        self.counts = self.num_tokens, groups
        self.num_compressed = blocks.num_compressed(self.num_tokens)
        self.compression = blocks.compress_block, blocks.compress_stride

    def places(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight of each token in its block's vector, ``[L, D]``."""
        return place_weights(self.position_embedding_LD, self.blocks.compress_block, self.k_BTGD, dtype).contiguous()

    def constants(self, tiles: Tiles) -> dict[str, int]:
        """Return the constexprs of a kernel of rows and keys."""
        heads, width = self.q_BTGRD.shape[3:]
        block_heads = next_power_of_two(heads)
        # one tile of channels, or the largest full one and a smaller one for the rest
        full = largest_power_of_two(width)
        rest = max(LEAST_CHANNELS, next_power_of_two(width - full)) if width > full else 0
        block_d, block_e = (
            (full, rest) if full >= LEAST_CHANNELS and rest < full else (max(16, next_power_of_two(width)), 0)
        )
        rows = tiles.rows if block_d + block_e <= FEW_CHANNELS else max(LEAST_ROWS, tiles.rows // 2)
        return {
            "WIDTH": width, "HEADS": heads, "BLOCK_HEADS": block_heads,
            "BLOCK_TOKENS": max(1, rows // block_heads), "BLOCK_KEYS": tiles.keys,
            "BLOCK_D": block_d, "BLOCK_E": block_e, "num_warps": tiles.warps, "num_stages": tiles.stages,
        }  # fmt: skip

    def constants_of_selected(self, tiles: Tiles) -> dict[str, int]:
        """Return the constexprs of a kernel that goes through selected blocks."""
        blocks = self.blocks
        return self.constants(tiles) | {
            "SELECT_BLOCK": blocks.select_block, "NUM_SELECTED": blocks.num_selected,
            "BLOCK_KEYS": min(tiles.keys, max(16, next_power_of_two(blocks.select_block))),
        }  # fmt: skip


class _Compressed:
    """Compressed keys in one or two pieces of the working dtype, and values in one: ``[N, M, D]``."""

    def __init__(self, call: _Call, wide_k_NMD: torch.Tensor, *, pieces: int) -> None:
        dtype, self.pieces = call.k_BTGD.dtype, pieces
        self.high_NMD = wide_k_NMD.to(dtype)
        self.low_NMD = None if pieces == 1 else (wide_k_NMD - self.high_NMD).to(dtype)
        self.v_NMD = _compressed(call.v_BTGD, call, torch.float32).to(dtype)


def _compressed(x_BTGD: torch.Tensor, call: _Call, dtype: torch.dtype) -> torch.Tensor:
    """Return the vectors of compressed blocks, ``[N, M, D]``."""
    x_BMGD = compress(x_BTGD, call.places(dtype), call.blocks.compress_stride, call.num_compressed)
    return x_BMGD.transpose(1, 2).contiguous().flatten(0, 1)


# ---------------------------------------------------------------- forward
def _forward(
    call: _Call, compressed: _Compressed, selecting_k_NMD: torch.Tensor, keeps_selection: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    queries_per_chunk = min(call.blocks.queries_per_chunk, call.num_tokens)
    num_listed = call.num_tokens if keeps_selection else queries_per_chunk
    size_NTn = (call.num_items, num_listed, call.blocks.num_selected)
    selected_NTn = call.q_BTGRD.new_empty(size_NTn, dtype=torch.int32)
    selection = _Selection(call, compressed, selecting_k_NMD, selected_NTn, queries_per_chunk)
    size_NCR = (call.num_items, queries_per_chunk, call.q_BTGRD.shape[3])
    lse_NCR = call.q_BTGRD.new_empty(size_NCR, dtype=torch.float32)
    rows = _Rows(call, torch.empty_like(call.q_BTGRD))
    for first in range(0, call.num_tokens, queries_per_chunk):
        stop = min(first + queries_per_chunk, call.num_tokens)
        offset = 0 if keeps_selection else first
        rows.compressed(COMPRESSED, compressed, first, stop, lse_NCR)
        rows.window(WINDOW, first, stop)
        selection.select(lse_NCR, first, stop, offset)
        rows.selected(SELECTED, selected_NTn, first, stop, offset)
    return rows.to_BTGRD, selected_NTn


@dataclass(frozen=True)
class _Rows:
    """The launches of the three branches, for the output, or for the gradient of q where ``upstream`` is given."""

    call: _Call
    to_BTGRD: torch.Tensor
    upstream_BTGRD: torch.Tensor | None = None
    grad_gates_BTGR3: torch.Tensor | None = None
    stats: torch.Tensor | None = None

    def compressed(
        self, tiles: Tiles, compressed: _Compressed, first: int, stop: int, lse_NCR: torch.Tensor | None
    ) -> None:
        """Launch the compressed branch, which overwrites ``to_BTGRD``; the other two add to it."""
        from .kernels import compressed_rows

        call, constants = self.call, self.call.constants(tiles)
        launch(
            compressed_rows, self._grid(constants, first, stop),
            call.q_BTGRD, call.gates_BTGR3, self.upstream_BTGRD, compressed.high_NMD, compressed.low_NMD,
            compressed.v_NMD, *self._written, lse_NCR,
            first, stop, *call.counts, call.num_compressed, call.num_rows, *call.compression, *call.scales,
            PIECES=compressed.pieces, BACKWARD=self.is_backward, **constants,
        )  # fmt: skip

    def window(self, tiles: Tiles, first: int, stop: int) -> None:
        from .kernels import window_rows

        call, constants = self.call, self.call.constants(tiles)
        launch(
            window_rows, self._grid(constants, first, stop), *call.inputs, self.upstream_BTGRD, *self._written,
            first, stop, *call.counts, call.num_rows, call.blocks.window, *call.scales,
            BACKWARD=self.is_backward, **constants,
        )  # fmt: skip

    def selected(self, tiles: Tiles, selected_NTn: torch.Tensor, first: int, stop: int, offset: int) -> None:
        from .kernels import selected_rows

        call, constants = self.call, self.call.constants_of_selected(tiles)
        launch(
            selected_rows, self._grid(constants, first, stop), *call.inputs, self.upstream_BTGRD, selected_NTn,
            *self._written, first, stop, offset, selected_NTn.shape[1], *call.counts, call.num_rows, *call.scales,
            BACKWARD=self.is_backward, BLOCK_SELECTED=next_power_of_two(call.blocks.num_selected), **constants,
        )  # fmt: skip

    @property
    def is_backward(self) -> bool:
        return self.upstream_BTGRD is not None

    @property
    def _written(self) -> tuple[torch.Tensor | None, ...]:
        return self.to_BTGRD, self.grad_gates_BTGR3, self.stats

    def _grid(self, constants: dict[str, int], first: int, stop: int) -> tuple[int, int]:
        return num_tiles(stop - first, constants["BLOCK_TOKENS"]), self.call.num_items


class _Selection:
    """Selects the blocks of a chunk, with buffers for its scores and its doubtful queries. ``k_NMD`` is in float64."""

    def __init__(
        self,
        call: _Call,
        compressed: _Compressed,
        k_NMD: torch.Tensor,
        selected_NTn: torch.Tensor,
        queries_per_chunk: int,
    ) -> None:
        self.call, self.compressed, self.k_NMD, self.selected_NTn = call, compressed, k_NMD, selected_NTn
        num_items, num_compressed, width = k_NMD.shape
        lengths_NM = torch.linalg.vector_norm(k_NMD, dim=-1)
        self.largest_N = lengths_NM.amax(-1) if num_compressed else k_NMD.new_zeros(num_items)
        if call.q_BTGRD.dtype == torch.float16:
            self.largest_N += width**0.5 / 2**8  # a subnormal second piece of a key has an absolute error
        size_NC = (num_items, queries_per_chunk)
        self.doubt_NC = k_NMD.new_empty(size_NC, dtype=torch.float32)
        self.is_doubtful_NC, self.doubtful_NC = (k_NMD.new_empty(size_NC, dtype=torch.int32) for _ in range(2))
        self.num_doubtful_N = k_NMD.new_empty(num_items, dtype=torch.int32)
        num_selectable, heads = call.blocks.num_selectable(call.num_tokens), call.q_BTGRD.shape[3]
        self.scores_NCS = k_NMD.new_empty((*size_NC, num_selectable), dtype=torch.float32)
        # so many parts that the totals take at most half of the bytes of the scores, or one part
        num_parts = largest_power_of_two(min(EXACT_PARTS, num_selectable // (8 * heads)))
        # largest scores, and sums of weights, of P parts of the blocks, in float64
        self.totals_2NCRP = k_NMD.new_empty((2, *size_NC, heads, num_parts))

    def select(self, lse_NCR: torch.Tensor, first: int, stop: int, offset: int) -> None:
        """Write the blocks of queries ``first`` to ``stop`` to ``selected_NTn``, whose first token is ``offset``."""
        from . import selection_kernels as kernels

        blocks, num_items = self.call.blocks, self.call.num_items
        num_queries, num_selectable = stop - first, blocks.num_selectable(stop)
        self._score(lse_NCR, first, stop, num_selectable, exact=False)
        block_selectable = next_power_of_two(self.scores_NCS.shape[2])
        choice = {
            "NUM_SELECTED": blocks.num_selected, "BLOCK_SELECTED": next_power_of_two(blocks.num_selected),
            "BLOCK_QUERIES": CHOSEN_AT_ONCE, "BLOCK_SELECTABLE": block_selectable,
            "num_warps": min(MOST_WARPS, max(1, block_selectable // CHOSEN_BY_WARP)), "num_stages": 1,
        }  # fmt: skip
        choosing = (
            self.scores_NCS, self.doubt_NC, self.doubtful_NC, self.num_doubtful_N, self.is_doubtful_NC,
            self.selected_NTn, first, num_queries, num_selectable, blocks.select_block, offset,
            self.selected_NTn.shape[1],
        )  # fmt: skip
        listing = (self.is_doubtful_NC, self.doubtful_NC, self.num_doubtful_N, num_queries)
        grid = (num_tiles(num_queries, CHOSEN_AT_ONCE), num_items)
        launch(kernels.choose_blocks, grid, *choosing, EXACT=False, **choice)
        launch(kernels.list_doubtful, (num_items,), *listing, BLOCK=1024)
        self._settle(lse_NCR, first, stop, num_selectable, offset)
        launch(kernels.list_doubtful, (num_items,), *listing, BLOCK=1024)
        self._score(lse_NCR, first, stop, num_selectable, exact=True)
        launch(kernels.choose_blocks, grid, *choosing, EXACT=True, **choice)

    def _settle(self, lse_NCR: torch.Tensor, first: int, stop: int, num_selectable: int, offset: int) -> None:
        from .selection_kernels import settle_blocks

        call, blocks, constants = self.call, self.call.blocks, self.call.constants(SETTLE)
        del constants["BLOCK_TOKENS"]
        overlapping = blocks.compress_block + blocks.select_block
        launch(
            settle_blocks, (stop - first, call.num_items),
            call.q_BTGRD, self.k_NMD, lse_NCR, self.doubt_NC, self.scores_NCS, self.doubtful_NC, self.num_doubtful_N,
            self.is_doubtful_NC, self.selected_NTn, first, stop - first, *call.counts, call.num_compressed,
            num_selectable, *call.compression, blocks.select_block, offset, self.selected_NTn.shape[1], call.scale,
            NUM_SELECTED=blocks.num_selected,
            NUM_TILES=num_tiles(overlapping, constants["BLOCK_KEYS"] * blocks.compress_stride),
            BLOCK_SELECTABLE=min(SETTLED_AT_ONCE, next_power_of_two(self.scores_NCS.shape[2])),
            BLOCK_SELECTED=next_power_of_two(blocks.num_selected),
            BLOCK_NEAR=MOST_NEAR, **constants | {"BLOCK_HEADS": max(LEAST_ROWS, constants["BLOCK_HEADS"])},
        )  # fmt: skip

    def _score(self, lse_NCR: torch.Tensor, first: int, stop: int, num_selectable: int, *, exact: bool) -> None:
        from .selection_kernels import exact_totals, score_blocks

        call, blocks = self.call, self.call.blocks
        constants = call.constants(EXACT if exact else SCORE)
        num_parts = self.totals_2NCRP.shape[-1] if exact else 1
        num_programs = num_tiles(stop - first, constants["BLOCK_TOKENS"])
        grid = (min(num_programs, EXACT_PROGRAMS // num_parts) if exact else num_programs, call.num_items, num_parts)
        doubtful = (self.doubtful_NC, self.num_doubtful_N)
        if exact:
            launch(
                exact_totals, grid, call.q_BTGRD, self.k_NMD, *doubtful, *self.totals_2NCRP, first, stop, *call.counts,
                call.num_compressed, *call.compression, call.scale, PARTS=num_parts, **constants,
            )  # fmt: skip
        tokens = constants["BLOCK_KEYS"] * blocks.compress_stride
        num_steps = num_tiles(blocks.compress_block + blocks.select_block, tokens)
        step = (num_steps * tokens - blocks.compress_block) // blocks.select_block
        keys = (self.k_NMD, None) if exact else (self.compressed.high_NMD, self.compressed.low_NMD)
        launch(
            score_blocks, grid, call.q_BTGRD, *keys, self.largest_N, lse_NCR, *self.totals_2NCRP, *doubtful,
            self.scores_NCS, self.doubt_NC, first, stop, *call.counts, call.num_compressed, num_selectable,
            *call.compression, blocks.select_block, step, *call.scales,
            PIECES=1 if exact else self.compressed.pieces, EXACT=exact, NUM_TILES=num_steps,
            BLOCK_SELECTABLE=max(16, next_power_of_two(step)), PARTS=num_parts, **constants,
        )  # fmt: skip


# ---------------------------------------------------------------- backward
def _backward(
    call: _Call, upstream_BTGRD: torch.Tensor, selected_NTn: torch.Tensor, wants_places: bool
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of q, k, v, the gates and the position embedding."""
    from . import kernels

    blocks, num_tokens, num_items = call.blocks, call.num_tokens, call.num_items
    order_NTn, bounds_NS = _by_block(selected_NTn, blocks.num_selectable(num_tokens))
    compressed = _Compressed(call, _compressed(call.k_BTGD, call, torch.float32), pieces=1)
    grad_q, grad_k, grad_v, grad_gates = (torch.empty_like(tensor) for tensor in call.inputs)
    stats = call.q_BTGRD.new_empty((NUM_BRANCHES, 3, call.num_rows), dtype=torch.float32)
    rows = _Rows(call, grad_q, upstream_BTGRD, grad_gates, stats)
    rows.compressed(COMPRESSED_BACKWARD, compressed, 0, num_tokens, None)
    rows.window(WINDOW_BACKWARD, 0, num_tokens)
    rows.selected(SELECTED_BACKWARD, selected_NTn, 0, num_tokens, 0)
    grad_k_NMD, grad_v_NMD = (torch.empty_like(compressed.v_NMD, dtype=torch.float32) for _ in range(2))
    of_compressed, of_tokens = call.constants(COMPRESSED_KEYS), call.constants_of_selected(TOKEN_KEYS)
    if call.num_compressed:
        launch(
            kernels.gradients_of_compressed, (num_tiles(call.num_compressed, COMPRESSED_KEYS.keys), num_items),
            call.q_BTGRD, upstream_BTGRD, compressed.high_NMD, compressed.v_NMD, stats, grad_k_NMD, grad_v_NMD,
            *call.counts, call.num_compressed, call.num_rows, *call.compression, *call.scales, **of_compressed,
        )  # fmt: skip
    # if only one block is selected it is the token's own, and few tokens read the first
    segment_tokens = FIRST_SEGMENT * blocks.select_block
    num_segments = num_tiles(num_tokens, segment_tokens) if blocks.num_selected > 1 else 0
    size = (2, num_items, num_segments, blocks.select_block, call.q_BTGRD.shape[4])
    first_grads = call.q_BTGRD.new_empty(size, dtype=torch.float32)
    num_parts = num_tiles(blocks.select_block, of_tokens["BLOCK_KEYS"])
    read = (*call.inputs[:3], upstream_BTGRD, stats)
    if num_segments:
        of_first = {name: value for name, value in of_tokens.items() if name != "NUM_SELECTED"}
        launch(
            kernels.gradients_of_first_block, (num_parts, num_items, num_segments), *read, *first_grads,
            *call.counts, call.num_rows, segment_tokens, call.scales[0], **of_first,
        )  # fmt: skip
    num_selectable = bounds_NS.shape[1] - 1
    launch(
        kernels.gradients_of_tokens, (num_selectable * num_parts, num_items),
        *read, order_NTn, bounds_NS, *first_grads, grad_k_NMD, grad_v_NMD, call.places(torch.float32), grad_k, grad_v,
        *call.counts, call.num_compressed, call.num_rows, num_selectable, num_segments, *call.compression,
        blocks.window, *call.scales, **of_tokens,
    )  # fmt: skip
    grad_places = None
    if wants_places:
        places_LD = torch.zeros_like(call.places(torch.float32))
        for x_BTGD, grad_NMD in ((call.k_BTGD, grad_k_NMD), (call.v_BTGD, grad_v_NMD)):
            if call.num_compressed:
                grad_BMGD = grad_NMD.unflatten(0, (x_BTGD.shape[0], -1)).transpose(1, 2)
                add_gradient_of_places(places_LD, grad_BMGD, x_BTGD, blocks.compress_stride)
        grad_places = places_LD.to(call.q_BTGRD.dtype)
    return grad_q, grad_k, grad_v, grad_gates, grad_places


def _by_block(selected_NTn: torch.Tensor, num_selectable: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places of the selection sorted by block and then by token, and where each block begins among them."""
    by_block = selected_NTn.flatten(1).sort(dim=-1, stable=True)
    block_NS = torch.arange(num_selectable + 1, device=selected_NTn.device, dtype=torch.int32)
    block_NS = block_NS.expand(selected_NTn.shape[0], -1).contiguous()
    return by_block.indices.int(), torch.searchsorted(by_block.values, block_NS, out_int32=True)
