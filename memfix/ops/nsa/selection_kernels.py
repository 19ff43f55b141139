"""The Triton kernels that select blocks: quick scores for all queries, float64 for those where they leave a doubt.

``selection.py`` says which blocks are the best: by scores in float64, compared in float32. Quick scores, of compressed
keys in two pieces and float32 sums, are off by a share that is known. Where the last block that is taken is ahead of
the first that is not by more, the same blocks are the best in float64. The other queries, about one in a hundred of
random ones and all where scores tie, are listed and scored again.
"""

# N batch x key-value heads, C queries of a chunk, R query heads of a key-value head, X rows of a tile, K compressed
# blocks of a tile, S selection blocks, n selected blocks

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels import power_of_two, product
from .kernels import inner, num_complete, of_item, rows_of, vectors

ERROR = tl.constexpr(2.0**-15)
"""Of a quick score, as a share of it: half of it for the two pieces of a key (2**-17 each way, times the product of
lengths), the rest for two pieces of a weight, sums of thousands of weights, and the exponential."""
SMALLEST = tl.constexpr(2.0**-90)
"""Quick scores below it may have lost terms that are no float32."""
FORCED = tl.constexpr(2**31 - 3)
"""Ranks from here on are of blocks that are read whatever their scores."""
LAST_PLACE = tl.constexpr(2**31 - 1)


@triton.jit
def shared_tokens(block, selectable, num_compressed, compress_block, compress_stride, select_block):
    """``[K, S]``: how many tokens compressed blocks and selection blocks have in common."""
    begin, start = (block * compress_stride)[:, None], (selectable * select_block)[None, :]
    common = tl.minimum(begin + compress_block, start + select_block) - tl.maximum(begin, start)
    return tl.where(block[:, None] < num_compressed, tl.maximum(common, 0), 0)


@triton.jit
def in_float64(tile):
    """Triton 3.6 fails where an operand of a float64 product was loaded in another dtype; a sum of one term helps."""
    return tl.sum(tl.reshape(tile, [tile.shape[0], tile.shape[1], 1]).to(tl.float64), 2)


@triton.jit
def inner_in_float64(left, right):
    """``left @ right.T``"""
    products = tl.dot(in_float64(left[0]), tl.trans(right[0]), out_dtype=tl.float64)
    if len(left) == 2:
        products += tl.dot(in_float64(left[1]), tl.trans(right[1]), out_dtype=tl.float64)
    return products


