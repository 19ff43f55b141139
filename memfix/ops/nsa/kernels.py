"""The Triton kernels of native sparse attention: three branches of queries, and the gradients of rows and of keys.

A row is one query head of one token. The heads that share a key-value head lie in one tile, several tokens of them, so
that keys are read once for all and products have at least 16 rows. Scores are in powers of two. Compressed keys come
in two pieces of the working dtype, whose sum has twice its digits.
"""

# B batch, T tokens, G key-value heads, R query heads of each, N = B x G, D width of a head, M compressed blocks,
# S selection blocks, n selected blocks, X rows of a tile, K keys of a tile

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels import power_of_two, product

COMPRESSED = tl.constexpr(0)
SELECTED = tl.constexpr(1)
WINDOW = tl.constexpr(2)
NO_BLOCK = tl.constexpr(2**31 - 1)


# ---------------------------------------------------------------- tiles
@triton.jit
def rows_of(token, head, counts, group, num_tokens, groups, HEADS: tl.constexpr):
    """Where each row of ``[T, G, R]`` lies in its item of the batch, and whether it is there."""
    return (token * groups + group) * HEADS + head, counts & (head < HEADS) & (token < num_tokens)


@triton.jit
def of_item(tensor, item, num_rows, width):
    """The rows of one item of the batch. Inside of it 32 bits are enough for a place."""
    return tensor + item.to(tl.int64) * num_rows * width


