"""The Triton kernels of the chunked loss.

There are two paths from a chunk's hidden rows to the gradient of its logits. ``exponentials`` is a matrix product that
stores the exponentials of its results in 16 bits, relative to the logit of the target: the float32 logits exist in
registers only. ``pass_over_logits`` reads logits that a matrix product left in memory, and takes every option.
"""

# C tokens of a chunk, D width, V vocabulary; arguments in upper case are constexpr: block sizes and flags

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels import INTERPRETED

LOG2_E = tl.constexpr(1.4426950408889634)
LARGEST_SUM = tl.constexpr(2.0**90)
"""Largest sum of a tile's exponentials: the sum over tiles, and its inverse, times a hidden value then fit bfloat16."""
LARGEST_TERMS = tl.constexpr(2.0**20)
"""Largest sum of the magnitudes of a logit's terms: beyond it, float32 sums in two orders may differ by tens."""


# ---------------------------------------------------------------- the product that stores exponentials
@triton.jit
def target_logits(
    hidden, hidden_stride, column_stride, rows, weight, weight_stride, bias, target, target_logit, strays,
    num_tokens, vocabulary, width, rows_per_chunk, strays_stride, inverse_temperature,
    HAS_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the logit of each token's target: the reference of the token's exponentials. Mark a token as a stray if
    the terms of this logit are so large that the sum in the matrix product may differ much from the sum made here.
    """
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    column = tl.load(target + tokens, mask=is_token, other=0)
    # the host refuses a target out of range, but only after this kernel has started
    column = tl.where((column >= 0) & (column < vocabulary), column, 0)
    row = tokens
    if HAS_ROWS:
        row = tl.load(rows + tokens, mask=is_token, other=0)
    at = tl.arange(0, WIDTH)
    inside = is_token[:, None] & (at < width)[None, :]
    where = hidden + row[:, None] * hidden_stride + at[None, :] * column_stride
    weight_CD = tl.load(weight + column[:, None] * weight_stride + at[None, :], mask=inside, other=0.0)
    # under autocast hidden may be wider than the weight: round it as the matrix products do
    hidden_CD = tl.load(where, mask=inside, other=0.0).to(weight.dtype.element_ty)
    terms_CD = hidden_CD.to(tl.float32) * weight_CD.to(tl.float32)
    logit = tl.sum(terms_CD, 1)
    magnitude = tl.sum(tl.abs(terms_CD), 1)
    if HAS_BIAS:
        own_bias = tl.load(bias + column, mask=is_token, other=0.0).to(tl.float32)
        logit += own_bias
        magnitude += tl.abs(own_bias)
    tl.store(target_logit + tokens, logit * inverse_temperature, mask=is_token)
    is_stray = is_token & (magnitude * inverse_temperature > LARGEST_TERMS)
    at_chunk = strays + tokens // rows_per_chunk * strays_stride
    ones = tl.full((TOKENS,), 1, tl.int32)
    tl.store(at_chunk, ones, mask=is_stray)
    tl.store(at_chunk + 1 + tokens % rows_per_chunk // BLOCK, ones, mask=is_stray)


@triton.jit
def _product_of_tiles(
    hidden_CD, weight_VD, first_token, first_class, steps,
    TOKENS: tl.constexpr, CLASSES: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    logits = tl.zeros((TOKENS, CLASSES), tl.float32)
    for step in range(steps):
        left = hidden_CD.load([first_token, step * DEPTH])
        right = weight_VD.load([first_class, step * DEPTH])
        if INTERPRETED:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        logits = tl.dot(left, right.T, logits)
    return logits


@triton.jit
def exponentials(
    hidden_CD, weight_VD, out_CV, bias, reference, parts, strays,
    num_tokens, vocabulary, width, num_parts, inverse_temperature,
    PROGRAMS: tl.constexpr, TOKENS: tl.constexpr, CLASSES: tl.constexpr, DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr, STORES: tl.constexpr, STRAYS_ONLY: tl.constexpr, FINDS_MAXIMA: tl.constexpr,
):  # fmt: skip
    """Store ``exp(logit - reference)`` for every token and class, rounded once, and its sum over each tile's classes.

    The grid is persistent: a program takes one tile after another, all tokens of a block of classes first, so that the
    weight is read once and the chunk's hidden rows stay in the cache. A token whose sum is too large or NaN is a stray.
    ``strays[0]`` is the flag that the chunk has strays; the flags of the blocks of tokens follow. ``STRAYS_ONLY``
    visits only blocks with strays, usually none. ``FINDS_MAXIMA`` writes only the largest logits of their tokens, to
    ``reference``.
    """
    tiles_C = tl.cdiv(num_tokens, TOKENS)
    num_tiles = tiles_C * tl.cdiv(vocabulary, CLASSES)
    if STRAYS_ONLY:
        num_tiles *= tl.load(strays)
    steps = tl.cdiv(width, DEPTH)
    for tile in tl.range(tl.program_id(0), num_tiles, PROGRAMS, flatten=True):
        block = tile % tiles_C
        first_token = block * TOKENS
        part = tile // tiles_C
        first_class = part * CLASSES
        own_steps = steps
        if STRAYS_ONLY:
            own_steps = tl.where(tl.load(strays + 1 + block) == 0, 0, steps)
        logits = _product_of_tiles(hidden_CD, weight_VD, first_token, first_class, own_steps, TOKENS, CLASSES, DEPTH)
        tokens = first_token + tl.arange(0, TOKENS)
        classes = first_class + tl.arange(0, CLASSES)
        writes = tokens < num_tokens
        if STRAYS_ONLY:
            writes &= own_steps > 0
        if HAS_BIAS:
            logits += tl.load(bias + classes, mask=classes < vocabulary, other=0.0).to(tl.float32)[None, :]
        if FINDS_MAXIMA:
            logits = tl.where((classes < vocabulary)[None, :], logits, float("-inf"))
            tl.atomic_max(reference + tokens, tl.max(logits, 1) * inverse_temperature, mask=writes)
        else:
            reference_logit = tl.load(reference + tokens, mask=tokens < num_tokens, other=0.0)[:, None]
            if STRAYS_ONLY:  # subtract first: for large logits, the rounding of logit * factor is not small
                values = tl.exp2((logits * inverse_temperature - reference_logit) * LOG2_E)
            else:
                values = tl.exp2(logits * (inverse_temperature * LOG2_E) - reference_logit * LOG2_E)
            if STORES:
                if STRAYS_ONLY:
                    if own_steps > 0:
                        out_CV.store([first_token, first_class], values.to(out_CV.dtype))
                else:
                    out_CV.store([first_token, first_class], values.to(out_CV.dtype))
            sums = tl.sum(tl.where((classes < vocabulary)[None, :], values, 0.0), 1)
            tl.store(parts + tokens.to(tl.int64) * num_parts + part, sums, mask=writes)
            if not STRAYS_ONLY:
                is_stray = writes & ~(sums <= LARGEST_SUM)
                ones = tl.full((TOKENS,), 1, tl.int32)
                tl.store(strays + tokens * 0, ones, mask=is_stray)
                tl.store(strays + 1 + block + tokens * 0, ones, mask=is_stray)


@triton.jit
def _gradient_factors(
    softmax, own, square, tokens, is_token, lse, dtype: tl.constexpr,
    HAS_COEFFICIENTS: tl.constexpr, HAS_SQUARE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Return the factors of a token's softmax and of its target entry in the gradient: see ``terms.Coefficients``."""
    softmax_factor = tl.full((TOKENS,), 1.0, dtype)
    target_factor = tl.full((TOKENS,), 1.0, dtype)
    if HAS_COEFFICIENTS:
        softmax_factor = tl.load(softmax + tokens, mask=is_token, other=0.0)
        target_factor = tl.load(own + tokens, mask=is_token, other=0.0)
        if HAS_SQUARE:
            softmax_factor += tl.load(square + tokens, mask=is_token, other=0.0) * lse
    return softmax_factor, target_factor


@triton.jit
def finish_tokens(
    values_CV, values_stride, parts, num_parts, maximum, strays, target, nll, logsumexp,
    softmax, own, square, row_scale, target_share, hidden, hidden_stride, scaled_hidden, num_tokens, width,
    HAS_LOGSUMEXP: tl.constexpr, HAS_COEFFICIENTS: tl.constexpr, HAS_SQUARE: tl.constexpr, STORES: tl.constexpr,
    TOKENS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute each token's loss, and the factors of its gradient ``row_scale * values - target_share [v = t]``.

    ``nll`` holds the logit of the target on entry and the loss on exit. The exponentials are relative to that
    logit, in blocks with strays to ``maximum``, which is reset to -inf.

    The target's own entry is ``p - 1`` (up to the coefficients). While ``p`` is small, the 1 is kept in
    ``target_share``, where it is exact. If ``p`` is above a half, the entry itself stores the difference: the rounding
    error of ``p`` alone could then be larger than the difference.
    """
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    at_part = tl.arange(0, PARTS)
    where = parts + tokens[:, None] * num_parts + at_part[None, :]
    total = tl.sum(tl.load(where, mask=is_token[:, None] & (at_part < num_parts)[None, :], other=0.0), 1)
    log_total = tl.log(total)
    own_logit = tl.load(nll + tokens, mask=is_token, other=0.0)
    is_in_stray_block = is_token & (tl.load(strays + 1 + tokens // BLOCK, mask=is_token, other=0) != 0)
    shift = tl.where(is_in_stray_block, tl.load(maximum + tokens, mask=is_in_stray_block, other=0.0), own_logit)
    tl.store(maximum + tokens, tl.full((TOKENS,), float("-inf"), tl.float32), mask=is_in_stray_block)
    own_shifted = own_logit - shift
    own_shifted = tl.where(own_shifted > 0.0, 0.0, own_shifted)  # only rounding can exceed the maximum; a NaN stays
    tl.store(nll + tokens, log_total - own_shifted, mask=is_token)
    lse = log_total + shift
    if HAS_LOGSUMEXP:
        tl.store(logsumexp + tokens, lse, mask=is_token)
    if STORES:
        softmax_factor, target_factor = _gradient_factors(
            softmax, own, square, tokens, is_token, lse, tl.float32, HAS_COEFFICIENTS, HAS_SQUARE, TOKENS
        )  # fmt: skip
        own_value = tl.exp(own_shifted)
        is_likely = (own_value > 0.5 * total) & (softmax_factor != 0.0)
        at_target = values_CV + tokens * values_stride + tl.load(target + tokens, mask=is_token, other=0)
        difference = own_value - total * (target_factor / softmax_factor)
        tl.store(at_target, difference.to(values_CV.dtype.element_ty), mask=is_token & is_likely)
        scale = softmax_factor / total
        tl.store(row_scale + tokens, scale, mask=is_token)
        tl.store(target_share + tokens, tl.where(is_likely, 0.0, target_factor), mask=is_token)
        at = tl.arange(0, WIDTH)
        inside = is_token[:, None] & (at < width)[None, :]
        hidden_CD = tl.load(hidden + tokens[:, None] * hidden_stride + at[None, :], mask=inside, other=0.0)
        scaled_CD = (hidden_CD.to(tl.float32) * scale[:, None]).to(scaled_hidden.dtype.element_ty)
        tl.store(scaled_hidden + tokens[:, None] * width + at[None, :], scaled_CD, mask=inside)


@triton.jit
def finish_hidden(
    product, row_scale, target_share, target, weight, weight_stride, out, out_stride, num_tokens, width, alpha,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """``out = alpha * (row_scale * product - target_share * weight[target])``, rounded once."""
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    at = tl.arange(0, WIDTH)
    inside = is_token[:, None] & (at < width)[None, :]
    scale = tl.load(row_scale + tokens, mask=is_token, other=0.0)
    share = tl.load(target_share + tokens, mask=is_token, other=0.0)
    column = tl.load(target + tokens, mask=is_token, other=0)
    value_CD = tl.load(product + tokens[:, None] * width + at[None, :], mask=inside, other=0.0) * scale[:, None]
    subtracts = inside & (share != 0.0)[:, None]
    weight_CD = tl.load(weight + column[:, None] * weight_stride + at[None, :], mask=subtracts, other=0.0)
    value_CD -= share[:, None] * weight_CD.to(tl.float32)
    where = out + tokens[:, None] * out_stride + at[None, :]
    tl.store(where, (alpha * value_CD).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _with_stored(sums, stored, scale):
    return sums + stored.to(tl.float32) * scale[:, None]


@triton.jit
def add_to_weight(
    values_CV, scaled_hidden_CD, stored_VD, out_VD, scales, num_tokens, vocabulary, width, num_parts, alpha,
    PROGRAMS: tl.constexpr, CLASSES: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    IS_FIRST: tl.constexpr, IS_LAST: tl.constexpr,
):  # fmt: skip
    """Add ``values.T @ scaled_hidden`` to the sum over earlier chunks, which is stored in the memory of the result.

    Between chunks a sum is stored as float16 times a power of two, one power for each row of a tile. The largest
    element of a row then has all 11 significant bits: eight times as fine as the bfloat16 that the last chunk stores.
    """
    tiles_D = tl.cdiv(width, WIDTH)
    num_tiles = tl.cdiv(vocabulary, CLASSES) * tiles_D
    steps = tl.cdiv(num_tokens, DEPTH)
    HALF: tl.constexpr = WIDTH // 2
    for tile in tl.range(tl.program_id(0), num_tiles, PROGRAMS, flatten=True):
        first_class = tile // tiles_D * CLASSES
        part = tile % tiles_D
        first = part * WIDTH
        sums = tl.zeros((CLASSES, WIDTH), tl.float32)
        for step in range(steps):
            left = values_CV.load([step * DEPTH, first_class])
            right = scaled_hidden_CD.load([step * DEPTH, first])
            if INTERPRETED:
                left = left.to(tl.float32)
                right = right.to(tl.float32)
            sums = tl.dot(left.T, right, sums)
        left_half, right_half = tl.split(tl.permute(tl.reshape(sums, (CLASSES, 2, HALF)), (0, 2, 1)))
        classes = first_class + tl.arange(0, CLASSES)
        at_scale = scales + classes * num_parts + part
        if not IS_FIRST:
            scale = tl.load(at_scale, mask=classes < vocabulary, other=0.0)
            left_half = _with_stored(left_half, stored_VD.load([first_class, first]), scale)
            right_half = _with_stored(right_half, stored_VD.load([first_class, first + HALF]), scale)
        if IS_LAST:
            out_VD.store([first_class, first], (alpha * left_half).to(out_VD.dtype))
            out_VD.store([first_class, first + HALF], (alpha * right_half).to(out_VD.dtype))
        else:
            largest = tl.maximum(tl.max(tl.abs(left_half), 1), tl.max(tl.abs(right_half), 1))
            # scale by a power of two: the largest stored magnitude is at least 2**14 and below 2**15
            exponent = tl.maximum(((largest.to(tl.uint32, bitcast=True) >> 23) & 0xFF).to(tl.int32) - 14, 1)
            inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
            stored_VD.store([first_class, first], (left_half * inverse[:, None]).to(tl.float16))
            stored_VD.store([first_class, first + HALF], (right_half * inverse[:, None]).to(tl.float16))
            tl.store(at_scale, (exponent << 23).to(tl.float32, bitcast=True), mask=classes < vocabulary)


@triton.jit
def subtract_targets(
    sorted_target, hidden_rows, target_share, hidden, hidden_stride, column_stride, gradient, num_tokens, width, alpha,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """``gradient[t] -= alpha * sum(target_share * hidden)`` over the tokens of each target, in a fixed order.

    Tokens are sorted by target. The program of a target's first token adds up all its tokens; the others do nothing.
    """
    place = tl.program_id(0)
    column = tl.load(sorted_target + place).to(tl.int64)
    is_first = place == 0
    if place > 0:
        is_first = tl.load(sorted_target + place - 1) != column
    if is_first:
        at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        inside = at < width
        total_D = tl.zeros((WIDTH,), tl.float32)
        goes_on = True
        while goes_on:
            places = place + tl.arange(0, TOKENS)
            columns = tl.load(sorted_target + places, mask=places < num_tokens, other=-1)
            belongs = columns == column
            rows = tl.load(hidden_rows + places, mask=belongs, other=0)
            share = tl.load(target_share + places, mask=belongs, other=0.0)
            where = hidden + rows[:, None] * hidden_stride + at[None, :] * column_stride
            hidden_CD = tl.load(where, mask=belongs[:, None] & inside[None, :], other=0.0)
            # under autocast hidden may be wider than bfloat16: round it as the matrix products do
            hidden_CD = hidden_CD.to(tl.float32).to(tl.bfloat16).to(tl.float32)
            total_D += tl.sum(share[:, None] * hidden_CD, 0)
            goes_on = tl.sum(belongs.to(tl.int32), 0) == TOKENS
            place += TOKENS
        at_gradient = gradient + column * width + at
        value_D = tl.load(at_gradient, mask=inside, other=0.0).to(tl.float32) - alpha * total_D
        tl.store(at_gradient, value_D.to(gradient.dtype.element_ty), mask=inside)


@triton.jit
def column_sums(
    values_CV, values_stride, row_scale, out, num_tokens, vocabulary, TOKENS: tl.constexpr, CLASSES: tl.constexpr
):
    """``out[v] = sum_c row_scale[c] * values[c, v]`` in float32, one program per block of classes."""
    classes = tl.program_id(0) * CLASSES + tl.arange(0, CLASSES)
    inside = classes < vocabulary
    total_V = tl.zeros((CLASSES,), tl.float32)
    for first in range(0, num_tokens, TOKENS):
        tokens = first + tl.arange(0, TOKENS)
        is_token = tokens < num_tokens
        scale = tl.load(row_scale + tokens, mask=is_token, other=0.0)
        where = values_CV + tokens.to(tl.int64)[:, None] * values_stride + classes[None, :]
        block = tl.load(where, mask=is_token[:, None] & inside[None, :], other=0.0).to(tl.float32)
        total_V += tl.sum(block * scale[:, None], 0)
    tl.store(out + classes, total_V, mask=inside)


# ---------------------------------------------------------------- the pass over logits in memory
@triton.jit
def _logits_of(
    values, bias, classes, inside, HAS_BIAS: tl.constexpr, CAP: tl.constexpr, INVERSE_TEMPERATURE: tl.constexpr
):
    """Return the logits from the results of the matrix product, and the slope of the cap."""
    logits = values
    slope = tl.full(values.shape, 1.0, values.dtype)
    if HAS_BIAS:
        logits += tl.load(bias + classes, mask=inside, other=0.0).to(values.dtype)[None, :]
    if CAP > 0:
        bent = 1.0 - 2.0 / (tl.exp(logits * (2.0 / CAP)) + 1.0)  # tanh
        slope = 1.0 - bent * bent
        logits = bent * CAP
    return logits * INVERSE_TEMPERATURE, slope


@triton.jit
def _class_weights(class_weight, classes, inside, HAS_CLASS_WEIGHT: tl.constexpr, dtype: tl.constexpr):
    """Return the class weights: 1 for every class if there are none, and 0 outside the vocabulary."""
    if HAS_CLASS_WEIGHT:
        return tl.load(class_weight + classes, mask=inside, other=0.0).to(dtype)
    return tl.where(inside, 1.0, 0.0).to(dtype)


@triton.jit
def _sums_over_classes(
    rows, column, is_token, bias, class_weight, vocabulary, dtype: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr, CAP: tl.constexpr, INVERSE_TEMPERATURE: tl.constexpr,
    SMOOTHS: tl.constexpr, TOKENS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """Return for each token: its largest logit (0 if that is -inf), the logarithm of the sum of exponentials relative
    to it, the logit of its target, the sum of its logits times the class weights; and last, the sum of these weights.
    """
    highest = tl.full((TOKENS, CLASSES), float("-inf"), dtype)
    total = tl.zeros((TOKENS, CLASSES), dtype)
    weighted = tl.zeros((TOKENS, CLASSES), dtype)
    at_target = tl.zeros((TOKENS, CLASSES), dtype)
    weights = tl.zeros((CLASSES,), dtype)
    for first in range(0, vocabulary, CLASSES):
        classes = first + tl.arange(0, CLASSES)
        inside = classes < vocabulary
        values = tl.load(rows + classes[None, :], mask=is_token[:, None] & inside[None, :], other=0.0)
        logits, _ = _logits_of(values, bias, classes, inside, HAS_BIAS, CAP, INVERSE_TEMPERATURE)
        at_target = tl.where(classes[None, :] == column[:, None], logits, at_target)
        if SMOOTHS:
            weight = _class_weights(class_weight, classes, inside, HAS_CLASS_WEIGHT, dtype)
            weights += weight
            weighted += tl.where(inside[None, :], weight[None, :] * logits, 0.0)
        logits = tl.where(inside[None, :], logits, float("-inf"))
        higher = tl.maximum(highest, logits)
        # a lane that has seen only -inf is shifted by 0: -inf - -inf would be NaN
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - shift) + tl.exp(logits - shift)
        highest = higher
    # the maximum may drop a NaN; the sum keeps it
    top = tl.max(highest, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    log_total = tl.log(tl.sum(total * tl.exp(highest - base[:, None]), 1))
    return base, log_total, tl.sum(at_target, 1), tl.sum(weighted, 1), tl.sum(weights, 0)


@triton.jit
def pass_over_logits(
    values_RV, values_stride, bias, class_weight, target, nll, logsumexp, smooth,
    softmax, own, square, smooth_share, gradient_RV, gradient_stride, num_tokens, vocabulary,
    HAS_BIAS: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr, CAP: tl.constexpr, INVERSE_TEMPERATURE: tl.constexpr,
    HAS_LOGSUMEXP: tl.constexpr, SMOOTHS: tl.constexpr,
    HAS_COEFFICIENTS: tl.constexpr, HAS_SQUARE: tl.constexpr, STORES: tl.constexpr,
    TOKENS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """Compute a token's sums from its logits, then the gradient of the logits: two passes over its row.

    ``gradient`` may be ``values``: a block is read before it is written. See ``terms.Coefficients`` for the gradient.
    ``CAP`` (0: no cap) and the temperature are constexpr: as arguments they would be float32 even for float64 logits.
    """
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    dtype: tl.constexpr = values_RV.dtype.element_ty
    rows = values_RV + tokens[:, None] * values_stride
    column = tl.load(target + tokens, mask=is_token, other=0)
    base, log_total, at_target, weighted, weights = _sums_over_classes(
        rows, column, is_token, bias, class_weight, vocabulary, dtype,
        HAS_BIAS, HAS_CLASS_WEIGHT, CAP, INVERSE_TEMPERATURE, SMOOTHS, TOKENS, CLASSES,
    )  # fmt: skip
    lse = base + log_total
    # subtract before adding: the rounding of lse would erase the small loss of a confident token
    tl.store(nll + tokens, (base - at_target) + log_total, mask=is_token)
    if HAS_LOGSUMEXP:
        tl.store(logsumexp + tokens, lse, mask=is_token)
    if SMOOTHS:
        tl.store(smooth + tokens, weights * lse - weighted, mask=is_token)
    if STORES:
        softmax_factor, target_factor = _gradient_factors(
            softmax, own, square, tokens, is_token, lse, dtype, HAS_COEFFICIENTS, HAS_SQUARE, TOKENS
        )  # fmt: skip
        gradient_rows = gradient_RV + tokens[:, None] * gradient_stride
        for first in range(0, vocabulary, CLASSES):
            classes = first + tl.arange(0, CLASSES)
            inside = classes < vocabulary
            block = is_token[:, None] & inside[None, :]
            values = tl.load(rows + classes[None, :], mask=block, other=0.0)
            logits, slope = _logits_of(values, bias, classes, inside, HAS_BIAS, CAP, INVERSE_TEMPERATURE)
            result = softmax_factor[:, None] * tl.exp((logits - base[:, None]) - log_total[:, None])
            result -= tl.where(classes[None, :] == column[:, None], target_factor[:, None], 0.0)
            if SMOOTHS:
                weight = _class_weights(class_weight, classes, inside, HAS_CLASS_WEIGHT, dtype)
                spread = tl.load(smooth_share + tokens, mask=is_token, other=0.0)
                result -= spread[:, None] * weight[None, :]
            tl.store(gradient_rows + classes[None, :], (result * slope).to(gradient_RV.dtype.element_ty), mask=block)


# ---------------------------------------------------------------- the upstream factor
@triton.jit
def scale_in_place(tensor, factor, num_elements, ELEMENTS: tl.constexpr):
    """``tensor *= factor``. The factor, known to the device only, is usually 1: then no element is read or written."""
    value = tl.load(factor)
    if value != 1.0:
        at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
        inside = at < num_elements
        old = tl.load(tensor + at, mask=inside)
        tl.store(tensor + at, (old.to(value.dtype) * value).to(tensor.dtype.element_ty), mask=inside)