@triton.jit
def score_blocks(
    q, high, low, largest, lse, doubtful, num_doubtful, scores, doubt,
    first, stop, num_tokens, groups, num_compressed, num_selectable,
    compress_block, compress_stride, select_block, step, scale, natural_scale,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, PIECES: tl.constexpr, EXACT: tl.constexpr, NUM_TILES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_SELECTABLE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """``scores`` (``[N, C, S]``, float32): the probabilities of compressed blocks over the tokens that each shares.

    ``NUM_TILES`` of ``BLOCK_KEYS`` compressed blocks have all that ``step`` selection blocks meet. ``EXACT`` scores the
    queries in ``doubtful`` in float64, ``high`` being the keys; otherwise ``doubt`` (``[N, C]``) gets the share by
    which scores may be off.
    """
    n = tl.program_id(1)
    item, group = n // groups, n % groups
    q = of_item(q, item, num_tokens * groups * HEADS, WIDTH)
    high = of_item(high, n, num_compressed, WIDTH)
    if PIECES == 2:
        low = of_item(low, n, num_compressed, WIDTH)
    row = tl.arange(0, BLOCK_TOKENS * BLOCK_HEADS)
    head, num_queries = row % BLOCK_HEADS, stop - first
    place = tl.program_id(0) * BLOCK_TOKENS + row // BLOCK_HEADS
    query_place = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    if EXACT:
        number = tl.load(num_doubtful + n)
        if tl.program_id(0) * BLOCK_TOKENS >= number:
            return
        counts, is_query = place < number, query_place < number
        local = tl.load(doubtful + n * num_queries + place, mask=counts, other=0)
        query = tl.load(doubtful + n * num_queries + query_place, mask=is_query, other=0)
    else:
        counts, is_query = place < num_queries, query_place < num_queries
        local, query = place, query_place
    token = first + local
    at, is_there = rows_of(token, head, counts, group, num_tokens, groups, HEADS)
    last = tl.max(tl.where(counts, token, 0), 0)
    seen = num_complete(token, compress_block, compress_stride)
    most = tl.minimum(num_complete(last, compress_block, compress_stride), num_compressed)
    q_XD = vectors(q, at, is_there, WIDTH, BLOCK_D, BLOCK_E)
    if EXACT:
        top = tl.full([BLOCK_TOKENS * BLOCK_HEADS], float("-inf"), tl.float64)
        total = tl.zeros([BLOCK_TOKENS * BLOCK_HEADS], tl.float64)
        for start in range(0, most, BLOCK_KEYS):
            block = start + tl.arange(0, BLOCK_KEYS)
            keys = vectors(high, block, block < most, WIDTH, BLOCK_D, BLOCK_E)
            products = inner_in_float64(q_XD, keys) * natural_scale
            products = tl.where(block[None, :] < seen[:, None], products, float("-inf"))
            new_top = tl.maximum(top, tl.max(products, 1))
            above = tl.where(new_top == float("-inf"), 0.0, new_top)
            total = total * tl.exp(top - above) + tl.sum(tl.exp(products - above[:, None]), 1)
            top = new_top
        shift = tl.where(top == float("-inf"), 0.0, top)
        total = tl.where(total == 0, 1.0, total)
    else:
        at_lse = (n * num_queries + local) * HEADS + head
        shift = tl.load(lse + at_lse, mask=is_there, other=float("inf"))
        squares = tl.zeros([BLOCK_TOKENS * BLOCK_HEADS], tl.float32)
        for i in tl.static_range(len(q_XD)):
            squares += tl.sum(q_XD[i].to(tl.float32) * q_XD[i].to(tl.float32), 1)
        length = tl.sqrt(tl.max(tl.reshape(squares, [BLOCK_TOKENS, BLOCK_HEADS]), 1))
        off = ERROR * (1 + tl.load(largest + n).to(tl.float32) * length * natural_scale)
        tl.store(doubt + n * num_queries + query, off, mask=is_query)
    for begin in range(0, last // select_block + 1, step):
        selectable = begin + tl.arange(0, BLOCK_SELECTABLE)
        # the first compressed block that ends behind the first token of the selection block
        start = tl.maximum(begin * select_block - compress_block + compress_stride, 0) // compress_stride
        of_rows = tl.zeros([BLOCK_TOKENS * BLOCK_HEADS, BLOCK_SELECTABLE], tl.float64 if EXACT else tl.float32)
        for tile in tl.static_range(NUM_TILES):
            block = start + tile * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
            shared = shared_tokens(block, selectable, num_compressed, compress_block, compress_stride, select_block)
            is_seen = (block[None, :] < seen[:, None]) & is_there[:, None]
            keys = vectors(high, block, block < most, WIDTH, BLOCK_D, BLOCK_E)
            if EXACT:
                products = inner_in_float64(q_XD, keys) * natural_scale
                weights = tl.where(is_seen, tl.exp(products - shift[:, None]) / total[:, None], 0.0)
                of_rows += tl.dot(weights, shared.to(tl.float64), out_dtype=tl.float64)
            else:
                products = inner(q_XD, keys)
                if PIECES == 2:
                    products += inner(q_XD, vectors(low, block, block < most, WIDTH, BLOCK_D, BLOCK_E))
                weights = tl.where(is_seen, power_of_two(products * scale - shift[:, None]), 0.0)
                rounded = weights.to(tl.bfloat16)
                rest = (weights - rounded.to(tl.float32)).to(tl.bfloat16)
                few = shared.to(tl.float32).to(tl.bfloat16)  # of integers the interpreter makes no bfloat16
                of_rows += product(rounded, few) + product(rest, few)
        of_queries = tl.sum(tl.reshape(of_rows, [BLOCK_TOKENS, BLOCK_HEADS, BLOCK_SELECTABLE]), 1)
        at_score = (n * num_queries + query).to(tl.int64)[:, None] * num_selectable + selectable[None, :]
        is_score = is_query[:, None] & ((selectable < begin + step) & (selectable < num_selectable))[None, :]
        tl.store(scores + at_score, of_queries.to(tl.float32), mask=is_score)


@triton.jit
def choose_blocks(
    scores, doubt, doubtful, num_doubtful, is_doubtful, selected,
    first, num_queries, num_selectable, select_block, offset, num_listed,
    NUM_SELECTED: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_SELECTABLE: tl.constexpr, BLOCK_SELECTED: tl.constexpr,
):  # fmt: skip
    """``selected`` (``[N, C, n]``): the query's own block, the first, the one before its own, then by score, then by
    place; -1 where there are fewer. A query is doubtful where another order of nearly equal scores would change that.
    """
    n = tl.program_id(1)
    query = tl.program_id(0) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    if EXACT:
        number = tl.load(num_doubtful + n)
        if tl.program_id(0) * BLOCK_QUERIES >= number:
            return
        is_query = query < number
        query = tl.load(doubtful + n * num_queries + query, mask=is_query, other=0)
    else:
        is_query = query < num_queries
    own = tl.where(is_query, (first + query) // select_block, 0)
    at_query = (n * num_queries + query).to(tl.int64)
    place = tl.arange(0, BLOCK_SELECTED)[None, :]
    best = tl.full([BLOCK_QUERIES, BLOCK_SELECTED], -1, tl.int64)
    for start in range(0, tl.max(own, 0) + 1, BLOCK_SELECTABLE):
        block = start + tl.arange(0, BLOCK_SELECTABLE)[None, :]
        is_begun = (block <= own[:, None]) & is_query[:, None]
        score = tl.load(scores + at_query[:, None] * num_selectable + block, mask=is_begun, other=0.0)
        # the bits of floats that are not negative are ordered as the floats are; the place goes below them
        rank = score.to(tl.int32, bitcast=True)
        rank = tl.where(block == own[:, None] - 1, FORCED, rank)
        rank = tl.where(block == 0, FORCED + 1, rank)
        rank = tl.where(block == own[:, None], FORCED + 2, rank).to(tl.int64)
        left = tl.where(is_begun, (rank << 32) + (LAST_PLACE - block), -1)
        before = best
        best = tl.full([BLOCK_QUERIES, BLOCK_SELECTED], -1, tl.int64)
        for taken in range(0, NUM_SELECTED + 1):
            largest = tl.maximum(tl.max(left, 1), tl.max(before, 1))[:, None]
            best = tl.where(place == taken, largest, best)
            left = tl.where(left == largest, -1, left)
            before = tl.where(before == largest, -1, before)
    chosen = tl.where(best < 0, -1, LAST_PLACE - (best & 0x7FFFFFFF)).to(tl.int32)
    at_selected = (n * num_listed + first - offset + query).to(tl.int64)[:, None] * NUM_SELECTED + place
    tl.store(selected + at_selected, chosen, mask=is_query[:, None] & (place < NUM_SELECTED))
    if not EXACT:
        rank = (best >> 32).to(tl.int32)
        last_rank = tl.max(tl.where(place == NUM_SELECTED - 1, rank, -1), 1)
        next_rank = tl.max(tl.where(place == NUM_SELECTED, rank, -1), 1)
        last_score = last_rank.to(tl.float32, bitcast=True)
        next_score = next_rank.to(tl.float32, bitcast=True)
        near = next_score >= last_score * (1 - 2 * tl.load(doubt + at_query, mask=is_query, other=0.0))
        doubts = (next_rank >= 0) & (last_rank < FORCED) & (near | (last_score < SMALLEST))
        tl.store(is_doubtful + at_query, doubts.to(tl.int32), mask=is_query)


@triton.jit
def list_doubtful(is_doubtful, doubtful, num_doubtful, num_queries, BLOCK: tl.constexpr):
    """The doubtful queries of each key-value head in order, and their number."""
    n = tl.program_id(0)
    number = 0
    for start in range(0, num_queries, BLOCK):
        query = start + tl.arange(0, BLOCK)
        is_one = tl.load(is_doubtful + n * num_queries + query, mask=query < num_queries, other=0)
        place = number + tl.cumsum(is_one, 0) - is_one
        tl.store(doubtful + n * num_queries + place, query, mask=is_one > 0)
        number += tl.sum(is_one, 0)
    tl.store(num_doubtful + n, number)
