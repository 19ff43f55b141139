"""The Triton kernels of the chunked WY form: some compute all chunks in parallel, the scans one chunk after the other.

A chunk has C tokens. A pair of them, i > j, has a decay of ``exp(sum of g over j+1..i)`` per channel, which must be
split into a factor of i and a factor of j before a matrix product can sum over channels. Here it is split in log2(C)
levels. At level l the chunk is cut into blocks of 2^(l+1) tokens, and tokens of a block's second half are paired with
those of its first half. The border lies between i and j, so each factor is the exponential of a sum of gates, at most
1: nothing overflows, and no sum is a difference of two larger ones. Every pair belongs to one level. ``_ranges`` says
which gates each token sums at a level; transposed, it carries gradients back to the gates.
"""

# C tokens of a chunk, K key width, V value width; a suffix such as _VK names the axes of a tile

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels import power_of_two, product

LOWEST_GATE = tl.constexpr(-1000.0)
"""Stands for -inf: its power of two is 0 in float32 too, but -inf itself would turn the sums of gates into NaN."""

LOG2_E = tl.constexpr(1.4426950408889634)

COUNTS = ("NUM_INNER", "START", "T", "STRIDE", "NUM_CHUNKS", "H", "part_stride")
"""Arguments that Triton does not specialize: one kernel serves every length and number of heads. The alignment of rows
follows from their width."""


