"""The Triton kernels of native sparse attention: its three branches, and the gradients of queries, keys and values.

A row is one query head of one token. A tile has the heads that share a key-value head, of several tokens, so that keys
are read once for all of them and products have at least 16 rows. Scores are exponents of 2. Where compressed keys
select blocks, they come in two pieces of the working dtype, whose sum has twice its digits.
"""

# B batch, T tokens, G key-value heads, R query heads of each, N = B x G, D width of a head, M compressed blocks,
# S selection blocks, n selected blocks, X rows of a tile, K keys of a tile

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels import power_of_two, product

COMPRESSED_BRANCH = tl.constexpr(0)
SELECTED_BRANCH = tl.constexpr(1)
WINDOW_BRANCH = tl.constexpr(2)
NO_BLOCK = tl.constexpr(2**31 - 1)

COUNTS = (
    "first", "stop", "offset", "window", "compress_block", "compress_stride", "select_block", "step", "segment_tokens",
    "groups", "num_tokens", "num_compressed", "num_listed", "num_segments",
)  # fmt: skip
"""Arguments that Triton does not specialize: one kernel serves every length, window and stride. It still specializes
``num_rows``, ``num_queries`` and ``num_selectable``, which decide how many elements a load takes at once."""


# ---------------------------------------------------------------- tiles
@triton.jit
def rows_of(token, head, counts, group, num_tokens, groups, HEADS: tl.constexpr):
    """Return the index of each row of ``[T, G, R]`` in its item of the batch, and the rows' mask."""
    return (token * groups + group) * HEADS + head, counts & (head < HEADS) & (token < num_tokens)


@triton.jit
def of_item(tensor, item, num_rows, width):
    """Return a pointer to the rows of one item of the batch."""
    return tensor + item.to(tl.int64) * num_rows * width


@triton.jit
def vectors(of, at, exists, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):
    """Load the vectors of rows, zeros where masked: ``[X, D]``, or two such tiles where ``BLOCK_E`` is not 0.

    A tile has a power of two of channels. 80 channels are a tile of 64 and one of 16: one tile of 128 would take 1.6
    times the products and registers.
    """
    begin = (of + at.to(tl.int64) * WIDTH)[:, None]
    channel = tl.arange(0, BLOCK_D)
    first = tl.load(begin + channel[None, :], mask=exists[:, None] & (channel < WIDTH)[None, :], other=0.0)
    tiles = (first,)
    if BLOCK_E > 0:
        channel = BLOCK_D + tl.arange(0, BLOCK_E)
        mask = exists[:, None] & (channel < WIDTH)[None, :]
        tiles = (first, tl.load(begin + channel[None, :], mask=mask, other=0.0))
    return tiles


@triton.jit
def write_vectors(to, at, exists, tiles, WIDTH: tl.constexpr):
    begin = (to + at.to(tl.int64) * WIDTH)[:, None]
    for i in tl.static_range(len(tiles)):
        channel = tl.arange(0, tiles[i].shape[1])
        if i == 1:
            channel += tiles[0].shape[1]
        mask = exists[:, None] & (channel < WIDTH)[None, :]
        tl.store(begin + channel[None, :], tiles[i].to(to.dtype.element_ty), mask=mask)


@triton.jit
def zeros(ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):
    first = tl.zeros([ROWS, BLOCK_D], tl.float32)
    tiles = (first,)
    if BLOCK_E > 0:
        tiles = (first, tl.zeros([ROWS, BLOCK_E], tl.float32))
    return tiles


@triton.jit
def inner(left, right):
    """Return ``left @ right.T``."""
    products = product(left[0], tl.trans(right[0]))
    if len(left) == 2:
        products += product(left[1], tl.trans(right[1]))
    return products


@triton.jit
def plus_inner(products, left, right):
    """Return ``products + left @ right.T``; each product accumulates onto the sum before it."""
    products += product(left[0], tl.trans(right[0]))
    if len(left) == 2:
        products += product(left[1], tl.trans(right[1]))
    return products


@triton.jit
def plus_product(sums, weights, tiles):
    """Return ``sums + weights @ tiles``."""
    first = sums[0] + product(weights.to(tiles[0].dtype), tiles[0])
    both = (first,)
    if len(sums) == 2:
        both = (first, sums[1] + product(weights.to(tiles[1].dtype), tiles[1]))
    return both