@triton.jit
def vectors(of, at, is_there, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """``[X, D]``: the vectors of rows, zeros where there are none."""
    channel = tl.arange(0, BLOCK_D)
    mask = is_there[:, None] & (channel < WIDTH)[None, :]
    return tl.load(of + at[:, None] * WIDTH + channel[None, :], mask=mask, other=0.0)


@triton.jit
def write_vectors(to, at, is_there, tile, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    channel = tl.arange(0, BLOCK_D)
    mask = is_there[:, None] & (channel < WIDTH)[None, :]
    tl.store(to + at[:, None] * WIDTH + channel[None, :], tile.to(to.dtype.element_ty), mask=mask)


@triton.jit
def compressed_keys(q, high, low, at, is_there, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, PIECES: tl.constexpr):
    """``[X, K]``: products of rows with compressed keys."""
    products = product(q, tl.trans(vectors(high, at, is_there, WIDTH, BLOCK_D)))
    if PIECES == 2:
        products += product(q, tl.trans(vectors(low, at, is_there, WIDTH, BLOCK_D)))
    return products


@triton.jit
def num_complete(token, compress_block, compress_stride):
    """Compressed blocks that a query at ``token`` sees."""
    return tl.maximum(token - compress_block + 1 + compress_stride, 0) // compress_stride


# ---------------------------------------------------------------- softmax, a tile of keys at a time
@triton.jit
def absorb(scores, values, top, total, sums):
    """The largest score, the sum of weights and the weighted sum of values, after one more tile of keys."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    above = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = power_of_two(scores - above[:, None])
    kept = power_of_two(top - above)
    sums = sums * kept[:, None] + product(weights.to(values.dtype), values)
    return new_top, total * kept + tl.sum(weights, 1), sums


@triton.jit
def absorb_moment(scores, grad_weights, top, total, moment):
    """The same, with the weighted mean of the weights' own gradients in the place of values."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    above = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = power_of_two(scores - above[:, None])
    kept = power_of_two(top - above)
    total = total * kept + tl.sum(weights, 1)
    # a key that is not seen has no weight, whatever its value
    moment = moment * kept + tl.sum(tl.where(weights > 0, weights * grad_weights, weights), 1)
    return new_top, total, moment


@triton.jit
def finish(top, total):
    """The logarithm of a softmax's denominator; where nothing is seen it is infinite, and all weights are 0."""
    return tl.where(total == 0, float("inf"), top + tl.log2(total))


@triton.jit
def weighted(sums, total, gate):
    """The output of a branch by its gate; zeros where nothing is seen."""
    return sums * (gate / tl.where(total == 0, 1.0, total))[:, None]


@triton.jit
def keep_stats(stats, branch, at, is_there, num_rows, lse, mean):
    tl.store(stats + 2 * branch * num_rows + at, lse, mask=is_there)
    tl.store(stats + (2 * branch + 1) * num_rows + at, mean, mask=is_there)


# ---------------------------------------------------------------- forward
@triton.jit
def attend_dense(
    q, k, v, gates, high, low, compressed_v, out, lse, first, stop, num_tokens, groups, num_compressed,
    compress_block, compress_stride, window, scale,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, PIECES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The compressed and the window branch of the queries from ``first`` on; ``lse`` (``[N, C, R]``) is the former's.

    A program takes ``BLOCK_TOKENS`` queries of a key-value head. The last programs begin first: they have most keys.
    """
    n = tl.program_id(1)
    item, group = n // groups, n % groups
    q = of_item(q, item, num_tokens * groups * HEADS, WIDTH)
    out = of_item(out, item, num_tokens * groups * HEADS, WIDTH)
    gates = of_item(gates, item, num_tokens * groups * HEADS, 3)
    k = of_item(k, item, num_tokens * groups, WIDTH)
    v = of_item(v, item, num_tokens * groups, WIDTH)
    high = of_item(high, n, num_compressed, WIDTH)
    compressed_v = of_item(compressed_v, n, num_compressed, WIDTH)
    if PIECES == 2:
        low = of_item(low, n, num_compressed, WIDTH)
    row = tl.arange(0, BLOCK_TOKENS * BLOCK_HEADS)
    begin = first + (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_TOKENS
    token, head = begin + row // BLOCK_HEADS, row % BLOCK_HEADS
    at, is_there = rows_of(token, head, token < stop, group, num_tokens, groups, HEADS)
    last = tl.minimum(begin + BLOCK_TOKENS, stop) - 1
    q_XD = vectors(q, at, is_there, WIDTH, BLOCK_D)

    top = tl.full([BLOCK_TOKENS * BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_TOKENS * BLOCK_HEADS], tl.float32)
    sums = tl.zeros([BLOCK_TOKENS * BLOCK_HEADS, BLOCK_D], tl.float32)
    seen = num_complete(token, compress_block, compress_stride)
    most = tl.minimum(num_complete(last, compress_block, compress_stride), num_compressed)
    for start in range(0, most, BLOCK_KEYS):
        block = start + tl.arange(0, BLOCK_KEYS)
        products = compressed_keys(q_XD, high, low, block, block < most, WIDTH, BLOCK_D, PIECES)
        scores = tl.where(block[None, :] < seen[:, None], products * scale, float("-inf"))
        values = vectors(compressed_v, block, block < most, WIDTH, BLOCK_D)
        top, total, sums = absorb(scores, values, top, total, sums)
    at_lse = (n * (stop - first) + token - first) * HEADS + head
    tl.store(lse + at_lse, finish(top, total), mask=is_there)
    gate = tl.load(gates + at * 3 + COMPRESSED, mask=is_there, other=0.0).to(tl.float32)
    out_XD = weighted(sums, total, gate)

    top = tl.full([BLOCK_TOKENS * BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_TOKENS * BLOCK_HEADS], tl.float32)
    sums = tl.zeros([BLOCK_TOKENS * BLOCK_HEADS, BLOCK_D], tl.float32)
    for start in range(tl.maximum(begin - window + 1, 0), last + 1, BLOCK_KEYS):
        key = start + tl.arange(0, BLOCK_KEYS)
        k_KD = vectors(k, key * groups + group, key <= last, WIDTH, BLOCK_D)
        age = token[:, None] - key[None, :]
        scores = tl.where((age >= 0) & (age < window), product(q_XD, tl.trans(k_KD)) * scale, float("-inf"))
        values = vectors(v, key * groups + group, key <= last, WIDTH, BLOCK_D)
        top, total, sums = absorb(scores, values, top, total, sums)
    gate = tl.load(gates + at * 3 + WINDOW, mask=is_there, other=0.0).to(tl.float32)
    write_vectors(out, at, is_there, out_XD + weighted(sums, total, gate), WIDTH, BLOCK_D)


@triton.jit
def selected_blocks(
    selected, n, begin, stop, offset, num_listed,
    NUM_SELECTED: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_SELECTED: tl.constexpr,
):  # fmt: skip
    """``[C, n]``: what the tokens of a tile read, and how many blocks that is, each counted once."""
    token, place = begin + tl.arange(0, BLOCK_TOKENS), tl.arange(0, BLOCK_SELECTED)
    at = ((n * num_listed + token - offset).to(tl.int64) * NUM_SELECTED)[:, None] + place[None, :]
    mask = (token < stop)[:, None] & (place < NUM_SELECTED)[None, :]
    blocks = tl.load(selected + at, mask=mask, other=-1)
    blocks = tl.where(blocks < 0, NO_BLOCK, blocks)
    number = 0
    block = tl.min(tl.min(blocks, 1), 0)
    while block < NO_BLOCK:
        number += 1
        block = next_block(blocks, block)
    return blocks, number


@triton.jit
def next_block(blocks, block):
    """The smallest that is larger."""
    return tl.min(tl.min(tl.where(blocks > block, blocks, NO_BLOCK), 1), 0)


@triton.jit
def seen_keys(blocks, block, token, key, SHAPE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr):
    """``[X, K]``: the token has selected ``block``, and the key is not behind it."""
    has = tl.max((blocks == block).to(tl.int32), 1)
    has = tl.reshape(tl.broadcast_to(has[:, None], [BLOCK_TOKENS, BLOCK_HEADS]), [BLOCK_TOKENS * BLOCK_HEADS])
    return (has[:, None] > 0) & (key[None, :] <= token[:, None])


@triton.jit
def attend_selected(
    q, k, v, gates, selected, out, first, stop, offset, num_listed, num_tokens, groups, scale,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, SELECT_BLOCK: tl.constexpr, NUM_SELECTED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SELECTED: tl.constexpr,
):  # fmt: skip
    """Adds the selected branch to ``out``. Tokens of a tile read a block together that more than one has selected.

    ``selected`` lists the blocks of ``num_listed`` tokens from ``offset`` on.
    """
    n = tl.program_id(1)
    item, group = n // groups, n % groups
    q = of_item(q, item, num_tokens * groups * HEADS, WIDTH)
    out = of_item(out, item, num_tokens * groups * HEADS, WIDTH)
    gates = of_item(gates, item, num_tokens * groups * HEADS, 3)
    k = of_item(k, item, num_tokens * groups, WIDTH)
    v = of_item(v, item, num_tokens * groups, WIDTH)
    row = tl.arange(0, BLOCK_TOKENS * BLOCK_HEADS)
    begin = first + tl.program_id(0) * BLOCK_TOKENS
    token, head = begin + row // BLOCK_HEADS, row % BLOCK_HEADS
    at, is_there = rows_of(token, head, token < stop, group, num_tokens, groups, HEADS)
    q_XD = vectors(q, at, is_there, WIDTH, BLOCK_D)
    blocks, number = selected_blocks(
        selected, n, begin, stop, offset, num_listed, NUM_SELECTED, BLOCK_TOKENS, BLOCK_SELECTED
    )
    PARTS: tl.constexpr = (SELECT_BLOCK + BLOCK_KEYS - 1) // BLOCK_KEYS

    top = tl.full([BLOCK_TOKENS * BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_TOKENS * BLOCK_HEADS], tl.float32)
    sums = tl.zeros([BLOCK_TOKENS * BLOCK_HEADS, BLOCK_D], tl.float32)
    block = tl.min(tl.min(blocks, 1), 0)
    for step in range(0, number * PARTS):
        place = (step % PARTS) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
        key = block * SELECT_BLOCK + place
        is_key = (place < SELECT_BLOCK) & (key < num_tokens)
        k_KD = vectors(k, key * groups + group, is_key, WIDTH, BLOCK_D)
        seen = seen_keys(blocks, block, token, key, BLOCK_KEYS, BLOCK_TOKENS, BLOCK_HEADS) & is_key[None, :]
        scores = tl.where(seen, product(q_XD, tl.trans(k_KD)) * scale, float("-inf"))
        values = vectors(v, key * groups + group, is_key, WIDTH, BLOCK_D)
        top, total, sums = absorb(scores, values, top, total, sums)
        block = tl.where(step % PARTS == PARTS - 1, next_block(blocks, block), block)
    gate = tl.load(gates + at * 3 + SELECTED, mask=is_there, other=0.0).to(tl.float32)
    out_XD = vectors(out, at, is_there, WIDTH, BLOCK_D).to(tl.float32)
    write_vectors(out, at, is_there, out_XD + weighted(sums, total, gate), WIDTH, BLOCK_D)


# ---------------------------------------------------------------- backward, rows
@triton.jit
def dense_gradients_of_rows(
    q, k, v, gates, upstream, high, low, compressed_v, grad_q, grad_gates, stats,
    num_tokens, groups, num_compressed, num_rows, compress_block, compress_stride, window, scale, natural_scale,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, PIECES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Of the compressed and the window branch: gradients of q and of the gates, and ``stats`` for those of keys.

    ``stats`` are the softmax's denominator and the weighted mean of the weights' gradients, for each branch and row.
    The latter is also the gradient of the gate. A first pass over the keys makes them, a second the gradient of q:
    taken in one pass it would be a difference of two sums, and wrong where one key has nearly all the weight.
    """
    n = tl.program_id(1)
    item, group = n // groups, n % groups
    q = of_item(q, item, num_tokens * groups * HEADS, WIDTH)
    upstream = of_item(upstream, item, num_tokens * groups * HEADS, WIDTH)
    grad_q = of_item(grad_q, item, num_tokens * groups * HEADS, WIDTH)
    gates = of_item(gates, item, num_tokens * groups * HEADS, 3)
    grad_gates = of_item(grad_gates, item, num_tokens * groups * HEADS, 3)
    k = of_item(k, item, num_tokens * groups, WIDTH)
    v = of_item(v, item, num_tokens * groups, WIDTH)
    high = of_item(high, n, num_compressed, WIDTH)
    compressed_v = of_item(compressed_v, n, num_compressed, WIDTH)
    stats += item.to(tl.int64) * num_tokens * groups * HEADS
    if PIECES == 2:
        low = of_item(low, n, num_compressed, WIDTH)
    row = tl.arange(0, BLOCK_TOKENS * BLOCK_HEADS)
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_TOKENS
    token, head = begin + row // BLOCK_HEADS, row % BLOCK_HEADS
    at, is_there = rows_of(token, head, token < num_tokens, group, num_tokens, groups, HEADS)
    last = tl.minimum(begin + BLOCK_TOKENS, num_tokens) - 1
    q_XD = vectors(q, at, is_there, WIDTH, BLOCK_D)
    up_XD = vectors(upstream, at, is_there, WIDTH, BLOCK_D)
    grad_XD = tl.zeros([BLOCK_TOKENS * BLOCK_HEADS, BLOCK_D], tl.float32)

    top = tl.full([BLOCK_TOKENS * BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_TOKENS * BLOCK_HEADS], tl.float32)
    moment = tl.zeros([BLOCK_TOKENS * BLOCK_HEADS], tl.float32)
    seen = num_complete(token, compress_block, compress_stride)
    most = tl.minimum(num_complete(last, compress_block, compress_stride), num_compressed)
    for start in range(0, most, BLOCK_KEYS):
        block = start + tl.arange(0, BLOCK_KEYS)
        products = compressed_keys(q_XD, high, low, block, block < most, WIDTH, BLOCK_D, PIECES)
        scores = tl.where(block[None, :] < seen[:, None], products * scale, float("-inf"))
        values = vectors(compressed_v, block, block < most, WIDTH, BLOCK_D)
        top, total, moment = absorb_moment(scores, product(up_XD, tl.trans(values)), top, total, moment)
    lse, mean = finish(top, total), moment / tl.where(total == 0, 1.0, total)
    keep_stats(stats, COMPRESSED, at, is_there, num_rows, lse, mean)
    tl.store(grad_gates + at * 3 + COMPRESSED, mean.to(grad_gates.dtype.element_ty), mask=is_there)
    gate = tl.load(gates + at * 3 + COMPRESSED, mask=is_there, other=0.0).to(tl.float32)
    for start in range(0, most, BLOCK_KEYS):
        block = start + tl.arange(0, BLOCK_KEYS)
        products = compressed_keys(q_XD, high, low, block, block < most, WIDTH, BLOCK_D, PIECES)
        scores = tl.where(block[None, :] < seen[:, None], products * scale, float("-inf"))
        values = vectors(compressed_v, block, block < most, WIDTH, BLOCK_D)
        weights = power_of_two(scores - lse[:, None])
        grad_scores = weights * gate[:, None] * (product(up_XD, tl.trans(values)) - mean[:, None])
        grad_scores = tl.where(block[None, :] < seen[:, None], grad_scores, 0.0).to(q_XD.dtype)
        grad_XD += product(grad_scores, vectors(high, block, block < most, WIDTH, BLOCK_D))

    top = tl.full([BLOCK_TOKENS * BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_TOKENS * BLOCK_HEADS], tl.float32)
    moment = tl.zeros([BLOCK_TOKENS * BLOCK_HEADS], tl.float32)
    for start in range(tl.maximum(begin - window + 1, 0), last + 1, BLOCK_KEYS):
        key = start + tl.arange(0, BLOCK_KEYS)
        k_KD = vectors(k, key * groups + group, key <= last, WIDTH, BLOCK_D)
        age = token[:, None] - key[None, :]
        scores = tl.where((age >= 0) & (age < window), product(q_XD, tl.trans(k_KD)) * scale, float("-inf"))
        values = vectors(v, key * groups + group, key <= last, WIDTH, BLOCK_D)
        top, total, moment = absorb_moment(scores, product(up_XD, tl.trans(values)), top, total, moment)
    lse, mean = finish(top, total), moment / tl.where(total == 0, 1.0, total)
    keep_stats(stats, WINDOW, at, is_there, num_rows, lse, mean)
    tl.store(grad_gates + at * 3 + WINDOW, mean.to(grad_gates.dtype.element_ty), mask=is_there)
    gate = tl.load(gates + at * 3 + WINDOW, mask=is_there, other=0.0).to(tl.float32)
    for start in range(tl.maximum(begin - window + 1, 0), last + 1, BLOCK_KEYS):
        key = start + tl.arange(0, BLOCK_KEYS)
        k_KD = vectors(k, key * groups + group, key <= last, WIDTH, BLOCK_D)
        age = token[:, None] - key[None, :]
        is_seen = (age >= 0) & (age < window)
        weights = power_of_two(product(q_XD, tl.trans(k_KD)) * scale - lse[:, None])
        values = vectors(v, key * groups + group, key <= last, WIDTH, BLOCK_D)
        grad_scores = weights * gate[:, None] * (product(up_XD, tl.trans(values)) - mean[:, None])
        grad_XD += product(tl.where(is_seen, grad_scores, 0.0).to(k_KD.dtype), k_KD)
    write_vectors(grad_q, at, is_there, grad_XD * natural_scale, WIDTH, BLOCK_D)


@triton.jit
def selected_gradients_of_rows(
    q, k, v, gates, upstream, selected, grad_q, grad_gates, stats, num_tokens, groups, num_rows, scale, natural_scale,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, SELECT_BLOCK: tl.constexpr, NUM_SELECTED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SELECTED: tl.constexpr,
):  # fmt: skip
    """The same of the selected branch, whose gradient of q is added to that of the others."""
    n = tl.program_id(1)
    item, group = n // groups, n % groups
    q = of_item(q, item, num_tokens * groups * HEADS, WIDTH)
    upstream = of_item(upstream, item, num_tokens * groups * HEADS, WIDTH)
    grad_q = of_item(grad_q, item, num_tokens * groups * HEADS, WIDTH)
    gates = of_item(gates, item, num_tokens * groups * HEADS, 3)
    grad_gates = of_item(grad_gates, item, num_tokens * groups * HEADS, 3)
    k = of_item(k, item, num_tokens * groups, WIDTH)
    v = of_item(v, item, num_tokens * groups, WIDTH)
    stats += item.to(tl.int64) * num_tokens * groups * HEADS
    row = tl.arange(0, BLOCK_TOKENS * BLOCK_HEADS)
    begin = tl.program_id(0) * BLOCK_TOKENS
    token, head = begin + row // BLOCK_HEADS, row % BLOCK_HEADS
    at, is_there = rows_of(token, head, token < num_tokens, group, num_tokens, groups, HEADS)
    q_XD = vectors(q, at, is_there, WIDTH, BLOCK_D)
    up_XD = vectors(upstream, at, is_there, WIDTH, BLOCK_D)
    blocks, number = selected_blocks(
        selected, n, begin, num_tokens, 0, num_tokens, NUM_SELECTED, BLOCK_TOKENS, BLOCK_SELECTED
    )
    PARTS: tl.constexpr = (SELECT_BLOCK + BLOCK_KEYS - 1) // BLOCK_KEYS

    top = tl.full([BLOCK_TOKENS * BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_TOKENS * BLOCK_HEADS], tl.float32)
    moment = tl.zeros([BLOCK_TOKENS * BLOCK_HEADS], tl.float32)
    block = tl.min(tl.min(blocks, 1), 0)
    for step in range(0, number * PARTS):
        place = (step % PARTS) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
        key = block * SELECT_BLOCK + place
        is_key = (place < SELECT_BLOCK) & (key < num_tokens)
        k_KD = vectors(k, key * groups + group, is_key, WIDTH, BLOCK_D)
        seen = seen_keys(blocks, block, token, key, BLOCK_KEYS, BLOCK_TOKENS, BLOCK_HEADS) & is_key[None, :]
        scores = tl.where(seen, product(q_XD, tl.trans(k_KD)) * scale, float("-inf"))
        values = vectors(v, key * groups + group, is_key, WIDTH, BLOCK_D)
        top, total, moment = absorb_moment(scores, product(up_XD, tl.trans(values)), top, total, moment)
        block = tl.where(step % PARTS == PARTS - 1, next_block(blocks, block), block)
    lse, mean = finish(top, total), moment / tl.where(total == 0, 1.0, total)
    keep_stats(stats, SELECTED, at, is_there, num_rows, lse, mean)
    tl.store(grad_gates + at * 3 + SELECTED, mean.to(grad_gates.dtype.element_ty), mask=is_there)
    gate = tl.load(gates + at * 3 + SELECTED, mask=is_there, other=0.0).to(tl.float32)

    grad_XD = tl.zeros([BLOCK_TOKENS * BLOCK_HEADS, BLOCK_D], tl.float32)
    block = tl.min(tl.min(blocks, 1), 0)
    for step in range(0, number * PARTS):
        place = (step % PARTS) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
        key = block * SELECT_BLOCK + place
        is_key = (place < SELECT_BLOCK) & (key < num_tokens)
        k_KD = vectors(k, key * groups + group, is_key, WIDTH, BLOCK_D)
        seen = seen_keys(blocks, block, token, key, BLOCK_KEYS, BLOCK_TOKENS, BLOCK_HEADS) & is_key[None, :]
        weights = power_of_two(product(q_XD, tl.trans(k_KD)) * scale - lse[:, None])
        values = vectors(v, key * groups + group, is_key, WIDTH, BLOCK_D)
        grad_scores = weights * gate[:, None] * (product(up_XD, tl.trans(values)) - mean[:, None])
        grad_XD += product(tl.where(seen, grad_scores, 0.0).to(k_KD.dtype), k_KD)
        block = tl.where(step % PARTS == PARTS - 1, next_block(blocks, block), block)
    others_XD = vectors(grad_q, at, is_there, WIDTH, BLOCK_D).to(tl.float32)
    write_vectors(grad_q, at, is_there, others_XD + grad_XD * natural_scale, WIDTH, BLOCK_D)


# ---------------------------------------------------------------- backward, keys
@triton.jit
def weights_and_gradients(scores_KX, grad_weights_KX, seen_KX, stats, gates, branch, at, is_there, num_rows):
    """``[K, X]`` each: weights by the gate, as values' gradients need them, and the gradients of scores."""
    lse = tl.load(stats + 2 * branch * num_rows + at, mask=is_there, other=float("inf"))
    mean = tl.load(stats + (2 * branch + 1) * num_rows + at, mask=is_there, other=0.0)
    gate = tl.load(gates + at * 3 + branch, mask=is_there, other=0.0).to(tl.float32)
    weights_KX = tl.where(seen_KX, power_of_two(scores_KX - lse[None, :]) * gate[None, :], 0.0)
    return weights_KX, tl.where(seen_KX, weights_KX * (grad_weights_KX - mean[None, :]), 0.0)


@triton.jit
def gradients_of_compressed(
    q, gates, upstream, high, low, compressed_v, stats, grad_k, grad_v,
    num_tokens, groups, num_compressed, num_rows, compress_block, compress_stride, scale, natural_scale,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, PIECES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``[N, M, D]`` each, in float32: a program takes ``BLOCK_KEYS`` compressed blocks and all queries after them."""
    n = tl.program_id(1)
    item, group = n // groups, n % groups
    q = of_item(q, item, num_tokens * groups * HEADS, WIDTH)
    upstream = of_item(upstream, item, num_tokens * groups * HEADS, WIDTH)
    gates = of_item(gates, item, num_tokens * groups * HEADS, 3)
    high = of_item(high, n, num_compressed, WIDTH)
    compressed_v = of_item(compressed_v, n, num_compressed, WIDTH)
    grad_k = of_item(grad_k, n, num_compressed, WIDTH)
    grad_v = of_item(grad_v, n, num_compressed, WIDTH)
    stats += item.to(tl.int64) * num_tokens * groups * HEADS
    if PIECES == 2:
        low = of_item(low, n, num_compressed, WIDTH)
    row = tl.arange(0, BLOCK_TOKENS * BLOCK_HEADS)
    block = tl.program_id(0) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    is_block = block < num_compressed
    high_KD = vectors(high, block, is_block, WIDTH, BLOCK_D)
    low_KD = high_KD
    if PIECES == 2:
        low_KD = vectors(low, block, is_block, WIDTH, BLOCK_D)
    v_KD = vectors(compressed_v, block, is_block, WIDTH, BLOCK_D)
    grad_k_KD = tl.zeros([BLOCK_KEYS, BLOCK_D], tl.float32)
    grad_v_KD = tl.zeros([BLOCK_KEYS, BLOCK_D], tl.float32)
    for begin in range(tl.program_id(0) * BLOCK_KEYS * compress_stride + compress_block - 1, num_tokens, BLOCK_TOKENS):
        token, head = begin + row // BLOCK_HEADS, row % BLOCK_HEADS
        at, is_there = rows_of(token, head, token < num_tokens, group, num_tokens, groups, HEADS)
        q_XD = vectors(q, at, is_there, WIDTH, BLOCK_D)
        up_XD = vectors(upstream, at, is_there, WIDTH, BLOCK_D)
        scores = product(high_KD, tl.trans(q_XD))
        if PIECES == 2:
            scores += product(low_KD, tl.trans(q_XD))
        is_seen = block[:, None] < num_complete(token, compress_block, compress_stride)[None, :]
        weights, grad_scores = weights_and_gradients(
            scores * scale, product(v_KD, tl.trans(up_XD)), is_seen & is_there[None, :],
            stats, gates, COMPRESSED, at, is_there, num_rows,
        )  # fmt: skip
        grad_v_KD += product(weights.to(up_XD.dtype), up_XD)
        grad_k_KD += product(grad_scores.to(q_XD.dtype), q_XD)
    write_vectors(grad_k, block, is_block, grad_k_KD * natural_scale, WIDTH, BLOCK_D)
    write_vectors(grad_v, block, is_block, grad_v_KD, WIDTH, BLOCK_D)


@triton.jit
def gradients_of_tokens(
    q, k, v, gates, upstream, stats, order, bounds, compressed_grad_k, compressed_grad_v, places, grad_k, grad_v,
    num_tokens, groups, num_compressed, num_rows, num_selectable, compress_block, compress_stride, window,
    scale, natural_scale,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, SELECT_BLOCK: tl.constexpr, NUM_SELECTED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Of keys and values: a program takes a selection block, or a part of it, and all rows that read it.

    Those that selected it are listed: ``order`` (``[N, T*n]``) has the places of ``selected`` sorted by block and then
    by token, ``bounds`` (``[N, S + 1]``) where each block begins there. Each row of a gradient is one program's alone,
    summed in the order of the tokens: the same every time.
    """
    PARTS: tl.constexpr = (SELECT_BLOCK + BLOCK_KEYS - 1) // BLOCK_KEYS
    n = tl.program_id(1)
    item, group = n // groups, n % groups
    q = of_item(q, item, num_tokens * groups * HEADS, WIDTH)
    upstream = of_item(upstream, item, num_tokens * groups * HEADS, WIDTH)
    gates = of_item(gates, item, num_tokens * groups * HEADS, 3)
    k = of_item(k, item, num_tokens * groups, WIDTH)
    v = of_item(v, item, num_tokens * groups, WIDTH)
    grad_k = of_item(grad_k, item, num_tokens * groups, WIDTH)
    grad_v = of_item(grad_v, item, num_tokens * groups, WIDTH)
    compressed_grad_k = of_item(compressed_grad_k, n, num_compressed, WIDTH)
    compressed_grad_v = of_item(compressed_grad_v, n, num_compressed, WIDTH)
    stats += item.to(tl.int64) * num_tokens * groups * HEADS
    selectable, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    row = tl.arange(0, BLOCK_TOKENS * BLOCK_HEADS)
    head = row % BLOCK_HEADS
    place = part * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    key = selectable * SELECT_BLOCK + place
    is_key = (place < SELECT_BLOCK) & (key < num_tokens)
    k_KD = vectors(k, key * groups + group, is_key, WIDTH, BLOCK_D)
    v_KD = vectors(v, key * groups + group, is_key, WIDTH, BLOCK_D)
    grad_k_KD = tl.zeros([BLOCK_KEYS, BLOCK_D], tl.float32)
    grad_v_KD = tl.zeros([BLOCK_KEYS, BLOCK_D], tl.float32)

    at_bounds = bounds + n * (num_selectable + 1) + selectable
    listed = order + n.to(tl.int64) * num_tokens * NUM_SELECTED
    end = tl.load(at_bounds + 1)
    for begin in range(tl.load(at_bounds), end, BLOCK_TOKENS):
        entry = begin + row // BLOCK_HEADS
        token = tl.load(listed + entry, mask=entry < end, other=0) // NUM_SELECTED
        at, is_there = rows_of(token, head, entry < end, group, num_tokens, groups, HEADS)
        q_XD = vectors(q, at, is_there, WIDTH, BLOCK_D)
        up_XD = vectors(upstream, at, is_there, WIDTH, BLOCK_D)
        is_seen = (key[:, None] <= token[None, :]) & is_there[None, :]
        weights, grad_scores = weights_and_gradients(
            product(k_KD, tl.trans(q_XD)) * scale, product(v_KD, tl.trans(up_XD)), is_seen,
            stats, gates, SELECTED, at, is_there, num_rows,
        )  # fmt: skip
        grad_v_KD += product(weights.to(up_XD.dtype), up_XD)
        grad_k_KD += product(grad_scores.to(q_XD.dtype), q_XD)

    first_key = selectable * SELECT_BLOCK + part * BLOCK_KEYS
    for begin in range(first_key, tl.minimum(first_key + BLOCK_KEYS + window - 1, num_tokens), BLOCK_TOKENS):
        token = begin + row // BLOCK_HEADS
        at, is_there = rows_of(token, head, token < num_tokens, group, num_tokens, groups, HEADS)
        q_XD = vectors(q, at, is_there, WIDTH, BLOCK_D)
        up_XD = vectors(upstream, at, is_there, WIDTH, BLOCK_D)
        age = token[None, :] - key[:, None]
        is_seen = (age >= 0) & (age < window) & is_there[None, :]
        weights, grad_scores = weights_and_gradients(
            product(k_KD, tl.trans(q_XD)) * scale, product(v_KD, tl.trans(up_XD)), is_seen,
            stats, gates, WINDOW, at, is_there, num_rows,
        )  # fmt: skip
        grad_v_KD += product(weights.to(up_XD.dtype), up_XD)
        grad_k_KD += product(grad_scores.to(q_XD.dtype), q_XD)
    grad_k_KD *= natural_scale

    # what compressed blocks got, by the place of the token in each of them
    for back in range(0, (compress_block + compress_stride - 1) // compress_stride):
        block = key // compress_stride - back
        inside = key - block * compress_stride
        meets = is_key & (block >= 0) & (block < num_compressed) & (inside < compress_block)
        weight = vectors(places, inside, meets, WIDTH, BLOCK_D)
        grad_k_KD += weight * vectors(compressed_grad_k, block, meets, WIDTH, BLOCK_D)
        grad_v_KD += weight * vectors(compressed_grad_v, block, meets, WIDTH, BLOCK_D)
    at_key = key * groups + group
    write_vectors(grad_k, at_key, is_key, grad_k_KD, WIDTH, BLOCK_D)
    write_vectors(grad_v, at_key, is_key, grad_v_KD, WIDTH, BLOCK_D)