# ---------------------------------------------------------------- tokens
@triton.jit
def _place(H):
    """Return a program's chunk and head. Programs that run at once take neighbouring heads, whose rows are adjacent."""
    return (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H


@triton.jit
def _tokens_of(slot, bounds, START, T, STRIDE, NUM_CHUNKS, C: tl.constexpr, PACKED: tl.constexpr):
    """Return the first row of a chunk, and a mask of its rows that the sequence has."""
    if PACKED:
        first = tl.load(bounds + 2 * slot)
        end = tl.load(bounds + 2 * slot + 1)
    else:
        sequence, chunk = slot // NUM_CHUNKS, slot % NUM_CHUNKS
        start = START + sequence * STRIDE
        first, end = start + chunk * C, start + T
    return first, tl.arange(0, C) < end - first


@triton.jit
def _tile(tensor, row, exists, columns, WIDTH, H):
    """Return pointers to some columns of a chunk's rows, and their mask; ``row`` counts rows of all heads."""
    token = tl.arange(0, exists.shape[0])
    at = tensor + row * WIDTH + token[:, None] * (H * WIDTH) + columns[None, :]
    return at, exists[:, None] & (columns < WIDTH)[None, :]


@triton.jit
def _load(tensor, row, exists, columns, WIDTH, H):
    at, inside = _tile(tensor, row, exists, columns, WIDTH, H)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _store(tensor, row, exists, columns, values, WIDTH, H):
    at, inside = _tile(tensor, row, exists, columns, WIDTH, H)
    tl.store(at, values.to(tensor.dtype.element_ty), mask=inside)


@triton.jit
def _tile_of_chunk(tensor, chunk, columns, WIDTH, SIZE: tl.constexpr):
    """Like ``_tile``, for tensors stored chunk by chunk, in which rows beyond the sequence are zeros."""
    at = tensor + chunk * (SIZE * WIDTH) + (tl.arange(0, SIZE)[:, None] * WIDTH + columns[None, :])
    return at, (columns < WIDTH)[None, :]


@triton.jit
def _load_of_chunk(tensor, chunk, columns, WIDTH, SIZE: tl.constexpr):
    at, inside = _tile_of_chunk(tensor, chunk, columns, WIDTH, SIZE)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _store_of_chunk(tensor, chunk, columns, values, WIDTH, SIZE: tl.constexpr):
    at, inside = _tile_of_chunk(tensor, chunk, columns, WIDTH, SIZE)
    tl.store(at, values.to(tensor.dtype.element_ty), mask=inside)


@triton.jit
def _cleaned(gates):
    """Return the gates with NaN and -inf replaced, and which rows had a NaN."""
    is_nan = gates != gates
    return tl.maximum(tl.where(is_nan, 0.0, gates), LOWEST_GATE), tl.max(is_nan.to(tl.int32), 1)


@triton.jit
def _poison(decay_of_chunk):
    """Return NaN if any gate of the chunk is NaN, else 0. ``prepare`` then made the chunk's whole decay NaN."""
    kept = tl.load(decay_of_chunk)
    return tl.where(kept != kept, kept, 0.0)


# ---------------------------------------------------------------- levels
@triton.constexpr_function
def _num_levels(num_tokens):
    return num_tokens.bit_length() - 1


@triton.jit
def _is_second(i, level):
    return (i >> level) & 1 == 1


@triton.jit
def _ranges(i, t, level):
    """Whether token i sums gate t: in a second half from the border to i, in a first half after i to the border."""
    return (i >> level == t >> level) & tl.where(_is_second(i, level), t <= i, t > i)


@triton.jit
def _pairs(i, j, level):
    """Whether i and j are a pair of this level: i in the second half of a block, j in its first half."""
    return (i >> level == (j >> level) + 1) & _is_second(i, level)


@triton.constexpr_function
def _steepest(dtype):
    """The largest sum of gates from the middle of a chunk at which the powers of two of the sum and of its negative
    keep the digits of ``dtype``."""
    return 116.0 if dtype == tl.bfloat16 else 6.0 if dtype == tl.float16 else 3.0


@triton.jit
def _from_the_middle(i, t, C: tl.constexpr):
    """The weight of gate t in the sum of token i: 1 from the chunk's middle to i, -1 from after i to the middle."""
    return tl.where((t >= C // 2) & (t <= i), 1.0, 0.0) - tl.where((t < C // 2) & (t > i), 1.0, 0.0)


@triton.jit
def _are_flat(sums, dtype: tl.constexpr):
    """Whether all pairs can use the chunk's middle as their border: not where gates are steep, -inf or NaN."""
    return tl.max(tl.where(tl.abs(sums) <= _steepest(dtype), 0, 1)) == 0


@triton.jit
def _sums(ranges, values, dtype: tl.constexpr):
    """Return ``ranges @ values``, with the values rounded to ``dtype``.

    For gates this is accurate enough: ``exp(x)``, x <= 0, is then off by ``-x * exp(x) <= 0.37`` roundings of 1.
    """
    return product(ranges.to(tl.float32).to(dtype), values.to(dtype))


# ---------------------------------------------------------------- inside a chunk
@triton.jit
def _products_by_levels(query, key, gates, dtype: tl.constexpr, C: tl.constexpr):
    """Return, for tokens i > j, the decayed products of their keys, and of i's query with j's key."""
    token = tl.arange(0, C)
    i, j = token[:, None], token[None, :]
    overlaps = tl.zeros((C, C), tl.float32)
    weighed = tl.zeros((C, C), tl.float32)
    for level in range(_num_levels(C)):
        factor = power_of_two(_sums(_ranges(i, j, level), gates, dtype))
        decayed_key = (key * factor).to(dtype)
        across = tl.trans(decayed_key)
        meet = _pairs(i, j, level)
        overlaps += tl.where(meet, product(decayed_key, across), 0.0)
        weighed += tl.where(meet, product((query * factor).to(dtype), across), 0.0)
    return overlaps, weighed


@triton.jit
def _products_of_pairs(query, key, gates, dtype: tl.constexpr, C: tl.constexpr):
    """Return the products of keys and of queries with earlier keys, with decays; the gates without NaN and -inf; and
    1 for each token with a NaN gate."""
    token = tl.arange(0, C)
    i, j = token[:, None], token[None, :]
    sums = _sums(_from_the_middle(i, j, C), gates, dtype)
    if _are_flat(sums, dtype):
        factor = power_of_two(sums)
        across = tl.trans((key * power_of_two(-sums)).to(dtype))
        of_keys = tl.where(i > j, product((key * factor).to(dtype), across), 0.0)
        of_queries = tl.where(i > j, product((query * factor).to(dtype), across), 0.0)
        nan_rows = tl.zeros((C,), tl.int32)
    else:
        gates, nan_rows = _cleaned(gates)
        of_keys, of_queries = _products_by_levels(query, key, gates, dtype, C)
    return of_keys, of_queries, gates, nan_rows


@triton.jit
def _spread_nan(
    queries, decay, chunk, first_nan, K, dtype: tl.constexpr, C: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Make the queries of a chunk NaN from the token ``first_nan`` on, and the chunk's decay."""
    i = tl.arange(0, C)[:, None]
    for block in range(0, K, BLOCK_K):
        columns = block + tl.arange(0, BLOCK_K)
        at, inside = _tile_of_chunk(queries, chunk, columns, K, C)
        tl.store(at, tl.full((C, BLOCK_K), float("nan"), dtype), mask=inside & (i >= first_nan))
        tl.store(decay + chunk * K + columns, tl.full((BLOCK_K,), float("nan"), tl.float32), mask=columns < K)


@triton.jit
def _inverse(overlaps, dtype: tl.constexpr, C: tl.constexpr):
    """Return the inverse of ``I + overlaps``: blocks of 2^level tokens are inverted; each level joins two of them."""
    token = tl.arange(0, C)
    i, j = token[:, None], token[None, :]
    solved = tl.where(i == j, 1.0, 0.0) - tl.where(_pairs(i, j, 0), overlaps, 0.0)
    for level in tl.static_range(1, _num_levels(C)):
        joining = tl.where(_pairs(i, j, level), overlaps, 0.0)
        solved -= product(solved, product(joining, solved, dtype != tl.float32), dtype != tl.float32)
    return solved


@triton.jit(do_not_specialize=COUNTS)
def prepare(
    q, k, v, g, beta, bounds, weights, values, queries, keys, scores, inverse, decay,
    scale, START, T, STRIDE, NUM_CHUNKS, H, K, V, FIXED_K: tl.constexpr, FIXED_V: tl.constexpr,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PACKED: tl.constexpr, KEEPS_INVERSE: tl.constexpr,
):  # fmt: skip
    """Compute a chunk's effect on any state S: ``weights`` W and ``values`` U with V' = U - W S, ``scores`` with
    o = queries S + scores V', and ``keys`` and ``decay`` with S <- decay*S + keys^T V'. A NaN gate makes ``queries``
    NaN from its token on, and the ``decay`` of its chunk: o is NaN from that token on, and the state after the chunk.
    """
    K = FIXED_K if FIXED_K else K
    V = FIXED_V if FIXED_V else V
    slot, head = _place(H)
    first, exists = _tokens_of(slot, bounds, START, T, STRIDE, NUM_CHUNKS, C, PACKED)
    row, chunk = first * H + head, slot * H + head
    dtype = weights.dtype.element_ty
    token = tl.arange(0, C)
    i, j = token[:, None], token[None, :]
    strength = tl.load(beta + row + token * H, mask=exists, other=0.0).to(tl.float32)
    overlaps = tl.zeros((C, C), tl.float32)
    weighed = tl.zeros((C, C), tl.float32)
    has_nan = tl.zeros((C,), tl.int32)
    for block in range(0, K, BLOCK_K):
        columns = block + tl.arange(0, BLOCK_K)
        gates = _load(g, row, exists, columns, K, H).to(tl.float32) * LOG2_E
        query = _load(q, row, exists, columns, K, H).to(tl.float32)
        key = _load(k, row, exists, columns, K, H).to(tl.float32)
        weighed += tl.where(i == j, tl.sum(query * key, 1)[:, None], 0.0)
        of_keys, of_queries, gates, nan_rows = _products_of_pairs(query, key, gates, dtype, C)
        overlaps += of_keys
        weighed += of_queries
        has_nan = tl.maximum(has_nan, nan_rows)
        since_start = power_of_two(_sums(j <= i, gates, dtype))
        _store_of_chunk(queries, chunk, columns, query * since_start * scale, K, C)
        _store_of_chunk(weights, chunk, columns, key * since_start * strength[:, None], K, C)  # solved for W below
        _store_of_chunk(keys, chunk, columns, key * power_of_two(_sums(j > i, gates, dtype)), K, C)
        at_end = (i == C - 1) & (columns < K)[None, :]
        tl.store(decay + chunk * K + columns[None, :] + 0 * i, since_start, mask=at_end)

    solved = _inverse(overlaps * strength[:, None], dtype, C).to(dtype)
    at_pair = chunk * (C * C) + i * C + j
    tl.store(scores + at_pair, (weighed * scale).to(dtype))
    if KEEPS_INVERSE:
        tl.store(inverse + at_pair, solved)
    tl.debug_barrier()  # the weights loaded below were stored by other threads of the program
    for block in range(0, K, BLOCK_K):
        columns = block + tl.arange(0, BLOCK_K)
        weight = product(solved, _load_of_chunk(weights, chunk, columns, K, C))
        _store_of_chunk(weights, chunk, columns, weight, K, C)
    for block in range(0, V, BLOCK_V):
        columns = block + tl.arange(0, BLOCK_V)
        value = _load(v, row, exists, columns, V, H).to(tl.float32) * strength[:, None]
        _store_of_chunk(values, chunk, columns, product(solved, value.to(dtype)), V, C)
    first_nan = tl.min(tl.where(has_nan > 0, token, C))
    if first_nan < C:
        _spread_nan(queries, decay, chunk, first_nan, K, dtype, C, BLOCK_K)


# ---------------------------------------------------------------- from chunk to chunk
@triton.jit
def _chunks_of(sequence, first_chunk, NUM_CHUNKS, PACKED: tl.constexpr):
    """Return the first chunk of a sequence, and the chunk behind its last."""
    if PACKED:
        return tl.load(first_chunk + sequence), tl.load(first_chunk + sequence + 1)
    return sequence * NUM_CHUNKS, (sequence + 1) * NUM_CHUNKS


@triton.jit
def _block_of_state(H, K, V, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """Return what a scan's program works on: its sequence and head, the indices of all channels and of a block of
    values, their mask, and their offsets in the initial and final states, transposed to values by channels.
    """
    sequence, head, block = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H, tl.program_id(1)
    at_k, at_v = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    in_state = (at_v < V)[:, None] & (at_k < K)[None, :]
    of_sequence = (sequence * H + head) * (K * V) + at_v[:, None] + at_k[None, :] * V
    return sequence, head, at_k, at_v, in_state, of_sequence


@triton.jit(do_not_specialize=COUNTS)
def scan(
    weights, values, queries, keys, scores, decay, initial, final, inner, out, bounds, first_chunk,
    NUM_INNER, START, T, STRIDE, NUM_CHUNKS, H, K, V, FIXED_K: tl.constexpr, FIXED_V: tl.constexpr,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
    PACKED: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_INNER: tl.constexpr,
):  # fmt: skip
    """Compute the output and the final state; a program takes a block of values through the chunks of a sequence and
    head. With ``HAS_INNER`` store the states that cut the sequence into ``NUM_INNER`` + 1 equal pieces.

    The state is transposed, values by channels, as are the factors of its products: see ``product``.
    """
    K = FIXED_K if FIXED_K else K
    V = FIXED_V if FIXED_V else V
    sequence, head, at_k, at_v, in_state, of_sequence = _block_of_state(H, K, V, BLOCK_K, BLOCK_V)
    dtype = weights.dtype.element_ty
    token = tl.arange(0, C)
    state_VK = tl.zeros((BLOCK_V, BLOCK_K), tl.float32)
    if HAS_INITIAL:
        state_VK += tl.load(initial + of_sequence, mask=in_state, other=0.0)
    begin, end = _chunks_of(sequence, first_chunk, NUM_CHUNKS, PACKED)
    of_piece = tl.maximum(tl.cdiv(end - begin, NUM_INNER + 1), 1)
    # a store of the state inside the loop over chunks would slow each of its steps down
    for piece in range(NUM_INNER + 1 if HAS_INNER else 1):
        end_of_piece = tl.minimum(begin + (piece + 1) * of_piece, end)
        for slot in tl.range(begin + piece * of_piece, end_of_piece, num_stages=STAGES):
            first, exists = _tokens_of(slot, bounds, START, T, STRIDE, NUM_CHUNKS, C, PACKED)
            row, chunk = first * H + head, slot * H + head
            weight_CK = _load_of_chunk(weights, chunk, at_k, K, C)
            value_CV = _load_of_chunk(values, chunk, at_v, V, C)
            query_CK = _load_of_chunk(queries, chunk, at_k, K, C)
            key_CK = _load_of_chunk(keys, chunk, at_k, K, C)
            score_CC = tl.load(scores + chunk * (C * C) + token[:, None] * C + token[None, :])
            kept = tl.load(decay + chunk * K + at_k, mask=at_k < K, other=0.0)
            narrow_VK = state_VK.to(dtype)
            new_VC = (tl.trans(value_CV).to(tl.float32) - product(narrow_VK, tl.trans(weight_CK))).to(dtype)
            answer_VC = product(narrow_VK, tl.trans(query_CK)) + product(new_VC, tl.trans(score_CC))
            _store(out, row, exists, at_v, tl.trans(answer_VC), V, H)
            state_VK = state_VK * kept[None, :] + product(new_VC, key_CK)
        if HAS_INNER:
            at = piece * tl.num_programs(0).to(tl.int64) * (K * V) + of_sequence
            tl.store(inner + at, state_VK, mask=in_state & (end_of_piece < end))
    tl.store(final + of_sequence, state_VK, mask=in_state)


@triton.jit
def _scan_forward(
    weights, values, keys, decay, initial, states, first_chunk, NUM_CHUNKS, H, K, V,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
    PACKED: tl.constexpr, HAS_INITIAL: tl.constexpr,
):  # fmt: skip
    """Scan from the first chunk to the last: store each chunk's first state, and overwrite ``values`` with its V'."""
    sequence, head, at_k, at_v, in_state, of_sequence = _block_of_state(H, K, V, BLOCK_K, BLOCK_V)
    dtype = weights.dtype.element_ty
    at_state = at_v[:, None] * K + at_k[None, :]
    state_VK = tl.zeros((BLOCK_V, BLOCK_K), tl.float32)
    if HAS_INITIAL:
        state_VK += tl.load(initial + of_sequence, mask=in_state, other=0.0)
    begin, end = _chunks_of(sequence, first_chunk, NUM_CHUNKS, PACKED)
    for step in tl.range(0, end - begin, num_stages=STAGES):
        chunk = (begin + step) * H + head
        weight_CK = _load_of_chunk(weights, chunk, at_k, K, C)
        value_CV = _load_of_chunk(values, chunk, at_v, V, C)
        key_CK = _load_of_chunk(keys, chunk, at_k, K, C)
        kept = tl.load(decay + chunk * K + at_k, mask=at_k < K, other=0.0)
        narrow_VK = state_VK.to(dtype)
        tl.store(states + chunk * (K * V) + at_state, narrow_VK, mask=in_state)
        new_VC = (tl.trans(value_CV).to(tl.float32) - product(narrow_VK, tl.trans(weight_CK))).to(dtype)
        _store_of_chunk(values, chunk, at_v, tl.trans(new_VC), V, C)
        state_VK = state_VK * kept[None, :] + product(new_VC, key_CK)


@triton.jit
def _scan_backward(
    weights, queries, keys, scores, decay, grad_out, grad_final, grad_initial, grad_values, grad_states, bounds,
    first_chunk, START, T, STRIDE, NUM_CHUNKS, H, K, V,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
    PACKED: tl.constexpr, HAS_FINAL: tl.constexpr, WANTS_INITIAL: tl.constexpr,
):  # fmt: skip
    """Scan from the last chunk to the first: store the gradients of each chunk's last state and of its V'."""
    sequence, head, at_k, at_v, in_state, of_sequence = _block_of_state(H, K, V, BLOCK_K, BLOCK_V)
    dtype = weights.dtype.element_ty
    token = tl.arange(0, C)
    at_state = at_v[:, None] * K + at_k[None, :]
    grad_VK = tl.zeros((BLOCK_V, BLOCK_K), tl.float32)
    if HAS_FINAL:
        grad_VK += tl.load(grad_final + of_sequence, mask=in_state, other=0.0)
    begin, end = _chunks_of(sequence, first_chunk, NUM_CHUNKS, PACKED)
    for step in tl.range(0, end - begin, num_stages=STAGES):
        slot = end - 1 - step
        first, exists = _tokens_of(slot, bounds, START, T, STRIDE, NUM_CHUNKS, C, PACKED)
        row, chunk = first * H + head, slot * H + head
        weight_CK = _load_of_chunk(weights, chunk, at_k, K, C)
        query_CK = _load_of_chunk(queries, chunk, at_k, K, C)
        key_CK = _load_of_chunk(keys, chunk, at_k, K, C)
        score_CC = tl.load(scores + chunk * (C * C) + token[:, None] * C + token[None, :])
        kept = tl.load(decay + chunk * K + at_k, mask=at_k < K, other=0.0)
        out_VC = tl.trans(_load(grad_out, row, exists, at_v, V, H).to(dtype))
        narrow_VK = grad_VK.to(dtype)
        tl.store(grad_states + chunk * (K * V) + at_state, narrow_VK, mask=in_state)
        value_VC = (product(out_VC, score_CC) + product(narrow_VK, tl.trans(key_CK))).to(dtype)
        _store_of_chunk(grad_values, chunk, at_v, tl.trans(value_VC), V, C)
        grad_VK = grad_VK * kept[None, :] + product(out_VC, query_CK) - product(value_VC, weight_CK)
    if WANTS_INITIAL:
        tl.store(grad_initial + of_sequence, grad_VK, mask=in_state)


@triton.jit(do_not_specialize=COUNTS)
def scan_both_ways(
    weights, values, queries, keys, scores, decay, initial, states, grad_out, grad_final, grad_initial, grad_values,
    grad_states, bounds, first_chunk,
    START, T, STRIDE, NUM_CHUNKS, H, K, V, FIXED_K: tl.constexpr, FIXED_V: tl.constexpr,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
    PACKED: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, WANTS_INITIAL: tl.constexpr,
):  # fmt: skip
    """Run both scans of a backward pass: half of the programs scan forward and half backward."""
    K = FIXED_K if FIXED_K else K
    V = FIXED_V if FIXED_V else V
    if tl.program_id(2) == 0:
        _scan_forward(
            weights, values, keys, decay, initial, states, first_chunk, NUM_CHUNKS, H, K, V,
            C, BLOCK_K, BLOCK_V, STAGES, PACKED, HAS_INITIAL,
        )  # fmt: skip
    else:
        _scan_backward(
            weights, queries, keys, scores, decay, grad_out, grad_final, grad_initial, grad_values, grad_states,
            bounds, first_chunk, START, T, STRIDE, NUM_CHUNKS, H, K, V,
            C, BLOCK_K, BLOCK_V, STAGES, PACKED, HAS_FINAL, WANTS_INITIAL,
        )  # fmt: skip


# ---------------------------------------------------------------- gradients inside a chunk
@triton.jit(do_not_specialize=COUNTS)
def gradients_of_pairs(
    v, beta, bounds, inverse, decay, values, grad_out, grad_values, grad_scores, grad_overlaps, grad_v, grad_beta,
    scale, START, T, STRIDE, NUM_CHUNKS, H, K, V, FIXED_K: tl.constexpr, FIXED_V: tl.constexpr,
    C: tl.constexpr, BLOCK_V: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a chunk's scores, overlaps and values.

    ``grad_values`` comes in as the gradient of V' and goes out as that of the triangular system's right side, which
    contains beta*v. ``grad_scores`` is lower triangular, ``grad_overlaps`` strictly; their elements above are not read.
    """
    K = FIXED_K if FIXED_K else K
    V = FIXED_V if FIXED_V else V
    slot, head = _place(H)
    first, exists = _tokens_of(slot, bounds, START, T, STRIDE, NUM_CHUNKS, C, PACKED)
    row, chunk = first * H + head, slot * H + head
    dtype = inverse.dtype.element_ty
    token = tl.arange(0, C)
    at_pair = chunk * (C * C) + token[:, None] * C + token[None, :]
    strength = tl.load(beta + row + token * H, mask=exists, other=0.0).to(tl.float32)
    solved = tl.trans(tl.load(inverse + at_pair))
    poison = _poison(decay + chunk * K)
    of_overlaps = tl.zeros((C, C), tl.float32)
    of_scores = tl.zeros((C, C), tl.float32)
    of_strength = tl.zeros((C,), tl.float32)
    for start in range(0, V, BLOCK_V):
        columns = start + tl.arange(0, BLOCK_V)
        across = tl.trans(_load_of_chunk(values, chunk, columns, V, C))
        of_scores += product(_load(grad_out, row, exists, columns, V, H).to(dtype), across)
        written = product(solved, _load_of_chunk(grad_values, chunk, columns, V, C))
        of_strength += tl.sum(written * _load(v, row, exists, columns, V, H).to(tl.float32), 1)
        _store(grad_v, row, exists, columns, written * strength[:, None] + poison, V, H)
        of_overlaps -= product(written.to(dtype), across)
        _store_of_chunk(grad_values, chunk, columns, written, V, C)
    tl.store(grad_scores + at_pair, (of_scores * scale).to(dtype))
    tl.store(grad_overlaps + at_pair, of_overlaps.to(dtype))
    tl.store(grad_beta + row + token * H, of_strength + poison, mask=exists)


@triton.jit
def _gradients_through_states(
    values, states, grad_out, grad_values, grad_states, row, chunk, exists, columns, H, K, V,
    dtype: tl.constexpr, C: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Return what a chunk's first and last state contribute to the gradients of its queries, keys, weighed keys and
    decay; the caller multiplies by the decay within the chunk.
    """
    grad_weighed_key = tl.zeros((C, columns.shape[0]), tl.float32)
    grad_query = tl.zeros((C, columns.shape[0]), tl.float32)
    grad_key = tl.zeros((C, columns.shape[0]), tl.float32)
    grad_decay = tl.zeros((columns.shape[0],), tl.float32)
    for start in range(0, V, BLOCK_V):
        at_v = start + tl.arange(0, BLOCK_V)
        in_state = (at_v < V)[:, None] & (columns < K)[None, :]
        at_state = chunk * (K * V) + at_v[:, None] * K + columns[None, :]
        state = tl.load(states + at_state, mask=in_state, other=0.0)
        grad_state = tl.load(grad_states + at_state, mask=in_state, other=0.0)
        grad_decay += tl.sum(state.to(tl.float32) * grad_state.to(tl.float32), 0)
        grad_weighed_key -= product(_load_of_chunk(grad_values, chunk, at_v, V, C), state)
        grad_query += product(_load(grad_out, row, exists, at_v, V, H).to(dtype), state)
        grad_key += product(_load_of_chunk(values, chunk, at_v, V, C), grad_state)
    return grad_query, grad_key, grad_weighed_key, grad_decay


@triton.jit
def _gradients_from_the_middle(query, key, sums, strength, of_scores, of_overlaps, dtype: tl.constexpr):
    """Return what all pairs add to the gradients of queries, keys, gates and strengths, with the middle as the border.

    The terms of a pair's two tokens cancel in the gradients of gates that do not lie between them. So both terms must
    use the same rounded factors, and their sums keep twice the digits of ``dtype``.
    """
    token = tl.arange(0, query.shape[0])
    i, j = token[:, None], token[None, :]
    factor, inverse = power_of_two(sums), power_of_two(-sums)
    decayed_query, decayed_key, raised_key = (
        (query * factor).to(dtype), (key * factor).to(dtype), (key * inverse).to(dtype)
    )  # fmt: skip
    here = tl.where(i > j, of_overlaps, 0.0)
    of_decayed = product(here, raised_key)
    of_strength = tl.sum(of_decayed * decayed_key.to(tl.float32), 1)
    of_decayed *= strength[:, None]
    of_raised = product(tl.trans(here), (decayed_key.to(tl.float32) * strength[:, None]).to(dtype))
    here = tl.where(i > j, of_scores, 0.0)
    of_raised += product(tl.trans(here), decayed_query)
    of_query = product(here, raised_key)
    of_sums = decayed_query.to(tl.float32) * of_query + decayed_key.to(tl.float32) * of_decayed
    of_sums -= raised_key.to(tl.float32) * of_raised
    transposed = _from_the_middle(j, i, query.shape[0])
    of_gate = _sums(transposed, of_sums, dtype) + _sums(transposed, of_sums - of_sums.to(dtype).to(tl.float32), dtype)
    return of_query * factor, of_decayed * factor + of_raised * inverse, of_gate, of_strength


@triton.jit
def _gradients_at_a_level(
    query, key, gates, strength, of_scores, of_overlaps, level, dtype: tl.constexpr, C: tl.constexpr
):
    """Return what the pairs of a level add to the gradients of queries, keys, gates and strengths."""
    token = tl.arange(0, C)
    i, j = token[:, None], token[None, :]
    factor = power_of_two(_sums(_ranges(i, j, level), gates, dtype))
    decayed_key = key * factor
    decayed_query = query * factor
    meet = _pairs(i, j, level)
    here = tl.where(meet, of_overlaps, 0.0)
    of_key = product(here, decayed_key.to(dtype))
    of_strength = tl.sum(of_key * decayed_key, 1)
    of_key *= strength[:, None]
    of_key += product(tl.trans(here), (decayed_key * strength[:, None]).to(dtype))
    here = tl.where(meet, of_scores, 0.0)
    of_key += product(tl.trans(here), decayed_query.to(dtype))
    of_query = product(here, decayed_key.to(dtype))
    of_gate = _sums(_ranges(j, i, level), decayed_query * of_query + decayed_key * of_key, dtype)
    return of_query * factor, of_key * factor, of_gate, of_strength


@triton.jit
def _plus_decayed_pairs(
    grad_query, grad_key, grad_gate, grad_strength,
    query, key, gates, sums, are_flat, strength, of_scores, of_overlaps, dtype: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of queries, keys, gates and strengths those of the pairs of different tokens."""
    if are_flat:
        of_query, of_key, of_gate, of_strength = _gradients_from_the_middle(
            query, key, sums, strength, of_scores, of_overlaps, dtype
        )
        grad_query += of_query
        grad_key += of_key
        grad_gate += of_gate
        grad_strength += of_strength
    else:
        for level in range(_num_levels(C)):
            of_query, of_key, of_gate, of_strength = _gradients_at_a_level(
                query, key, gates, strength, of_scores, of_overlaps, level, dtype, C
            )
            grad_query += of_query
            grad_key += of_key
            grad_gate += of_gate
            grad_strength += of_strength
    return grad_query, grad_key, grad_gate, grad_strength


@triton.jit(do_not_specialize=COUNTS)
def gradients_of_channels(
    q, k, g, beta, bounds, decay, values, states, grad_out, grad_values, grad_states, grad_scores, grad_overlaps,
    grad_q, grad_k, grad_g, grad_beta,
    scale, part_stride, START, T, STRIDE, NUM_CHUNKS, H, K, V, FIXED_K: tl.constexpr, FIXED_V: tl.constexpr,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of queries, keys and gates for a chunk, a head and a block of channels, and the block's
    part of the gradient of beta: ``grad_beta`` is ``[1 + blocks, rows, H]``, where index 0 is the part of the values.
    """
    K = FIXED_K if FIXED_K else K
    V = FIXED_V if FIXED_V else V
    slot, head = _place(H)
    block = tl.program_id(1)
    first, exists = _tokens_of(slot, bounds, START, T, STRIDE, NUM_CHUNKS, C, PACKED)
    row, chunk = first * H + head, slot * H + head
    dtype = states.dtype.element_ty
    token = tl.arange(0, C)
    i, j = token[:, None], token[None, :]
    columns = block * BLOCK_K + tl.arange(0, BLOCK_K)
    strength = tl.load(beta + row + token * H, mask=exists, other=0.0).to(tl.float32)

    grad_query, grad_key, grad_weighed_key, grad_decay = _gradients_through_states(
        values, states, grad_out, grad_values, grad_states, row, chunk, exists, columns, H, K, V, dtype, C, BLOCK_V
    )
    gates = _load(g, row, exists, columns, K, H).to(tl.float32) * LOG2_E
    query = _load(q, row, exists, columns, K, H).to(tl.float32)
    key = _load(k, row, exists, columns, K, H).to(tl.float32)
    sums = _sums(_from_the_middle(i, j, C), gates, dtype)
    are_flat = _are_flat(sums, dtype)
    if not are_flat:
        gates, _ = _cleaned(gates)
    # reads of the chunk's first state decay from the start to each token
    factor = power_of_two(_sums(j <= i, gates, dtype))
    grad_query *= factor * scale
    grad_weighed_key *= factor
    grad_strength = tl.sum(grad_weighed_key * key, 1)
    grad_weighed_key *= strength[:, None]
    grad_gate = _sums(j >= i, query * grad_query + key * grad_weighed_key, dtype)
    # writes to the chunk's last state decay from each token to the end
    grad_key *= power_of_two(_sums(j > i, gates, dtype))
    grad_gate += _sums(j < i, key * grad_key, dtype)
    grad_gate += (power_of_two(tl.sum(gates, 0)) * grad_decay)[None, :]
    grad_key += grad_weighed_key
    # pairs of a token with itself
    of_scores = tl.load(grad_scores + chunk * (C * C) + i * C + j)
    of_overlaps = tl.load(grad_overlaps + chunk * (C * C) + i * C + j)
    own = tl.sum(tl.where(i == j, of_scores.to(tl.float32), 0.0), 1)[:, None]
    grad_query += own * key
    grad_key += own * query
    grad_query, grad_key, grad_gate, grad_strength = _plus_decayed_pairs(
        grad_query, grad_key, grad_gate, grad_strength,
        query, key, gates, sums, are_flat, strength, of_scores, of_overlaps, dtype, C,
    )  # fmt: skip
    poison = _poison(decay + chunk * K)
    _store(grad_q, row, exists, columns, grad_query + poison, K, H)
    _store(grad_k, row, exists, columns, grad_key + poison, K, H)
    _store(grad_g, row, exists, columns, grad_gate + poison, K, H)
    tl.store(grad_beta + (1 + block) * part_stride + row + token * H, grad_strength + poison, mask=exists)