@triton.jit
def plus(one, other):
    first = one[0] + other[0].to(tl.float32)
    both = (first,)
    if len(one) == 2:
        both = (first, one[1] + other[1].to(tl.float32))
    return both


@triton.jit
def times(tiles, factor):
    """Multiply tiles by a number, or by one number per row, ``[X, 1]``."""
    first = tiles[0] * factor
    both = (first,)
    if len(tiles) == 2:
        both = (first, tiles[1] * factor)
    return both


@triton.jit
def by_channel(tiles, factors):
    first = tiles[0] * factors[0]
    both = (first,)
    if len(tiles) == 2:
        both = (first, tiles[1] * factors[1])
    return both


@triton.jit
def num_complete(token, compress_block, compress_stride):
    """Return how many compressed blocks a query at ``token`` sees."""
    return tl.maximum(token - compress_block + 1 + compress_stride, 0) // compress_stride


# ---------------------------------------------------------------- softmax, a tile of keys at a time
@triton.jit
def empty_state(ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BACKWARD: tl.constexpr):
    """Return the state of an online softmax before the first key: the largest score, the sum of weights, and weighted
    sums. Forward sums values. Backward sums the gradients of weights, keys times these minus their mean, and keys."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = zeros(ROWS, BLOCK_D, BLOCK_E)
    state = (top, total, sums)
    if BACKWARD:
        state = (top, total, tl.zeros([ROWS], tl.float32), sums, zeros(ROWS, BLOCK_D, BLOCK_E))
    return state


@triton.jit
def relative_weights(scores, top):
    """Return the largest score so far, a tile's weights relative to it, and the factor for all weights before."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    above = tl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, power_of_two(scores - above[:, None]), power_of_two(top - above)


@triton.jit
def with_keys(state, scores, keys, values, up_XD, BACKWARD: tl.constexpr):
    """Return the state with a tile of keys added."""
    if BACKWARD:
        state = _with_gradients(state, scores, inner(up_XD, values), keys)
    else:
        top, total, sums = state
        top, weights, kept = relative_weights(scores, top)
        total = total * kept + tl.sum(weights, 1)
        state = (top, total, plus_product(times(sums, kept[:, None]), weights, values))
    return state


@triton.jit
def _with_gradients(state, scores, grad_weights, keys):
    """Do so in backward: a score's gradient is its weight times (the weight's gradient - their mean).

    The mean is known only at the end. So keys are summed with the mean so far, and the sum is corrected as the mean
    moves. A difference of two sums would be simpler, but loses its digits where one key has nearly all weight.
    """
    top, total, moment, sums, keys_sum = state
    before = mean_of(moment, total)
    top, weights, kept = relative_weights(scores, top)
    total = total * kept + tl.sum(weights, 1)
    # an unseen key has weight 0 and adds nothing, even if its value is infinite or NaN
    moment = moment * kept + tl.sum(tl.where(weights > 0, weights * grad_weights, weights), 1)
    mean = mean_of(moment, total)
    sums = times(plus(sums, times(keys_sum, (before - mean)[:, None])), kept[:, None])
    sums = plus_product(sums, tl.where(weights > 0, weights * (grad_weights - mean[:, None]), weights), keys)
    return top, total, moment, sums, plus_product(times(keys_sum, kept[:, None]), weights, keys)


@triton.jit
def mean_of(moment, total):
    return moment / tl.where(total == 0, 1.0, total)


@triton.jit
def logarithm(top, total):
    """Return log2 of a softmax's denominator; it is infinite where nothing is seen, so that all weights are 0."""
    return tl.where(total == 0, float("inf"), top + tl.log2(total))


