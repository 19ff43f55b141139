"""The Triton kernels that select blocks: quick scores for all queries, and float64 where these leave a doubt.

``selection.py`` defines the best blocks: by scores in float64, compared in float32. Three steps give the same blocks:

1. Quick scores, from compressed keys in two pieces and float32 sums, have a known bound on their relative error. Where
   the last chosen block is ahead of the first rejected one by more than this bound, float64 chooses the same blocks.
   The other queries are doubtful: a tenth of random ones, and all whose scores tie.
2. For a doubtful query, the few blocks near the last chosen one are compared in float64, but with the denominators of
   the quick scores. A denominator belongs to a head, not to a block: where two blocks get nearly the same from each
   head, its error nearly cancels. This settles all but about one in a hundred random queries.
3. The remaining queries are scored in float64 altogether.
"""

# N batch x key-value heads, C queries of a chunk, R query heads of a key-value head, X rows of a tile, K compressed
# blocks of a tile, S selection blocks, n selected blocks

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels import power_of_two, product
from .kernels import COUNTS, NO_BLOCK, inner, num_complete, of_item, plus_inner, rows_of, vectors

ERROR = tl.constexpr(2.0**-15)
"""Bound on the relative error of a quick score, in units of ``1 + scale * |q| * |k|``: half of it for the two pieces of
a key (2**-17 each way), the rest for two pieces of a weight, sums of thousands of weights, and the exponential."""
SMALLEST = tl.constexpr(2.0**-90)
"""Quick scores below it may have lost terms that underflow float32."""
ROUNDING = tl.constexpr(2.0**-21)
"""Scores with a larger relative difference are not equal in float32."""
LEAST = tl.constexpr(-(2.0**1000))
LN_2 = tl.constexpr(0.6931471805599453)
HIGHEST = tl.constexpr(2**31 - 1)
"""An upper bound of all ranks."""


@triton.jit
def first_overlapping(selectable, compress_block, compress_stride, select_block):
    """Return the first compressed block that ends behind the first token of a selection block."""
    return tl.maximum(selectable * select_block - compress_block + compress_stride, 0) // compress_stride


@triton.jit
def shared_tokens(block, selectable, num_compressed, compress_block, compress_stride, select_block):
    """Return how many tokens compressed blocks and selection blocks have in common, ``[K, S]``."""
    begin, start = (block * compress_stride)[:, None], (selectable * select_block)[None, :]
    common = tl.minimum(begin + compress_block, start + select_block) - tl.maximum(begin, start)
    return tl.where(block[:, None] < num_compressed, tl.maximum(common, 0), 0)


@triton.jit
def in_float64(tile):
    """Upcast a tile by way of a sum over an axis of length 1: Triton 3.6 fails where an operand of a float64 product
    was loaded in another dtype."""
    return tl.sum(tl.reshape(tile, [tile.shape[0], tile.shape[1], 1]).to(tl.float64), 2)


@triton.jit
def inner_in_float64(left, right):
    """Return ``left @ right.T`` in float64."""
    products = tl.dot(in_float64(left[0]), tl.trans(right[0]), out_dtype=tl.float64)
    if len(left) == 2:
        products += tl.dot(in_float64(left[1]), tl.trans(right[1]), out_dtype=tl.float64)
    return products


@triton.jit
def queries_at(place, doubtful, number, n, num_queries, EXACT: tl.constexpr):
    """Return the queries at ``place`` in a chunk, or with ``EXACT`` in the list of doubtful ones, and their mask."""
    is_query, query = place < number, place
    if EXACT:
        query = tl.load(doubtful + n * num_queries + place, mask=is_query, other=0)
    return query, is_query