@triton.jit
def write_rows(
    state, to, gates, grad_gates, stats, branch, at, exists, rows_of_item, num_rows, natural_scale, item,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BACKWARD: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Write, or with ``ADDS`` add, the output of a branch times its gate, zeros where nothing is seen. In backward do
    so with the gradient of q, and write that of the gate and ``stats``: log2 of the denominator, the mean of the
    weights' gradients, which is the gate's gradient, and the gate in float32: 16-bit loads are not prefetched."""
    to = of_item(to, item, rows_of_item, WIDTH)
    gates = of_item(gates, item, rows_of_item, 3)
    gate = tl.load(gates + at * 3 + branch, mask=exists, other=0.0).to(tl.float32)
    if BACKWARD:
        top, total, moment, sums, _ = state
        mean = mean_of(moment, total)
        grad_gates = of_item(grad_gates, item, rows_of_item, 3)
        of_branch = of_item(stats, item, rows_of_item, 1) + branch * 3 * num_rows + at
        tl.store(of_branch, logarithm(top, total), mask=exists)
        tl.store(of_branch + num_rows, mean, mask=exists)
        tl.store(of_branch + 2 * num_rows, gate, mask=exists)
        tl.store(grad_gates + at * 3 + branch, mean.to(grad_gates.dtype.element_ty), mask=exists)
        gate *= natural_scale
    else:
        top, total, sums = state
    sums = times(sums, (gate / tl.where(total == 0, 1.0, total))[:, None])
    if ADDS:
        sums = plus(sums, vectors(to, at, exists, WIDTH, BLOCK_D, BLOCK_E))
    write_vectors(to, at, exists, sums, WIDTH)


# ---------------------------------------------------------------- rows: output, or gradients of q and of the gates
@triton.jit
def rows_of_tile(
    begin, stop, q, upstream, num_tokens, groups,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, BACKWARD: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Return the rows of the tokens from ``begin`` on: their tokens, their indices in the item of the batch, their
    mask, their q, and in backward their upstream gradients."""
    item, group = tl.program_id(1) // groups, tl.program_id(1) % groups
    row = tl.arange(0, BLOCK_TOKENS * BLOCK_HEADS)
    token = begin + row // BLOCK_HEADS
    at, exists = rows_of(token, row % BLOCK_HEADS, token < stop, group, num_tokens, groups, HEADS)
    q = of_item(q, item, num_tokens * groups * HEADS, WIDTH)
    q_XD = vectors(q, at, exists, WIDTH, BLOCK_D, BLOCK_E)
    up_XD = q_XD
    if BACKWARD:
        upstream = of_item(upstream, item, num_tokens * groups * HEADS, WIDTH)
        up_XD = vectors(upstream, at, exists, WIDTH, BLOCK_D, BLOCK_E)
    return token, at, exists, q_XD, up_XD


@triton.jit(do_not_specialize=COUNTS)
def compressed_rows(
    q, gates, upstream, high, low, compressed_v, to, grad_gates, stats, lse,
    first, stop, num_tokens, groups, num_compressed, num_rows, compress_block, compress_stride, scale, natural_scale,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, PIECES: tl.constexpr, BACKWARD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Compute the compressed branch of queries ``first`` to ``stop``. Forward also writes ``lse`` (``[N, C, R]``).

    A program takes ``BLOCK_TOKENS`` queries of a key-value head. The last queries start first: they have most keys.
    """
    n = tl.program_id(1)
    high = of_item(high, n, num_compressed, WIDTH)
    if PIECES == 2:
        low = of_item(low, n, num_compressed, WIDTH)
    compressed_v = of_item(compressed_v, n, num_compressed, WIDTH)
    begin = first + (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_TOKENS
    token, at, exists, q_XD, up_XD = rows_of_tile(
        begin, stop, q, upstream, num_tokens, groups,
        WIDTH, HEADS, BACKWARD, BLOCK_TOKENS, BLOCK_HEADS, BLOCK_D, BLOCK_E,
    )  # fmt: skip
    state = empty_state(BLOCK_TOKENS * BLOCK_HEADS, BLOCK_D, BLOCK_E, BACKWARD)
    seen = num_complete(token, compress_block, compress_stride)
    last = tl.minimum(begin + BLOCK_TOKENS, stop) - 1
    most = tl.minimum(num_complete(last, compress_block, compress_stride), num_compressed)
    for start in range(0, most, BLOCK_KEYS):
        block = start + tl.arange(0, BLOCK_KEYS)
        keys = vectors(high, block, block < most, WIDTH, BLOCK_D, BLOCK_E)
        products = inner(q_XD, keys)
        if PIECES == 2:
            products = plus_inner(products, q_XD, vectors(low, block, block < most, WIDTH, BLOCK_D, BLOCK_E))
        scores = tl.where(block[None, :] < seen[:, None], products * scale, float("-inf"))
        values = vectors(compressed_v, block, block < most, WIDTH, BLOCK_D, BLOCK_E)
        state = with_keys(state, scores, keys, values, up_XD, BACKWARD)
    if not BACKWARD:
        at_lse = (n * (stop - first) + token - first) * HEADS + at % HEADS
        tl.store(lse + at_lse, logarithm(state[0], state[1]), mask=exists)
    write_rows(
        state, to, gates, grad_gates, stats, COMPRESSED_BRANCH, at, exists, num_tokens * groups * HEADS, num_rows,
        natural_scale, n // groups, WIDTH, BLOCK_D, BLOCK_E, BACKWARD, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def window_rows(
    q, k, v, gates, upstream, to, grad_gates, stats,
    first, stop, num_tokens, groups, num_rows, window, scale, natural_scale,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, BACKWARD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Compute the window branch of queries ``first`` to ``stop``, and add it to the results."""
    n = tl.program_id(1)
    item, group = n // groups, n % groups
    k = of_item(k, item, num_tokens * groups, WIDTH)
    v = of_item(v, item, num_tokens * groups, WIDTH)
    begin = first + tl.program_id(0) * BLOCK_TOKENS
    token, at, exists, q_XD, up_XD = rows_of_tile(
        begin, stop, q, upstream, num_tokens, groups,
        WIDTH, HEADS, BACKWARD, BLOCK_TOKENS, BLOCK_HEADS, BLOCK_D, BLOCK_E,
    )  # fmt: skip
    state = empty_state(BLOCK_TOKENS * BLOCK_HEADS, BLOCK_D, BLOCK_E, BACKWARD)
    last = tl.minimum(begin + BLOCK_TOKENS, stop) - 1
    for start in range(tl.maximum(begin - window + 1, 0), last + 1, BLOCK_KEYS):
        key = start + tl.arange(0, BLOCK_KEYS)
        keys = vectors(k, key * groups + group, key <= last, WIDTH, BLOCK_D, BLOCK_E)
        age = token[:, None] - key[None, :]
        scores = tl.where((age >= 0) & (age < window), inner(q_XD, keys) * scale, float("-inf"))
        values = vectors(v, key * groups + group, key <= last, WIDTH, BLOCK_D, BLOCK_E)
        state = with_keys(state, scores, keys, values, up_XD, BACKWARD)
    write_rows(
        state, to, gates, grad_gates, stats, WINDOW_BRANCH, at, exists, num_tokens * groups * HEADS, num_rows,
        natural_scale, item, WIDTH, BLOCK_D, BLOCK_E, BACKWARD, True,
    )  # fmt: skip


@triton.jit
def next_block(blocks, block):
    """Return the smallest of ``blocks`` that is larger than ``block``."""
    return tl.min(tl.min(tl.where(blocks > block, blocks, NO_BLOCK), 1), 0)


@triton.jit(do_not_specialize=COUNTS)
def selected_rows(
    q, k, v, gates, upstream, selected, to, grad_gates, stats,
    first, stop, offset, num_listed, num_tokens, groups, num_rows, scale, natural_scale,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, SELECT_BLOCK: tl.constexpr, NUM_SELECTED: tl.constexpr,
    BACKWARD: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_SELECTED: tl.constexpr,
):  # fmt: skip
    """Compute the selected branch of queries ``first`` to ``stop``, and add it to the results.

    ``selected`` lists the blocks of ``num_listed`` tokens from ``offset`` on. The blocks of all tokens of a tile are
    read in order, each once, whichever tokens selected it.
    """
    PARTS: tl.constexpr = (SELECT_BLOCK + BLOCK_KEYS - 1) // BLOCK_KEYS
    n = tl.program_id(1)
    item, group = n // groups, n % groups
    k = of_item(k, item, num_tokens * groups, WIDTH)
    v = of_item(v, item, num_tokens * groups, WIDTH)
    begin = first + tl.program_id(0) * BLOCK_TOKENS
    token, at, exists, q_XD, up_XD = rows_of_tile(
        begin, stop, q, upstream, num_tokens, groups,
        WIDTH, HEADS, BACKWARD, BLOCK_TOKENS, BLOCK_HEADS, BLOCK_D, BLOCK_E,
    )  # fmt: skip
    state = empty_state(BLOCK_TOKENS * BLOCK_HEADS, BLOCK_D, BLOCK_E, BACKWARD)

    listed, slot = begin + tl.arange(0, BLOCK_TOKENS), tl.arange(0, BLOCK_SELECTED)
    at_listed = (n * num_listed + listed - offset).to(tl.int64)[:, None] * NUM_SELECTED + slot[None, :]
    is_listed = (listed < stop)[:, None] & (slot < NUM_SELECTED)[None, :]
    blocks = tl.load(selected + at_listed, mask=is_listed, other=-1)
    blocks = tl.where(blocks < 0, NO_BLOCK, blocks)
    number, block = 0, next_block(blocks, -1)
    while block < NO_BLOCK:
        number, block = number + 1, next_block(blocks, block)

    block = next_block(blocks, -1)
    for step in range(0, number * PARTS):
        place = (step % PARTS) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
        key = block * SELECT_BLOCK + place
        is_key = (place < SELECT_BLOCK) & (key < num_tokens)
        keys = vectors(k, key * groups + group, is_key, WIDTH, BLOCK_D, BLOCK_E)
        has = tl.max((blocks == block).to(tl.int32), 1)
        has = tl.reshape(tl.broadcast_to(has[:, None], [BLOCK_TOKENS, BLOCK_HEADS]), [BLOCK_TOKENS * BLOCK_HEADS])
        seen = (has[:, None] > 0) & (key[None, :] <= token[:, None]) & is_key[None, :]
        scores = tl.where(seen, inner(q_XD, keys) * scale, float("-inf"))
        values = vectors(v, key * groups + group, is_key, WIDTH, BLOCK_D, BLOCK_E)
        state = with_keys(state, scores, keys, values, up_XD, BACKWARD)
        block = tl.where(step % PARTS == PARTS - 1, next_block(blocks, block), block)
    write_rows(
        state, to, gates, grad_gates, stats, SELECTED_BRANCH, at, exists, num_tokens * groups * HEADS, num_rows,
        natural_scale, item, WIDTH, BLOCK_D, BLOCK_E, BACKWARD, True,
    )  # fmt: skip


# ---------------------------------------------------------------- gradients of keys and values
@triton.jit
def plus_gradients(
    grad_k_KD, grad_v_KD, k_KD, v_KD, q, upstream, stats, branch, at, exists, seen_KX, num_rows, scale,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Add what rows contribute in a branch to the gradients of keys, which lack the natural scale, and of values."""
    q_XD = vectors(q, at, exists, WIDTH, BLOCK_D, BLOCK_E)
    up_XD = vectors(upstream, at, exists, WIDTH, BLOCK_D, BLOCK_E)
    of_branch = stats + branch * 3 * num_rows + at
    lse = tl.load(of_branch, mask=exists, other=float("inf"))
    mean = tl.load(of_branch + num_rows, mask=exists, other=0.0)
    gate = tl.load(of_branch + 2 * num_rows, mask=exists, other=0.0)
    weights_KX = power_of_two(inner(k_KD, q_XD) * scale - lse[None, :]) * gate[None, :]
    weights_KX = tl.where(seen_KX & exists[None, :], weights_KX, 0.0)
    grad_scores_KX = tl.where(weights_KX == 0, 0.0, weights_KX * (inner(v_KD, up_XD) - mean[None, :]))
    return plus_product(grad_k_KD, grad_scores_KX, q_XD), plus_product(grad_v_KD, weights_KX, up_XD)


@triton.jit(do_not_specialize=COUNTS)
def gradients_of_compressed(
    q, upstream, compressed_k, compressed_v, stats, grad_k, grad_v,
    num_tokens, groups, num_compressed, num_rows, compress_block, compress_stride, scale, natural_scale,
    WIDTH: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of compressed keys and values, ``[N, M, D]`` in float32: a program takes ``BLOCK_KEYS``
    compressed blocks and all queries after them."""
    n = tl.program_id(1)
    item, group = n // groups, n % groups
    q = of_item(q, item, num_tokens * groups * HEADS, WIDTH)
    upstream = of_item(upstream, item, num_tokens * groups * HEADS, WIDTH)
    compressed_k = of_item(compressed_k, n, num_compressed, WIDTH)
    compressed_v = of_item(compressed_v, n, num_compressed, WIDTH)
    grad_k = of_item(grad_k, n, num_compressed, WIDTH)
    grad_v = of_item(grad_v, n, num_compressed, WIDTH)
    stats += item.to(tl.int64) * num_tokens * groups * HEADS
    row = tl.arange(0, BLOCK_TOKENS * BLOCK_HEADS)
    block = tl.program_id(0) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    is_block = block < num_compressed
    last = block * compress_stride + compress_block - 1
    k_KD = vectors(compressed_k, block, is_block, WIDTH, BLOCK_D, BLOCK_E)
    v_KD = vectors(compressed_v, block, is_block, WIDTH, BLOCK_D, BLOCK_E)
    grad_k_KD = zeros(BLOCK_KEYS, BLOCK_D, BLOCK_E)
    grad_v_KD = zeros(BLOCK_KEYS, BLOCK_D, BLOCK_E)
    for begin in range(tl.min(last, 0), num_tokens, BLOCK_TOKENS):
        token, head = begin + row // BLOCK_HEADS, row % BLOCK_HEADS
        at, exists = rows_of(token, head, token < num_tokens, group, num_tokens, groups, HEADS)
        grad_k_KD, grad_v_KD = plus_gradients(
            grad_k_KD, grad_v_KD, k_KD, v_KD, q, upstream, stats, COMPRESSED_BRANCH, at, exists,
            last[:, None] <= token[None, :], num_rows, scale, WIDTH, BLOCK_D, BLOCK_E,
        )  # fmt: skip
    write_vectors(grad_k, block, is_block, times(grad_k_KD, natural_scale), WIDTH)
    write_vectors(grad_v, block, is_block, grad_v_KD, WIDTH)


@triton.jit(do_not_specialize=COUNTS)
def gradients_of_first_block(
    q, k, v, upstream, stats, grad_k, grad_v,
    num_tokens, groups, num_rows, segment_tokens, scale,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, SELECT_BLOCK: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Sum what the tokens of each segment add to the gradients of the first block in the selected branch: ``[N,
    segments, SELECT_BLOCK, D]`` in float32, without the natural scale. All tokens select this block, and a single
    program would go through all rows."""
    n, segment, first_key = tl.program_id(1), tl.program_id(2), tl.program_id(0) * BLOCK_KEYS
    item, group = n // groups, n % groups
    q = of_item(q, item, num_tokens * groups * HEADS, WIDTH)
    upstream = of_item(upstream, item, num_tokens * groups * HEADS, WIDTH)
    k = of_item(k, item, num_tokens * groups, WIDTH)
    v = of_item(v, item, num_tokens * groups, WIDTH)
    stats += item.to(tl.int64) * num_tokens * groups * HEADS
    row = tl.arange(0, BLOCK_TOKENS * BLOCK_HEADS)
    key = first_key + tl.arange(0, BLOCK_KEYS)
    is_key = (key < SELECT_BLOCK) & (key < num_tokens)
    k_KD = vectors(k, key * groups + group, is_key, WIDTH, BLOCK_D, BLOCK_E)
    v_KD = vectors(v, key * groups + group, is_key, WIDTH, BLOCK_D, BLOCK_E)
    grad_k_KD = zeros(BLOCK_KEYS, BLOCK_D, BLOCK_E)
    grad_v_KD = zeros(BLOCK_KEYS, BLOCK_D, BLOCK_E)
    stop = tl.minimum((segment + 1) * segment_tokens, num_tokens)
    for begin in range(segment * segment_tokens, stop, BLOCK_TOKENS):
        token, head = begin + row // BLOCK_HEADS, row % BLOCK_HEADS
        at, exists = rows_of(token, head, token < stop, group, num_tokens, groups, HEADS)
        grad_k_KD, grad_v_KD = plus_gradients(
            grad_k_KD, grad_v_KD, k_KD, v_KD, q, upstream, stats, SELECTED_BRANCH, at, exists,
            key[:, None] <= token[None, :], num_rows, scale, WIDTH, BLOCK_D, BLOCK_E,
        )  # fmt: skip
    at_sum = (n * tl.num_programs(2) + segment) * SELECT_BLOCK + key
    write_vectors(grad_k, at_sum, is_key, grad_k_KD, WIDTH)
    write_vectors(grad_v, at_sum, is_key, grad_v_KD, WIDTH)


@triton.jit
def plus_listed(
    grad_k_KD, grad_v_KD, k_KD, v_KD, q, upstream, stats, listed, begin, end, key,
    group, num_tokens, groups, num_rows, scale,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, NUM_SELECTED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of a tile of keys and values those of the queries that selected it, listed by place."""
    row = tl.arange(0, BLOCK_TOKENS * BLOCK_HEADS)
    for first in range(begin, end, BLOCK_TOKENS):
        entry = first + row // BLOCK_HEADS
        token = tl.load(listed + entry, mask=entry < end, other=0) // NUM_SELECTED
        at, exists = rows_of(token, row % BLOCK_HEADS, entry < end, group, num_tokens, groups, HEADS)
        grad_k_KD, grad_v_KD = plus_gradients(
            grad_k_KD, grad_v_KD, k_KD, v_KD, q, upstream, stats, SELECTED_BRANCH, at, exists,
            key[:, None] <= token[None, :], num_rows, scale, WIDTH, BLOCK_D, BLOCK_E,
        )  # fmt: skip
    return grad_k_KD, grad_v_KD


@triton.jit
def plus_window(
    grad_k_KD, grad_v_KD, k_KD, v_KD, q, upstream, stats, key, first_key,
    group, num_tokens, groups, window, num_rows, scale,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of a tile of keys and values those of the queries in whose window they are."""
    row = tl.arange(0, BLOCK_TOKENS * BLOCK_HEADS)
    for begin in range(first_key, tl.minimum(first_key + BLOCK_KEYS + window - 1, num_tokens), BLOCK_TOKENS):
        token = begin + row // BLOCK_HEADS
        at, exists = rows_of(token, row % BLOCK_HEADS, token < num_tokens, group, num_tokens, groups, HEADS)
        age = token[None, :] - key[:, None]
        grad_k_KD, grad_v_KD = plus_gradients(
            grad_k_KD, grad_v_KD, k_KD, v_KD, q, upstream, stats, WINDOW_BRANCH, at, exists,
            (age >= 0) & (age < window), num_rows, scale, WIDTH, BLOCK_D, BLOCK_E,
        )  # fmt: skip
    return grad_k_KD, grad_v_KD


@triton.jit
def plus_compressed(
    grad_k_KD, grad_v_KD, compressed_grad_k, compressed_grad_v, places, key, is_key,
    num_compressed, compress_block, compress_stride,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of keys and values those of compressed blocks, weighted by a token's place in each."""
    for back in range(0, (compress_block + compress_stride - 1) // compress_stride):
        block = key // compress_stride - back
        inside = key - block * compress_stride
        meets = is_key & (block >= 0) & (block < num_compressed) & (inside < compress_block)
        weight = vectors(places, inside, meets, WIDTH, BLOCK_D, BLOCK_E)
        got = vectors(compressed_grad_k, block, meets, WIDTH, BLOCK_D, BLOCK_E)
        grad_k_KD = plus(grad_k_KD, by_channel(got, weight))
        got = vectors(compressed_grad_v, block, meets, WIDTH, BLOCK_D, BLOCK_E)
        grad_v_KD = plus(grad_v_KD, by_channel(got, weight))
    return grad_k_KD, grad_v_KD


@triton.jit(do_not_specialize=COUNTS)
def gradients_of_tokens(
    q, k, v, upstream, stats, order, bounds, first_grad_k, first_grad_v, compressed_grad_k, compressed_grad_v, places,
    grad_k, grad_v,
    num_tokens, groups, num_compressed, num_rows, num_selectable, num_segments, compress_block, compress_stride, window,
    scale, natural_scale,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, SELECT_BLOCK: tl.constexpr, NUM_SELECTED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of keys and values: a program takes a selection block, or a part of it, and all rows that
    read it.

    ``order`` (``[N, T*n]``) has the places of ``selected`` sorted by block and then by token, and ``bounds`` (``[N, S +
    1]``) says where each block begins in it. For the first block ``num_segments`` sums are given, unless that is 0.
    One program alone sums each row of a gradient, in the order of the tokens, so results are deterministic.
    """
    PARTS: tl.constexpr = (SELECT_BLOCK + BLOCK_KEYS - 1) // BLOCK_KEYS
    n = tl.program_id(1)
    item, group = n // groups, n % groups
    num_queries, num_keys = num_tokens * groups * HEADS, num_tokens * groups
    q, upstream = of_item(q, item, num_queries, WIDTH), of_item(upstream, item, num_queries, WIDTH)
    k, v = of_item(k, item, num_keys, WIDTH), of_item(v, item, num_keys, WIDTH)
    grad_k, grad_v = of_item(grad_k, item, num_keys, WIDTH), of_item(grad_v, item, num_keys, WIDTH)
    compressed_grad_k = of_item(compressed_grad_k, n, num_compressed, WIDTH)
    compressed_grad_v = of_item(compressed_grad_v, n, num_compressed, WIDTH)
    stats += item.to(tl.int64) * num_queries
    selectable, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    place = part * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    key = selectable * SELECT_BLOCK + place
    is_key = (place < SELECT_BLOCK) & (key < num_tokens)
    k_KD = vectors(k, key * groups + group, is_key, WIDTH, BLOCK_D, BLOCK_E)
    v_KD = vectors(v, key * groups + group, is_key, WIDTH, BLOCK_D, BLOCK_E)
    grad_k_KD = zeros(BLOCK_KEYS, BLOCK_D, BLOCK_E)
    grad_v_KD = zeros(BLOCK_KEYS, BLOCK_D, BLOCK_E)
    is_summed = (selectable == 0) & (num_segments > 0)
    at_bounds = bounds + n * (num_selectable + 1) + selectable
    end = tl.load(at_bounds + 1)
    grad_k_KD, grad_v_KD = plus_listed(
        grad_k_KD, grad_v_KD, k_KD, v_KD, q, upstream, stats, order + n.to(tl.int64) * num_tokens * NUM_SELECTED,
        tl.where(is_summed, end, tl.load(at_bounds)), end, key, group, num_tokens, groups, num_rows, scale,
        WIDTH, HEADS, NUM_SELECTED, BLOCK_TOKENS, BLOCK_HEADS, BLOCK_D, BLOCK_E,
    )  # fmt: skip
    for segment in range(0, tl.where(is_summed, num_segments, 0)):
        at_sum = (n * num_segments + segment) * SELECT_BLOCK + place
        grad_k_KD = plus(grad_k_KD, vectors(first_grad_k, at_sum, is_key, WIDTH, BLOCK_D, BLOCK_E))
        grad_v_KD = plus(grad_v_KD, vectors(first_grad_v, at_sum, is_key, WIDTH, BLOCK_D, BLOCK_E))
    grad_k_KD, grad_v_KD = plus_window(
        grad_k_KD, grad_v_KD, k_KD, v_KD, q, upstream, stats, key, selectable * SELECT_BLOCK + part * BLOCK_KEYS,
        group, num_tokens, groups, window, num_rows, scale,
        WIDTH, HEADS, BLOCK_TOKENS, BLOCK_HEADS, BLOCK_KEYS, BLOCK_D, BLOCK_E,
    )  # fmt: skip
    grad_k_KD = times(grad_k_KD, natural_scale)
    grad_k_KD, grad_v_KD = plus_compressed(
        grad_k_KD, grad_v_KD, compressed_grad_k, compressed_grad_v, places, key, is_key,
        num_compressed, compress_block, compress_stride, WIDTH, BLOCK_D, BLOCK_E,
    )  # fmt: skip
    at_key = key * groups + group
    write_vectors(grad_k, at_key, is_key, grad_k_KD, WIDTH)
    write_vectors(grad_v, at_key, is_key, grad_v_KD, WIDTH)