@triton.jit(do_not_specialize=COUNTS)
def exact_totals(
    q, keys, doubtful, num_doubtful, tops, totals,
    first, stop, num_tokens, groups, num_compressed, compress_block, compress_stride, natural_scale,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute, for doubtful queries, the largest score in each part of the compressed blocks, and the sum of weights
    relative to it: ``[N, C, R, PARTS]`` each, in float64; -2**1000 and 0 where nothing is seen."""
    n = tl.program_id(1)
    item, group = n // groups, n % groups
    q = of_item(q, item, num_tokens * groups * HEADS, WIDTH)
    keys = of_item(keys, n, num_compressed, WIDTH)
    row = tl.arange(0, BLOCK_TOKENS * BLOCK_HEADS)
    head, num_queries = row % BLOCK_HEADS, stop - first
    number = tl.load(num_doubtful + n)
    for tile in range(tl.program_id(0), tl.cdiv(number, BLOCK_TOKENS), tl.num_programs(0)):
        place = tile * BLOCK_TOKENS + row // BLOCK_HEADS
        local, counts = queries_at(place, doubtful, number, n, num_queries, True)
        token = first + local
        at, exists = rows_of(token, head, counts, group, num_tokens, groups, HEADS)
        seen = num_complete(token, compress_block, compress_stride)
        most = tl.minimum(tl.max(tl.where(counts, seen, 0), 0), num_compressed)
        q_XD = vectors(q, at, exists, WIDTH, BLOCK_D, BLOCK_E)
        top = tl.full([BLOCK_TOKENS * BLOCK_HEADS], LEAST, tl.float64)
        total = tl.zeros([BLOCK_TOKENS * BLOCK_HEADS], tl.float64)
        of_part = tl.cdiv(tl.cdiv(most, BLOCK_KEYS), PARTS) * BLOCK_KEYS
        begin = tl.program_id(2) * of_part
        for start in range(begin, tl.minimum(begin + of_part, most), BLOCK_KEYS):
            block = start + tl.arange(0, BLOCK_KEYS)
            keys_KD = vectors(keys, block, block < most, WIDTH, BLOCK_D, BLOCK_E)
            products = inner_in_float64(q_XD, keys_KD) * natural_scale
            is_seen = block[None, :] < seen[:, None]
            new_top = tl.maximum(top, tl.max(tl.where(is_seen, products, LEAST), 1))
            weights = tl.where(is_seen, tl.exp(products - new_top[:, None]), 0.0)
            total = total * tl.exp(top - new_top) + tl.sum(weights, 1)
            top = new_top
        at_part = ((n * num_queries + local) * HEADS + head).to(tl.int64) * PARTS + tl.program_id(2)
        tl.store(tops + at_part, top, mask=exists)
        tl.store(totals + at_part, total, mask=exists)


@triton.jit
def exact_denominators(tops, totals, at_row, exists, PARTS: tl.constexpr):
    """Return the largest score of each row, and its sum of weights relative to it, from ``exact_totals``."""
    at_parts = at_row.to(tl.int64)[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
    part_tops = tl.load(tops + at_parts, mask=exists[:, None], other=0.0)
    top = tl.max(part_tops, 1)
    part_totals = tl.load(totals + at_parts, mask=exists[:, None], other=0.0)
    total = tl.sum(part_totals * tl.exp(part_tops - top[:, None]), 1)
    return top, tl.where(total == 0, 1.0, total)


@triton.jit
def doubt_of(q_XD, longest, BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr):
    """Return the bound on the relative error of each token's scores; ``longest`` is the length of the longest key."""
    squares = tl.zeros([BLOCK_TOKENS * BLOCK_HEADS], tl.float32)
    for i in tl.static_range(len(q_XD)):
        squares += tl.sum(q_XD[i].to(tl.float32) * q_XD[i].to(tl.float32), 1)
    return ERROR * (1 + longest * tl.sqrt(tl.max(tl.reshape(squares, [BLOCK_TOKENS, BLOCK_HEADS]), 1)))


@triton.jit
def inner_in_pieces(
    left, high, low, block, is_key,
    WIDTH: tl.constexpr, PIECES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Return the inner products with keys of one piece or two, of which ``high`` is loaded."""
    products = inner(left, high)
    if PIECES == 2:
        products = plus_inner(products, left, vectors(low, block, is_key, WIDTH, BLOCK_D, BLOCK_E))
    return products


@triton.jit
def quick_product(weights, shared):
    """Return ``weights @ shared`` by two products in bfloat16: of the rounded weights, and of what rounding left."""
    # rounded by integer operations: the instruction that rounds has an eighth of their speed
    rounded = ((weights.to(tl.int32, bitcast=True) + 32768) & -65536).to(tl.float32, bitcast=True)
    # in two steps, since the interpreter does not convert integers to bfloat16
    count = shared.to(tl.float32).to(tl.bfloat16)
    return product(rounded.to(tl.bfloat16), count) + product((weights - rounded).to(tl.bfloat16), count)


@triton.jit
def score_tile(
    tile, number,
    q, high, low, largest, lse, tops, totals, doubtful, scores, doubt,
    first, stop, num_tokens, groups, num_compressed, num_selectable,
    compress_block, compress_stride, select_block, step, scale, natural_scale,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, PIECES: tl.constexpr, EXACT: tl.constexpr, NUM_TILES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_SELECTABLE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Do the work of ``score_blocks`` for the queries of a tile."""
    n = tl.program_id(1)
    item, group = n // groups, n % groups
    q = of_item(q, item, num_tokens * groups * HEADS, WIDTH)
    high = of_item(high, n, num_compressed, WIDTH)
    if PIECES == 2:
        low = of_item(low, n, num_compressed, WIDTH)
    row = tl.arange(0, BLOCK_TOKENS * BLOCK_HEADS)
    head, num_queries = row % BLOCK_HEADS, stop - first
    place = tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    query, is_query = queries_at(place, doubtful, number, n, num_queries, EXACT)
    place = tile * BLOCK_TOKENS + row // BLOCK_HEADS
    local, counts = queries_at(place, doubtful, number, n, num_queries, EXACT)
    token = first + local
    at, exists = rows_of(token, head, counts, group, num_tokens, groups, HEADS)
    last = tl.max(tl.where(counts, token, 0), 0)
    seen = num_complete(token, compress_block, compress_stride)
    most = tl.minimum(num_complete(last, compress_block, compress_stride), num_compressed)
    q_XD = vectors(q, at, exists, WIDTH, BLOCK_D, BLOCK_E)
    at_row = (n * num_queries + local) * HEADS + head
    if EXACT:
        shift, total = exact_denominators(tops, totals, at_row, exists, PARTS)
    else:
        shift = tl.load(lse + at_row, mask=exists, other=float("inf"))
        longest = tl.load(largest + n).to(tl.float32) * tl.abs(natural_scale)
        off = doubt_of(q_XD, longest, BLOCK_TOKENS, BLOCK_HEADS)
        tl.store(doubt + n * num_queries + query, off, mask=is_query)
    num_begun = last // select_block + 1
    of_part = tl.cdiv(tl.cdiv(num_begun, step), PARTS) * step
    for begin in range(tl.program_id(2) * of_part, tl.minimum((tl.program_id(2) + 1) * of_part, num_begun), step):
        selectable = begin + tl.arange(0, BLOCK_SELECTABLE)
        start = first_overlapping(begin, compress_block, compress_stride, select_block)
        of_rows = tl.zeros([BLOCK_TOKENS * BLOCK_HEADS, BLOCK_SELECTABLE], tl.float64 if EXACT else tl.float32)
        for of_step in tl.static_range(NUM_TILES):
            block = start + of_step * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
            shared = shared_tokens(block, selectable, num_compressed, compress_block, compress_stride, select_block)
            is_seen = (block[None, :] < seen[:, None]) & exists[:, None]
            keys = vectors(high, block, block < most, WIDTH, BLOCK_D, BLOCK_E)
            if EXACT:
                products = inner_in_float64(q_XD, keys) * natural_scale
                weights = tl.where(is_seen, tl.exp(products - shift[:, None]) / total[:, None], 0.0)
                of_rows += tl.dot(weights, shared.to(tl.float64), out_dtype=tl.float64)
            else:
                products = inner_in_pieces(q_XD, keys, low, block, block < most, WIDTH, PIECES, BLOCK_D, BLOCK_E)
                weights = tl.where(is_seen, power_of_two(products * scale - shift[:, None]), 0.0)
                of_rows += quick_product(weights, shared)
        of_queries = tl.sum(tl.reshape(of_rows, [BLOCK_TOKENS, BLOCK_HEADS, BLOCK_SELECTABLE]), 1)
        at_score = (n * num_queries + query).to(tl.int64)[:, None] * num_selectable + selectable[None, :]
        is_score = is_query[:, None] & (selectable < tl.minimum(begin + step, num_selectable))[None, :]
        tl.store(scores + at_score, of_queries.to(tl.float32), mask=is_score)


@triton.jit(do_not_specialize=COUNTS)
def score_blocks(
    q, high, low, largest, lse, tops, totals, doubtful, num_doubtful, scores, doubt,
    first, stop, num_tokens, groups, num_compressed, num_selectable,
    compress_block, compress_stride, select_block, step, scale, natural_scale,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, PIECES: tl.constexpr, EXACT: tl.constexpr, NUM_TILES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_SELECTABLE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write ``scores`` (``[N, C, S]``, float32): sums of compressed blocks' probabilities, weighted by shared tokens.

    ``NUM_TILES`` tiles of ``BLOCK_KEYS`` compressed blocks cover all that overlap ``step`` selection blocks. With
    ``EXACT`` the queries in ``doubtful`` are scored in float64: ``high`` has the keys in float64, and ``tops`` and
    ``totals`` come from ``exact_totals``. Else ``doubt`` (``[N, C]``) gets the bound on the scores' relative error.
    Each of ``PARTS`` programs takes a part of the blocks.
    """
    if EXACT:
        number = tl.load(num_doubtful + tl.program_id(1))
        for tile in range(tl.program_id(0), tl.cdiv(number, BLOCK_TOKENS), tl.num_programs(0)):
            score_tile(
                tile, number,
                q, high, low, largest, lse, tops, totals, doubtful, scores, doubt, first, stop, num_tokens, groups,
                num_compressed, num_selectable, compress_block, compress_stride, select_block, step, scale,
                natural_scale, WIDTH, HEADS, PIECES, EXACT, NUM_TILES, BLOCK_TOKENS, BLOCK_HEADS, BLOCK_KEYS,
                BLOCK_SELECTABLE, BLOCK_D, BLOCK_E, PARTS,
            )  # fmt: skip
    else:
        score_tile(
            tl.program_id(0), stop - first,
            q, high, low, largest, lse, tops, totals, doubtful, scores, doubt, first, stop, num_tokens, groups,
            num_compressed, num_selectable, compress_block, compress_stride, select_block, step, scale, natural_scale,
            WIDTH, HEADS, PIECES, EXACT, NUM_TILES, BLOCK_TOKENS, BLOCK_HEADS, BLOCK_KEYS, BLOCK_SELECTABLE, BLOCK_D,
            BLOCK_E, PARTS,
        )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def choose_blocks(
    scores, doubt, doubtful, num_doubtful, is_doubtful, selected,
    first, num_queries, num_selectable, select_block, offset, num_listed,
    NUM_SELECTED: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_SELECTABLE: tl.constexpr, BLOCK_SELECTED: tl.constexpr,
):  # fmt: skip
    """Write ``selected`` (``[N, C, n]``): the query's own block, the first, the one before its own, then the best of
    the others in order of place, of equal scores the first; -1 where there are fewer. A query is doubtful if another
    order of nearly equal scores would change the choice.

    Bisection finds the rank of the last chosen block: its range is halved until as many ranks reach it as blocks are
    taken, in about 10 rounds. Taking one block after the other would go through all of them ``NUM_SELECTED`` times.
    """
    n = tl.program_id(1)
    number = tl.load(num_doubtful + n) if EXACT else num_queries
    if tl.program_id(0) * BLOCK_QUERIES >= number:
        return
    place = tl.program_id(0) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    query, is_query = queries_at(place, doubtful, number, n, num_queries, EXACT)
    own = tl.where(is_query, (first + query) // select_block, 0)
    at_query = (n * num_queries + query).to(tl.int64)
    block = tl.broadcast_to(tl.arange(0, BLOCK_SELECTABLE)[None, :], [BLOCK_QUERIES, BLOCK_SELECTABLE])
    is_scored = (block > 0) & (block < own[:, None] - 1)
    # the bits of non-negative floats are ordered as the floats are
    ranks = scores.to(tl.pointer_type(tl.int32), bitcast=True)
    rank = tl.load(ranks + at_query[:, None] * num_selectable + block, mask=is_scored, other=-1)

    # invariant: at least as many ranks as are taken are >= low, if there are so many, and fewer are >= high
    low, high = tl.min(tl.where(is_scored, rank, HIGHEST), 1), tl.max(rank, 1) + 1
    reaching = tl.maximum(own - 2, 0)
    while tl.max(((reaching > NUM_SELECTED - 3) & (high - low > 1)).to(tl.int32), 0) > 0:
        middle = low + (high - low) // 2
        reaching_it = tl.sum((rank >= middle[:, None]).to(tl.int32), 1)
        is_low = reaching_it >= NUM_SELECTED - 3
        reaching = tl.where(is_low, reaching_it, reaching)
        low, high = tl.where(is_low, middle, low), tl.where(is_low, high, middle)
    is_chosen = rank >= low[:, None]
    if tl.max(reaching, 0) > NUM_SELECTED - 3:
        ties = (rank == low[:, None]).to(tl.int32)
        too_many = (reaching - (NUM_SELECTED - 3))[:, None]
        is_chosen = is_chosen & ((ties == 0) | (tl.cumsum(ties, 1) <= tl.sum(ties, 1)[:, None] - too_many))

    selected += (n * num_listed + first - offset + query).to(tl.int64)[:, None] * NUM_SELECTED
    slot = tl.arange(0, BLOCK_SELECTED)[None, :]
    forced = tl.where(slot == 0, own[:, None], tl.where(slot == 1, 0, own[:, None] - 1))
    forced = tl.where(slot <= own[:, None], forced, -1)
    is_forced = (slot < NUM_SELECTED) & ((slot < 3) | (slot > own[:, None])) & is_query[:, None]
    tl.store(selected + slot, forced, mask=is_forced)
    if NUM_SELECTED > 3:
        tl.store(selected + tl.cumsum(is_chosen.to(tl.int32), 1) + 2, block, mask=is_chosen)
    if not EXACT:
        last_rank = tl.min(tl.where(is_chosen, rank, HIGHEST), 1)
        next_rank = tl.max(tl.where(is_chosen, -1, rank), 1)
        last_score = last_rank.to(tl.float32, bitcast=True)
        next_score = next_rank.to(tl.float32, bitcast=True)
        near = next_score >= last_score * (1 - 2 * tl.load(doubt + at_query, mask=is_query, other=0.0))
        doubts = (next_rank >= 0) & (NUM_SELECTED > 3) & (near | (last_score < SMALLEST))
        tl.store(is_doubtful + at_query, doubts.to(tl.int32), mask=is_query)


@triton.jit
def near_blocks(scores, last, off, own, BLOCK_NEAR: tl.constexpr, BLOCK_SELECTABLE: tl.constexpr):
    """Return the blocks whose quick scores may be as good as ``last``, the last chosen one's, or as bad; how many there
    are; and whether these are all, and quick scores can be relied on."""
    number = tl.arange(0, BLOCK_NEAR)
    near = tl.full([BLOCK_NEAR], 0, tl.int32)
    num_near = 0
    are_all = last >= SMALLEST
    for start in range(0, own - 1, BLOCK_SELECTABLE):
        block = start + tl.arange(0, BLOCK_SELECTABLE)
        is_scored = (block > 0) & (block < own - 1)
        score = tl.load(scores + block, mask=is_scored, other=0.0)
        is_candidate = is_scored & (score * (1 - off) <= last * (1 + off)) & (score * (1 + off) >= last * (1 - off))
        left = tl.where(is_candidate, block, NO_BLOCK)
        first_left = tl.min(left, 0)
        while (first_left < NO_BLOCK) & (num_near < BLOCK_NEAR):
            near = tl.where(number == num_near, first_left, near)
            left = tl.where(left == first_left, NO_BLOCK, left)
            num_near, first_left = num_near + 1, tl.min(left, 0)
        are_all = are_all & (first_left == NO_BLOCK)
    return near, num_near, are_all


@triton.jit
def ahead_of_first(
    near, num_near, q_XD, keys, shift, seen, compress_block, compress_stride, select_block, natural_scale,
    WIDTH: tl.constexpr, NUM_TILES: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    BLOCK_NEAR: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Return how far the score of each near block is ahead of the first one's, and the sum over heads of the distance,
    in float64."""
    number = tl.arange(0, BLOCK_NEAR)
    of_first = tl.zeros([BLOCK_HEADS], tl.float64)
    ahead = tl.zeros([BLOCK_NEAR], tl.float64)
    distance = tl.zeros([BLOCK_NEAR], tl.float64)
    for i in range(0, num_near):
        selectable = tl.sum(tl.where(number == i, near, 0), 0)
        start = first_overlapping(selectable, compress_block, compress_stride, select_block)
        of_heads = tl.zeros([BLOCK_HEADS], tl.float64)
        for tile in range(0, NUM_TILES):
            overlapping = start + tile * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
            keys_KD = vectors(keys, overlapping, overlapping < seen, WIDTH, BLOCK_D, BLOCK_E)
            products = inner_in_float64(q_XD, keys_KD) * natural_scale
            begin = tl.maximum(overlapping * compress_stride, selectable * select_block)
            end = tl.minimum(overlapping * compress_stride + compress_block, (selectable + 1) * select_block)
            shared = tl.where(overlapping < seen, tl.maximum(end - begin, 0), 0).to(tl.float64)[None, :]
            of_heads += tl.sum(tl.where(shared > 0, tl.exp(products - shift[:, None]) * shared, 0.0), 1)
        of_first = tl.where(i == 0, of_heads, of_first)
        ahead = tl.where(number == i, tl.sum(of_heads - of_first, 0), ahead)
        distance = tl.where(number == i, tl.sum(tl.abs(of_heads - of_first), 0), distance)
    return ahead, distance


@triton.jit
def best_near_blocks(ahead, off_by, last, num_near, number, BLOCK_NEAR: tl.constexpr):
    """Return which near blocks are the best ``number`` ones, and whether errors and rounding leave no doubt of it.
    ``last`` is a score of their size."""
    is_near = tl.arange(0, BLOCK_NEAR) < num_near
    least, most = ahead - off_by, ahead + off_by + (last * ROUNDING).to(tl.float64)
    is_pair = is_near[:, None] & is_near[None, :]
    num_below = tl.sum((is_pair & (least[:, None] > most[None, :])).to(tl.int32), 1)
    num_above = tl.sum((is_pair & (least[None, :] > most[:, None])).to(tl.int32), 1)
    is_best = is_near & (num_near - num_below <= number)
    is_certain = tl.sum((is_near & (num_above < number)).to(tl.int32), 0) == tl.sum(is_best.to(tl.int32), 0)
    return is_best, is_certain


@triton.jit(do_not_specialize=COUNTS)
def settle_blocks(
    q, keys, lse, doubt, scores, doubtful, num_doubtful, is_doubtful, selected,
    first, num_queries, num_tokens, groups, num_compressed, num_selectable,
    compress_block, compress_stride, select_block, offset, num_listed, natural_scale,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, NUM_SELECTED: tl.constexpr, NUM_TILES: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_SELECTABLE: tl.constexpr, BLOCK_SELECTED: tl.constexpr,
    BLOCK_NEAR: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write the best of the blocks near the last chosen one to ``selected``, or leave the query doubtful. One program
    per query.

    A block is near if the quick scores do not decide whether it is ahead of the last chosen block; blocks above are
    chosen, blocks below are not. For each near block, the scores ``p`` of its heads are computed in float64, with
    denominators whose relative error is at most ``doubt``, ``o``. The difference of two blocks' scores is then off by
    at most ``o * sum(abs(p - p'))``. Differences are taken from the first near block. Two blocks are ordered if their
    differences are further apart than their errors and float32's rounding. A query with more than ``BLOCK_NEAR`` near
    blocks stays doubtful.
    """
    n = tl.program_id(1)
    if tl.program_id(0) >= tl.load(num_doubtful + n):
        return
    query = tl.load(doubtful + n * num_queries + tl.program_id(0))
    item, group, token = n // groups, n % groups, first + query
    own = token // select_block
    at_query = (n * num_queries + query).to(tl.int64)
    scores += at_query * num_selectable
    off = tl.load(doubt + at_query)

    slot = tl.arange(0, BLOCK_SELECTED)
    at_slot = selected + (n * num_listed + token - offset).to(tl.int64) * NUM_SELECTED + slot
    listed = tl.load(at_slot, mask=slot < NUM_SELECTED, other=-1)
    is_chosen = (listed > 0) & (listed < own - 1)
    chosen_score = tl.load(scores + listed, mask=is_chosen, other=float("inf"))
    last = tl.min(chosen_score, 0)
    is_open = is_chosen & (chosen_score * (1 - off) <= last * (1 + off))
    num_open = tl.sum(is_open.to(tl.int32), 0)

    near, num_near, is_settled = near_blocks(scores, last, off, own, BLOCK_NEAR, BLOCK_SELECTABLE)
    if not is_settled:
        return

    head = tl.arange(0, BLOCK_HEADS)
    at, exists = rows_of(token, head, head < HEADS, group, num_tokens, groups, HEADS)
    q_XD = vectors(of_item(q, item, num_tokens * groups * HEADS, WIDTH), at, exists, WIDTH, BLOCK_D, BLOCK_E)
    keys = of_item(keys, n, num_compressed, WIDTH)
    shift = tl.load(lse + at_query * HEADS + head, mask=exists, other=float("inf")).to(tl.float64) * LN_2
    seen = tl.minimum(num_complete(token, compress_block, compress_stride), num_compressed)
    ahead, off_by = ahead_of_first(
        near, num_near, q_XD, keys, shift, seen, compress_block, compress_stride, select_block, natural_scale,
        WIDTH, NUM_TILES, BLOCK_HEADS, BLOCK_KEYS, BLOCK_NEAR, BLOCK_D, BLOCK_E,
    )  # fmt: skip
    off_by *= off

    is_best, is_settled = best_near_blocks(ahead, off_by, last, num_near, num_open, BLOCK_NEAR)
    from_slot = tl.cumsum(is_open.to(tl.int32), 0)
    from_best = tl.cumsum(is_best.to(tl.int32), 0)
    is_match = (from_slot[:, None] == from_best[None, :]) & is_best[None, :]
    tl.store(at_slot, tl.sum(tl.where(is_match, near[None, :], 0), 1), mask=is_open & is_settled)
    tl.store(is_doubtful + at_query, 0, mask=is_settled)


@triton.jit(do_not_specialize=COUNTS)
def list_doubtful(is_doubtful, doubtful, num_doubtful, num_queries, BLOCK: tl.constexpr):
    """List the doubtful queries of each key-value head in order, and count them."""
    n = tl.program_id(0)
    number = 0
    for start in range(0, num_queries, BLOCK):
        query = start + tl.arange(0, BLOCK)
        is_listed = tl.load(is_doubtful + n * num_queries + query, mask=query < num_queries, other=0)
        place = number + tl.cumsum(is_listed, 0) - is_listed
        tl.store(doubtful + n * num_queries + place, query, mask=is_listed > 0)
        number += tl.sum(is_listed, 0)
    tl.store(num_doubtful + n, number)
