// Kimi delta attention in bfloat16, in chunks of 32 tokens. Compiled at run time; see also cuda.py and kernels.py, whose
// prepare says what a chunk does to a state.
//
// A warp takes a chunk of a head and keeps it in registers. A thread has the rows r, r+8, r+16 and r+24, r = lane/4, and
// of every 32 channels the 8 from 8*(lane%4) on: 16 bytes of a row, whose pairs are operands of the tensor cores as they
// are, because a product may sum over channels in any order.
//
// It is compiled for one WIDTH of keys, and WARPS of a block that walks from chunk to chunk.

#define TOKENS 32
#define ROWS 4        // of a thread
#define CHANNELS 8    // of a thread, of every GROUP
#define GROUP 32
#define STEEPEST 116.0f       // as _steepest in kernels.py
#define LOWEST_GATE -300.0f   // its power of two is 0; -inf itself would leave sums as NaN
#define LOG2_E 1.4426950408889634f
#define ONES 0x3f803f80u      // two ones in bfloat16
#define INFINITE __int_as_float(0x7f800000)

__device__ float low_of(unsigned both) { return __int_as_float(both << 16); }
__device__ float high_of(unsigned both) { return __int_as_float(both & 0xffff0000u); }
__device__ uint4 as_bits(float a, float b, float c, float d) {
    return uint4{__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d)};
}
__device__ int least(int a, int b) { return a < b ? a : b; }
// over the threads that have the same rows
__device__ float sum_over_quads(float value, int lane) {
    value += from_lane(value, lane ^ 1);
    return value + from_lane(value, lane ^ 2);
}

// ---------------------------------------------------------------- tiles
// of a lower triangular 32 x 32 matrix six tiles of 16 x 8: rows 16*m.., columns 8*n.., n < 2*m + 2
#define TILES 6
__device__ int tile(int m, int n) { return 2 * m + n; }
// row and column of an element of a tile that a thread has
__device__ int row_of(int m, int element, int r) { return 16 * m + r + 8 * (element >> 1); }
__device__ int column_of(int n, int element, int q) { return 8 * n + 2 * q + (element & 1); }

// whether token i of a second half meets token j of its first half
__device__ bool meet(int i, int j, int level) { return (i >> level) == (j >> level) + 1 && ((i >> level) & 1); }

// x @ y of 16 x 16 matrices in two tiles each; y is given transposed. The sum over columns runs over even ones first
__device__ void multiply_blocks(float (&sums)[2][4], const float (&x)[2][4], const float (&y_turned)[2][4]) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int k = 0; k < 2; ++k)
            multiply_floats(sums[n], x[k][0], x[k][2], x[k][1], x[k][3], y_turned[k][2 * n], y_turned[k][2 * n + 1]);
}

// the inverse of I + lower, of 16 x 16, and the inverse transposed: blocks of 2^level tokens are inverted, and each level
// joins two of them
__device__ void invert_block(const float (&lower)[2][4], float (&solved)[2][4], float (&turned)[2][4], int lane) {
    const int r = lane >> 2, q = lane & 3;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int i = row_of(0, e, r), j = column_of(n, e, q);
            const float below = from_lane(lower[n][e & 2], (lane + 4) & 31);  // of the next row, in column 2*q
            solved[n][e] = i == j ? 1.0f : meet(i, j, 0) ? -lower[n][e] : 0.0f;
            turned[n][e] = i == j ? 1.0f : meet(j, i, 0) ? -below : 0.0f;
        }
#pragma unroll
    for (int level = 1; level < 4; ++level) {
        float joining[2][4], product[2][4] = {}, change[2][4] = {}, change_turned[2][4] = {};
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                joining[n][e] = meet(row_of(0, e, r), column_of(n, e, q), level) ? lower[n][e] : 0.0f;
        multiply_blocks(product, turned, joining);  // (joining @ solved), transposed
        multiply_blocks(change, solved, product);
        multiply_blocks(change_turned, product, solved);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) solved[n][e] -= change[n][e], turned[n][e] -= change_turned[n][e];
    }
}

// the inverse of I + lower as operands of products: rows 0 to 15, and rows 16 to 31 by their first and second 16 columns
struct Inverse {
    unsigned first[4], joining[4], second[4];
};
__device__ void as_operand(unsigned (&operand)[4], const float (&block)[2][4]) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        operand[2 * n] = pack(block[n][0], block[n][1]);
        operand[2 * n + 1] = pack(block[n][2], block[n][3]);
    }
}
__device__ Inverse inverse_of(const float (&lower)[TILES][4], int lane) {
    float parts[3][2][4];  // of rows 0 to 15, of rows 16 to 31 and columns 0 to 15, and of the rest
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            parts[0][n][e] = lower[tile(0, n)][e];
            parts[1][n][e] = lower[tile(1, n)][e];
            parts[2][n][e] = lower[tile(1, 2 + n)][e];
        }
    float first[2][4], second[2][4], turned[2][4], second_turned[2][4], product[2][4] = {}, joining[2][4] = {};
    invert_block(parts[0], first, turned, lane);
    invert_block(parts[2], second, second_turned, lane);
    multiply_blocks(product, turned, parts[1]);  // (joining @ first), transposed
    multiply_blocks(joining, second, product);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) joining[n][e] = -joining[n][e];
    Inverse inverse;
    as_operand(inverse.first, first);
    as_operand(inverse.joining, joining);
    as_operand(inverse.second, second);
    return inverse;
}

// inverse @ rows, for 8 channels of a thread and all its rows
__device__ void solve(const Inverse& inverse, const unsigned (&rows)[ROWS][4], uint4 (&solved)[ROWS]) {
    unsigned out[ROWS][4];
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        unsigned turned[ROWS];
#pragma unroll
        for (int m = 0; m < ROWS; ++m) turned[m] = transposed(rows[m][p]);
        float upper[4] = {}, lower[4] = {};
        multiply(upper, inverse.first, turned[0], turned[1]);
        multiply(lower, inverse.joining, turned[0], turned[1]);
        multiply(lower, inverse.second, turned[2], turned[3]);
        out[0][p] = pack(upper[0], upper[1]);
        out[1][p] = pack(upper[2], upper[3]);
        out[2][p] = pack(lower[0], lower[1]);
        out[3][p] = pack(lower[2], lower[3]);
    }
#pragma unroll
    for (int m = 0; m < ROWS; ++m) solved[m] = uint4{out[m][0], out[m][1], out[m][2], out[m][3]};
}

// ---------------------------------------------------------------- rows and gates
struct Chunk {
    long long first_row, index;
    int num_tokens, heads;
    __device__ long long row(int token) const { return first_row + (long long)token * heads; }
    __device__ bool has(int token) const { return token < num_tokens; }
};

template <typename Bounds>
__device__ Chunk chunk_of(Bounds bounds, int length, int chunks_per_sequence, int heads) {
    const long long slot = blockIdx.x / heads;  // blocks that run at once take neighbouring heads, whose rows are neighbours
    const int head = blockIdx.x % heads;
    long long first, end;
    if (length == 0) {  // packed
        first = bounds[2 * slot];
        end = bounds[2 * slot + 1];
    } else {
        const long long sequence = slot / chunks_per_sequence;
        first = sequence * length + (slot - sequence * chunks_per_sequence) * TOKENS;
        end = (sequence + 1) * length;
    }
    return Chunk{first * heads + head, slot * heads + head, int(end - first < TOKENS ? end - first : TOKENS), heads};
}

// A thread fetches ahead what it will need itself, so a warp waits for nobody: its 16 bytes lie in slots, of 512 bytes for
// all lanes. Where there is no token there are zeros.
#define SLOT 512
#define STAGE_SLOTS 16  // of a group of channels: 4 of queries, 4 of keys, 8 of gates; or of the values of four groups

template <typename Tensor>
__device__ void fetch_rows(unsigned slots, Tensor tensor, const Chunk& chunk, int width, int column, int r) {
#pragma unroll
    for (int m = 0; m < ROWS; ++m)
        copy16(slots + m * SLOT, tensor, chunk.row(r + 8 * m) * width + column, chunk.has(r + 8 * m));
}

// of gates a thread takes the tokens 2*q + (t & 1) + 8*(t >> 1), and 4 channels from 4*r on
__device__ int token_of_gate(int t, int q) { return 2 * q + (t & 1) + 8 * (t >> 1); }
template <typename Gates>
__device__ void fetch_gates(unsigned slots, Gates g, const Chunk& chunk, int width, int column, int q) {
#pragma unroll
    for (int t = 0; t < 8; ++t)
        copy16(slots + t * SLOT, g, chunk.row(token_of_gate(t, q)) * width + column, chunk.has(token_of_gate(t, q)));
}

__device__ void take_rows(unsigned (&values)[ROWS][4], unsigned slots) {
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
        const uint4 four = take16(slots + m * SLOT);
        values[m][0] = four.x, values[m][1] = four.y, values[m][2] = four.z, values[m][3] = four.w;
    }
}

// as exponents of 2
__device__ void take_gates(float (&gates)[8][4], unsigned slots) {
#pragma unroll
    for (int t = 0; t < 8; ++t) {
        const uint4 four = take16(slots + t * SLOT);
        const unsigned bits[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int c = 0; c < 4; ++c) gates[t][c] = __int_as_float(bits[c]) * LOG2_E;
    }
}

// for each row of a thread and each of its channels, the sum of all gates up to the row's own. A gate is the sum of two
// bfloat16: one alone would leave a factor of a strong gate as few digits as the gate has behind its point
__device__ void sum_gates(float (&sums)[ROWS][CHANNELS], const float (&gates)[8][4], int r, int q) {
    const unsigned corner = (2 * q <= r ? 0x3f80u : 0u) | (2 * q + 1 <= r ? 0x3f800000u : 0u);
    const unsigned triangle[4] = {corner, ONES, 0u, corner}, ones[4] = {ONES, ONES, ONES, ONES};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        float upper[4] = {}, lower[4] = {};
        unsigned pairs[2][4];
#pragma unroll
        for (int h = 0; h < 4; ++h) {
            const float a = gates[2 * h][c], b = gates[2 * h + 1][c];
            pairs[0][h] = pack(a, b);
            pairs[1][h] = pack(a - low_of(pairs[0][h]), b - high_of(pairs[0][h]));
        }
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            multiply(upper, triangle, pairs[part][0], pairs[part][1]);
            multiply(lower, ones, pairs[part][0], pairs[part][1]);
            multiply(lower, triangle, pairs[part][2], pairs[part][3]);
        }
        sums[0][c] = upper[0], sums[0][c + 4] = upper[1], sums[1][c] = upper[2], sums[1][c + 4] = upper[3];
        sums[2][c] = lower[0], sums[2][c + 4] = lower[1], sums[3][c] = lower[2], sums[3][c + 4] = lower[3];
    }
}

// the sums in the middle of the chunk, and whether any is too far from it: steep, -inf or NaN
__device__ bool find_middle(float (&middle)[CHANNELS], const float (&sums)[ROWS][CHANNELS], int q) {
    bool is_steep = false;
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
        middle[c] = from_lane(sums[1][c], 28 + q);
#pragma unroll
        for (int m = 0; m < ROWS; ++m) is_steep |= !(fabsf(sums[m][c] - middle[c]) <= STEEPEST);
    }
    return is_steep;
}

// replaces NaN and -inf; the first token that has a NaN, or TOKENS
__device__ int clean(float (&gates)[8][4], int q) {
    int first_nan = TOKENS;
#pragma unroll
    for (int t = 0; t < 8; ++t)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            if (gates[t][c] != gates[t][c]) {
                first_nan = least(first_nan, token_of_gate(t, q));
                gates[t][c] = 0.0f;
            }
            gates[t][c] = gates[t][c] < LOWEST_GATE ? LOWEST_GATE : gates[t][c];
        }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int lane = threadIdx.x & 31;
        first_nan = least(first_nan, int(from_lane(float(first_nan), lane ^ step)));
    }
    return first_nan;
}

// ---------------------------------------------------------------- pairs of tokens
// tile (m, n) += rows of left of tile m @ rows of right of tile n, transposed
__device__ void multiply_rows(float (&sums)[4], const unsigned (&left)[ROWS][4], const unsigned (&right)[ROWS][4], int m,
                              int n) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        const unsigned a[4] = {left[2 * m][2 * k], left[2 * m + 1][2 * k], left[2 * m][2 * k + 1],
                               left[2 * m + 1][2 * k + 1]};
        multiply(sums, a, right[n][2 * k], right[n][2 * k + 1]);
    }
}

// values * factors, as bfloat16
__device__ void scale_rows(unsigned (&scaled)[ROWS][4], const unsigned (&values)[ROWS][4],
                           const float (&factors)[ROWS][CHANNELS]) {
#pragma unroll
    for (int m = 0; m < ROWS; ++m)
#pragma unroll
        for (int p = 0; p < 4; ++p)
            scaled[m][p] = pack(low_of(values[m][p]) * factors[m][2 * p], high_of(values[m][p]) * factors[m][2 * p + 1]);
}

// adds the products of all pairs in 32 channels, whose factors meet in the middle of the chunk
__device__ void add_flat_pairs(float (&overlaps)[TILES][4], float (&weighed)[TILES][4],
                               const unsigned (&later_query)[ROWS][4], const unsigned (&later_key)[ROWS][4],
                               const unsigned (&earlier_key)[ROWS][4]) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < 2 * m + 2; ++n) {
            multiply_rows(overlaps[tile(m, n)], later_key, earlier_key, m, n);
            multiply_rows(weighed[tile(m, n)], later_query, earlier_key, m, n);
        }
}

// the sum of gates between a token of a thread and the border of its halves at a level
__device__ float distance_of(const float (&sums)[ROWS][CHANNELS], int m, int c, int level, int lane) {
    const int token = (lane >> 2) + 8 * m, border = (token >> (level + 1) << (level + 1)) + (1 << level) - 1;
    // of the rows of a thread, which must be known to the compiler, that of the border: border / 8
    const float there = level < 3 ? sums[m][c] : level == 3 ? sums[m & ~1][c] : sums[1][c];
    const float distance = sums[m][c] - from_lane(there, (border & 7) * 4 + (lane & 3));
    return token > border ? distance : -distance;
}

// the same by levels, whatever the gates: the border between two halves lies between the tokens of a pair
__device__ void add_steep_pairs(float (&overlaps)[TILES][4], float (&weighed)[TILES][4], const unsigned (&query)[ROWS][4],
                                const unsigned (&key)[ROWS][4], const float (&sums)[ROWS][CHANNELS], int lane) {
    const int r = lane >> 2, q = lane & 3;
#pragma unroll 1
    for (int level = 0; level < 5; ++level) {
        float factors[ROWS][CHANNELS];
#pragma unroll
        for (int m = 0; m < ROWS; ++m)
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) factors[m][c] = power_of_two(distance_of(sums, m, c, level, lane));
        unsigned decayed_query[ROWS][4], decayed_key[ROWS][4];
        scale_rows(decayed_query, query, factors);
        scale_rows(decayed_key, key, factors);
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int n = 0; n < 2 * m + 2; ++n) {
                float of_keys[4] = {}, of_queries[4] = {};
                multiply_rows(of_keys, decayed_key, decayed_key, m, n);
                multiply_rows(of_queries, decayed_query, decayed_key, m, n);
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (meet(row_of(m, e, r), column_of(n, e, q), level)) {
                        overlaps[tile(m, n)][e] += of_keys[e];
                        weighed[tile(m, n)][e] += of_queries[e];
                    }
            }
    }
}

// ---------------------------------------------------------------- prepare
template <typename Out>
__device__ void store_rows(Out out, const Chunk& chunk, int width, int column, const uint4 (&values)[ROWS], int r) {
#pragma unroll
    for (int m = 0; m < ROWS; ++m) store16(out, (chunk.index * TOKENS + r + 8 * m) * width + column, values[m]);
}

// 32 x 32 with zeros above its lower triangle; the diagonal is given apart
template <typename Out>
__device__ void store_pairs(Out out, const Chunk& chunk, const float (&pairs)[TILES][4], const float (&own)[ROWS],
                            float scale, int lane) {
    const int r = lane >> 2, q = lane & 3;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float two[2];
#pragma unroll
                for (int side = 0; side < 2; ++side) {
                    const int i = row_of(m, 2 * half, r), j = column_of(n, side, q);
                    const float pair = n < 2 * m + 2 ? pairs[tile(m, n < 2 * m + 2 ? n : 0)][2 * half + side] : 0.0f;
                    two[side] = i == j ? own[2 * m + half] * scale : i > j ? pair * scale : 0.0f;
                }
                store4(out, (chunk.index * TOKENS + row_of(m, 2 * half, r)) * TOKENS + column_of(n, 0, q),
                       pack(two[0], two[1]));
            }
}

template <typename Out> __device__ void store_inverse(Out out, const Chunk& chunk, const Inverse& inverse, int lane) {
    const int r = lane >> 2, q = lane & 3;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int at = 2 * (n & 1) + half;
                const unsigned two = m == 0 ? (n < 2 ? inverse.first[at] : 0u) : n < 2 ? inverse.joining[at] : inverse.second[at];
                store4(out, (chunk.index * TOKENS + row_of(m, 2 * half, r)) * TOKENS + column_of(n, 0, q), two);
            }
}

// A bound on how much of a state is left after a chunk, as an exponent of 2. A token leaves of no channel more than its
// largest gate does, and I - beta*k*k^T makes nothing longer than |1 - beta*|k|^2| times, if that is more than 1.
struct Growth {
    unsigned slots;             // of a token's largest gates, which would be too many registers
    float length[ROWS] = {};    // of a token's key, squared
    __device__ void add_gates(const float (&gates)[8][4], bool is_first) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float most[4];
            const uint4 before = take16(slots + half * SLOT);
            const unsigned bits[4] = {before.x, before.y, before.z, before.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float (&of_token)[4] = gates[4 * half + i];
                most[i] = fmaxf(fmaxf(of_token[0], of_token[1]), fmaxf(of_token[2], of_token[3]));
                if (!is_first) most[i] = fmaxf(most[i], __int_as_float(bits[i]));
            }
            put16(slots + half * SLOT, as_bits(most[0], most[1], most[2], most[3]));
        }
    }
    __device__ float bound(const float (&strength)[ROWS], int lane) const {
        float sum = 0.0f, longer = 1.0f;
#pragma unroll
        for (int t = 0; t < 8; ++t) {
            float most = shared_float(slots + (t >> 2) * SLOT + 4 * (t & 3));
#pragma unroll
            for (int step = 4; step < 32; step *= 2) most = fmaxf(most, from_lane(most, lane ^ step));
            sum += most;
        }
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            const float stretch = fabsf(1.0f - strength[m] * sum_over_quads(length[m], lane));
            longer *= stretch <= 1.0f ? 1.0f : stretch;
        }
        float stretched = log2f(longer);
#pragma unroll
        for (int step = 4; step < 32; step *= 2) stretched += from_lane(stretched, lane ^ step);
        sum = sum_over_quads(sum, lane) + stretched;
        return sum == sum ? sum : INFINITE;
    }
};

// 32 channels of a chunk: their part in its pairs, its queries and keys, its weights before they are solved, and what a
// bound on its growth needs of them
template <typename Out, typename Decay>
__device__ int prepare_channels(float (&overlaps)[TILES][4], float (&weighed)[TILES][4], float (&own)[ROWS],
                                Growth& growth, unsigned slots, unsigned to_solve, Out queries, Out keys, Decay decay,
                                const Chunk& chunk, int group, const float (&strength)[ROWS], float scale, int lane) {
    const int r = lane >> 2, quad = lane & 3, column = GROUP * group + CHANNELS * quad;
    float gates[8][4], sums[ROWS][CHANNELS];
    unsigned query[ROWS][4], key[ROWS][4];
    take_rows(query, slots);
    take_rows(key, slots + 4 * SLOT);
    take_gates(gates, slots + 8 * SLOT);
    growth.add_gates(gates, group == 0);
    sum_gates(sums, gates, r, quad);
    float middle[CHANNELS];
    const bool is_steep = any_lane(find_middle(middle, sums, quad));
    int first_nan = TOKENS;
    if (is_steep) {
        first_nan = clean(gates, quad);
        sum_gates(sums, gates, r, quad);
        add_steep_pairs(overlaps, weighed, query, key, sums, lane);
    }
    // of each channel: where factors begin and end to decay, and what is missing to the chunk's start and end
    float since[CHANNELS], until[CHANNELS], from_start[CHANNELS], to_end[CHANNELS];
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
        const float end = from_lane(sums[3][c], 28 + quad);
        since[c] = is_steep ? 0.0f : middle[c];
        until[c] = is_steep ? end : middle[c];
        from_start[c] = power_of_two(since[c]);
        to_end[c] = power_of_two(end - until[c]);
    }
    unsigned later_query[ROWS][4], later_key[ROWS][4], earlier_key[ROWS][4];
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
        unsigned of_query[4], of_key[4], of_weight[4];
        float whole[CHANNELS];
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const int c = 2 * p, d = c + 1;
            const float q0 = low_of(query[m][p]), q1 = high_of(query[m][p]);
            const float k0 = low_of(key[m][p]), k1 = high_of(key[m][p]);
            const float rise0 = power_of_two(sums[m][c] - since[c]), rise1 = power_of_two(sums[m][d] - since[d]);
            const float fall0 = power_of_two(until[c] - sums[m][c]), fall1 = power_of_two(until[d] - sums[m][d]);
            own[m] += q0 * k0 + q1 * k1;
            growth.length[m] += k0 * k0 + k1 * k1;
            later_query[m][p] = pack(q0 * rise0, q1 * rise1);
            later_key[m][p] = pack(k0 * rise0, k1 * rise1);
            earlier_key[m][p] = pack(k0 * fall0, k1 * fall1);
            whole[c] = rise0 * from_start[c], whole[d] = rise1 * from_start[d];
            of_query[p] = pack(q0 * whole[c] * scale, q1 * whole[d] * scale);
            of_key[p] = pack(k0 * fall0 * to_end[c], k1 * fall1 * to_end[d]);
            of_weight[p] = pack(k0 * whole[c] * strength[m], k1 * whole[d] * strength[m]);
        }
        const long long at = (chunk.index * TOKENS + r + 8 * m) * WIDTH + column;
        store16(queries, at, uint4{of_query[0], of_query[1], of_query[2], of_query[3]});
        store16(keys, at, uint4{of_key[0], of_key[1], of_key[2], of_key[3]});
        put16(to_solve + m * SLOT, uint4{of_weight[0], of_weight[1], of_weight[2], of_weight[3]});
        if (m == 3 && r == 7) {
            store16(decay, chunk.index * WIDTH + column, as_bits(whole[0], whole[1], whole[2], whole[3]));
            store16(decay, chunk.index * WIDTH + column + 4, as_bits(whole[4], whole[5], whole[6], whole[7]));
        }
    }
    if (!is_steep) add_flat_pairs(overlaps, weighed, later_query, later_key, earlier_key);
    return first_nan;
}

// a NaN gate: the queries are NaN from its token on, and the decay of the whole chunk
template <typename Out, typename Decay>
__device__ void spread_nan(Out queries, Decay decay, const Chunk& chunk, int first_nan, int lane) {
    const int r = lane >> 2, quad = lane & 3;
    const unsigned nan = 0x7fff7fffu, wide_nan = 0x7fffffffu;
    for (int column = CHANNELS * quad; column < WIDTH; column += GROUP) {
#pragma unroll
        for (int m = 0; m < ROWS; ++m)
            if (r + 8 * m >= first_nan)
                store16(queries, (chunk.index * TOKENS + r + 8 * m) * WIDTH + column, uint4{nan, nan, nan, nan});
        if (r == 7) {
            store16(decay, chunk.index * WIDTH + column, uint4{wide_nan, wide_nan, wide_nan, wide_nan});
            store16(decay, chunk.index * WIDTH + column + 4, uint4{wide_nan, wide_nan, wide_nan, wide_nan});
        }
    }
}

extern "C" __global__ void kda_prepare(
    const bfloat16* q, const bfloat16* k, const bfloat16* v, const float* g, const float* beta, const long long* bounds,
    bfloat16* weights, bfloat16* values, bfloat16* queries, bfloat16* keys, bfloat16* scores, bfloat16* inverse_out,
    float* decay, float* growth, float scale, int length, int chunks_per_sequence, int heads, int width_v) {
    const int lane = threadIdx.x, r = lane >> 2, quad = lane & 3, groups = WIDTH / GROUP;
    const Chunk chunk = chunk_of(bounds, length, chunks_per_sequence, heads);
    const unsigned own_slots = start_of_shared() + 16 * lane, to_solve = own_slots + 2 * STAGE_SLOTS * SLOT;
    const auto stage_of = [&](int i) { return own_slots + i % 2 * STAGE_SLOTS * SLOT; };
    // one group of channels after the other, then values by four groups
    const auto fetch = [&](int i) {
        const int column = GROUP * i + CHANNELS * quad;
        if (i < groups) {
            fetch_rows(stage_of(i), q, chunk, WIDTH, column, r);
            fetch_rows(stage_of(i) + 4 * SLOT, k, chunk, WIDTH, column, r);
            fetch_gates(stage_of(i) + 8 * SLOT, g, chunk, WIDTH, GROUP * i + 4 * r, quad);
        } else {
            const int first = 4 * (i - groups), end = least(first + 4, width_v / GROUP);
            for (int group = first; group < end; ++group)
                fetch_rows(stage_of(i) + (group - first) * ROWS * SLOT, v, chunk, width_v, GROUP * group + CHANNELS * quad, r);
        }
        end_copies();
    };
    fetch(0);
    fetch(1);
    float strength[ROWS], own[ROWS] = {};
    Growth growing = {to_solve + groups * ROWS * SLOT};
#pragma unroll
    for (int m = 0; m < ROWS; ++m) strength[m] = chunk.has(r + 8 * m) ? beta[chunk.row(r + 8 * m)] : 0.0f;
    float overlaps[TILES][4] = {}, weighed[TILES][4] = {};
    int first_nan = TOKENS;
#pragma unroll 1
    for (int group = 0; group < groups; ++group) {
        await_copies<1>();
        first_nan = least(first_nan, prepare_channels(overlaps, weighed, own, growing, stage_of(group),
                                                      to_solve + group * ROWS * SLOT, queries, keys, decay, chunk, group,
                                                      strength, scale, lane));
        fetch(group + 2);
    }
#pragma unroll
    for (int m = 0; m < ROWS; ++m) own[m] = sum_over_quads(own[m], lane);
    store_pairs(scores, chunk, weighed, own, scale, lane);
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < 2 * m + 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                overlaps[tile(m, n)][e] = row_of(m, e, r) > column_of(n, e, quad)
                                              ? overlaps[tile(m, n)][e] * strength[2 * m + (e >> 1)]
                                              : 0.0f;
    const Inverse inverse = inverse_of(overlaps, lane);
    if (is_there(inverse_out)) store_inverse(inverse_out, chunk, inverse, lane);
    unsigned rows[ROWS][4];
    uint4 solved[ROWS];
    float nothing = 0.0f;  // or NaN
#pragma unroll 1
    for (int group = 0; group < groups; ++group) {
        take_rows(rows, to_solve + group * ROWS * SLOT);
        solve(inverse, rows, solved);
        store_rows(weights, chunk, WIDTH, GROUP * group + CHANNELS * quad, solved, r);
    }
#pragma unroll 1
    for (int group = 0; group * GROUP < width_v; ++group) {
        if (group % 4 == 0) {
            if (group >= 4) fetch(groups + group / 4 + 1);
            await_copies<1>();
        }
        take_rows(rows, stage_of(groups + group / 4) + group % 4 * ROWS * SLOT);
#pragma unroll
        for (int m = 0; m < ROWS; ++m)
#pragma unroll
            for (int p = 0; p < 4; ++p) {
                const float low = low_of(rows[m][p]) * strength[m], high = high_of(rows[m][p]) * strength[m];
                rows[m][p] = pack(low, high);
                nothing += low * 0.0f + high * 0.0f;
            }
        solve(inverse, rows, solved);
        store_rows(values, chunk, width_v, GROUP * group + CHANNELS * quad, solved, r);
    }
    if (is_there(growth)) {
        const float bound = growing.bound(strength, lane);
        const bool is_odd = any_lane(first_nan < TOKENS || nothing != nothing);
        if (lane == 0) growth[chunk.index] = is_odd ? INFINITE : bound;
    }
    if (first_nan < TOKENS) spread_nan(queries, decay, chunk, first_nan, lane);
}

// ---------------------------------------------------------------- from chunk to chunk
// A warp walks with 16 values of the state, all channels of them in registers: a sum of products is at once an operand of
// the next product, so warps meet only where the next chunk arrives in shared memory.
//
// A sequence is cut into segments, which blocks walk at once. Where the chunks before a segment leave next to nothing of
// an earlier state, its block walks through them first; elsewhere it awaits the state from the block before.
#define STAGES 3
#define FORGOTTEN -40.0f  // as an exponent of 2: float32 has 24 digits
#define VALUES (16 * WARPS)  // of a block

// of a chunk in shared memory; TURNED are its values, or the gradients of its outputs
struct Stage {
    static const int WEIGHTS = 0, QUERIES = TOKENS * WIDTH * 2, KEYS = 2 * QUERIES, TURNED = 3 * QUERIES;
    static const int SCORES = TURNED + TOKENS * VALUES * 2, DECAY = SCORES + TOKENS * TOKENS * 2;
    static const int BYTES = DECAY + WIDTH * 4;
};

// where 16 bytes of a row lie in shared memory: such that eight rows can be read at once
template <int PARTS> __device__ unsigned at_part(int row, int part) {
    return (row * PARTS + (part ^ (PARTS >= 8 ? row & 7 : row >> 1 & 3))) * 16;
}

// 32 rows of PARTS * 16 bytes, zeros behind the last. A thread copies one part of every so-manieth row, and every eighth
// part if there are more
template <int PARTS, typename Tensor>
__device__ void copy_rows(unsigned to, Tensor from, long long at, long long row_width, int num_rows = TOKENS) {
    const int beside = PARTS < 8 ? PARTS : 8, rows = WARPS * 32 / beside;
    const int row = threadIdx.x / beside, part = threadIdx.x % beside;
    to += at_part<PARTS>(row, part);
    at += row * row_width + part * 8;
#pragma unroll
    for (int i = 0; i < TOKENS / rows; ++i)
#pragma unroll
        for (int j = 0; j < PARTS / beside; ++j)
            copy16(to + i * rows * PARTS * 16 + j * 128, from, at + i * rows * row_width + j * 64,
                   row + i * rows < num_rows);
}
template <typename In> __device__ void copy_keys(unsigned to, In from, long long chunk) {
    copy_rows<WIDTH / 8>(to, from, chunk * (TOKENS * WIDTH), WIDTH);
}
template <typename Decay> __device__ void copy_decay(unsigned stage, Decay decay, long long chunk) {
    if (threadIdx.x < WIDTH / 4)
        copy16(stage + Stage::DECAY + 16 * threadIdx.x, decay, chunk * WIDTH + 4 * threadIdx.x);
}

// the way of a warp: 16 values of one sequence and head, through a segment of its chunks, or so many joined
template <typename Bounds> struct Way {
    Bounds bounds;
    int length, heads, width_v, num_chunks, segment, joined, first, end, lane, r, q, value;
    long long sequence, head, begin;

    __device__ Way(Bounds bounds, Bounds first_chunk, int length, int chunks_per_sequence, int heads, int width_v,
                   int segment, int num_segments, int joined = 1)
        : bounds(bounds), length(length), heads(heads), width_v(width_v), segment(segment), joined(joined) {
        lane = threadIdx.x & 31, r = lane >> 2, q = lane & 3;
        value = blockIdx.y * VALUES + 16 * (threadIdx.x >> 5);
        sequence = blockIdx.x / heads, head = blockIdx.x % heads;
        begin = length == 0 ? first_chunk[sequence] : sequence * chunks_per_sequence;
        num_chunks = length == 0 ? int(first_chunk[sequence + 1] - begin) : chunks_per_sequence;
        const int num_parts = num_segments * joined, per_segment = (num_chunks + num_parts - 1) / num_parts * joined;
        first = least(segment * per_segment, num_chunks), end = least(first + per_segment, num_chunks);
    }
    __device__ bool is_first() const { return segment == 0; }
    __device__ bool is_last() const { return end == num_chunks; }
    __device__ bool is_empty() const { return first == end && segment > 0; }
    __device__ long long chunk(int step) const { return (begin + step) * heads + head; }
    // a chunk's first token, and how many it has
    __device__ long long first_token(int step, int& num_tokens) const {
        long long first = sequence * length + (long long)step * TOKENS, end = (sequence + 1) * length;
        if (length == 0) first = bounds[2 * (begin + step)], end = bounds[2 * (begin + step) + 1];
        num_tokens = end - first < TOKENS ? int(end - first) : TOKENS;
        return first;
    }
    // whether all chunks from one on, before it or behind, leave numbers
    template <typename Floats> __device__ bool is_finite(Floats growth, int from, int direction) const {
        bool is_odd = false;
        for (int i = lane; i < (direction < 0 ? from + 1 : num_chunks - from); i += 32)
            is_odd |= growth[chunk(from + direction * i)] == INFINITE;
        return !any_lane(is_odd);
    }
    // how many chunks from one on leave next to nothing of a state; 0 where a segment's do not, or one leaves NaN
    template <typename Floats> __device__ int num_to_forget(Floats growth, int from, int direction) const {
        const int most = least(end - first, direction < 0 ? from + 1 : num_chunks - from);
        float before = 0.0f;
        for (int done = 0; done < most; done += 32) {
            const bool exists = done + lane < most;
            float sum = exists ? growth[chunk(from + direction * (done + lane))] : INFINITE;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const float earlier = from_lane(sum, lane - step & 31);
                sum += lane < step ? 0.0f : earlier;
            }
            int found = sum + before <= FORGOTTEN ? lane : 32;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) found = least(found, int(from_lane(float(found), lane ^ step)));
            if (found < 32) return is_finite(growth, from, direction) ? done + found + 1 : 0;
            before += from_lane(sum, 31);
        }
        return 0;
    }
    // of the state between a segment and the next
    __device__ long long number_of(int segment) const { return (long long)segment * gridDim.x + blockIdx.x; }
    __device__ long long flag_of(int segment) const { return number_of(segment) * gridDim.y + blockIdx.y; }
    // of the thread's first element in a state, and of one of its elements from there
    __device__ long long state_at(long long number) const { return number * WIDTH * width_v + value + r; }
    __device__ long long element_at(int n, int e) const { return (long long)column_of(n, e, q) * width_v + 8 * (e >> 1); }
};

template <typename Walk, typename In>
__device__ void take_state(float (&state)[WIDTH / 8][4], const Walk& way, In from, long long number) {
#pragma unroll
    for (int n = 0; n < WIDTH / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) state[n][e] = from[way.state_at(number) + way.element_at(n, e)];
}
template <typename Walk, typename Out>
__device__ void give_state(Out to, const Walk& way, long long number, const float (&state)[WIDTH / 8][4]) {
#pragma unroll
    for (int n = 0; n < WIDTH / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) to[way.state_at(number) + way.element_at(n, e)] = state[n][e];
}
// how many chunks a block walks through before its segment, which begins at from; state holds zeros
template <typename Walk, typename Floats, typename States, typename Flags>
__device__ int find_state(float (&state)[WIDTH / 8][4], const Walk& way, Floats growth, States states, Flags ready, int from,
                          int direction) {
    const int num_before = way.num_to_forget(growth, from + direction, direction);
    if (num_before == 0) {
        const int border = direction < 0 ? way.segment - 1 : way.segment;
        await_published(ready, way.flag_of(border));
        take_state(state, way, states, way.number_of(border));
    }
    return num_before;
}

// from chunk to chunk, with copies ahead of it
template <typename Copy, typename Step>
__device__ void walk(int from, int num_chunks, int direction, Copy copy, Step step) {
    const auto stage_of = [](int i) { return start_of_shared() + i % STAGES * Stage::BYTES; };
#pragma unroll
    for (int ahead = 0; ahead < STAGES - 1; ++ahead) {
        if (ahead < num_chunks) copy(stage_of(ahead), from + direction * ahead);
        end_copies();
    }
#pragma unroll 1
    for (int i = 0; i < num_chunks; ++i) {
        await_copies<STAGES - 2>();
        __syncthreads();
        const int ahead = i + STAGES - 1;
        if (ahead < num_chunks) copy(stage_of(ahead), from + direction * ahead);
        end_copies();
        step(stage_of(i), from + direction * i);
    }
}

template <int N> __device__ void as_operands(unsigned (&operands)[N / 2][4], const float (&sums)[N][4]) {
#pragma unroll
    for (int k = 0; k < N / 2; ++k) {
        operands[k][0] = pack(sums[2 * k][0], sums[2 * k][1]);
        operands[k][1] = pack(sums[2 * k][2], sums[2 * k][3]);
        operands[k][2] = pack(sums[2 * k + 1][0], sums[2 * k + 1][1]);
        operands[k][3] = pack(sums[2 * k + 1][2], sums[2 * k + 1][3]);
    }
}

// sums[values, tokens] += operand[values, channels] @ rows[tokens, channels]^T
__device__ void multiply_by_rows(float (&sums)[4][4], const unsigned (&operand)[WIDTH / 16][4], unsigned rows, int lane) {
    const unsigned at = rows + at_part<WIDTH / 8>(lane & 7, lane >> 3);
#pragma unroll
    for (int k = 0; k < WIDTH / 32; ++k)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            unsigned b[4];
            load_matrices(b, (at ^ 64 * k) + 16 * WIDTH * n);  // stages begin at multiples of 256, so part 4*k is a bit
            multiply(sums[n], operand[2 * k], b[0], b[1]);
            multiply(sums[n], operand[2 * k + 1], b[2], b[3]);
        }
}
// state[values, channels] += operand[values, tokens] @ rows[tokens, channels]
__device__ void multiply_by_columns(float (&state)[WIDTH / 8][4], const unsigned (&operand)[2][4], unsigned rows, int lane) {
    const unsigned at = rows + at_part<WIDTH / 8>(lane, 0);
#pragma unroll
    for (int n = 0; n < WIDTH / 8; ++n) {
        unsigned b[4];
        load_transposed(b, at ^ 16 * n);
        multiply(state[n], operand[0], b[0], b[1]);
        multiply(state[n], operand[1], b[2], b[3]);
    }
}
__device__ void decay_state(float (&state)[WIDTH / 8][4], unsigned stage, int q) {
#pragma unroll
    for (int n = 0; n < WIDTH / 8; ++n)
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            const float kept = shared_float(stage + Stage::DECAY + 4 * column_of(n, side, q));
            state[n][side] *= kept, state[n][2 + side] *= kept;
        }
}

// V' = values - state @ weights^T, as an operand and as a product leaves it
__device__ void find_new(unsigned (&fresh)[2][4], float (&sums)[4][4], const unsigned (&operand)[WIDTH / 16][4],
                         unsigned stage, int lane) {
    float known[4][4] = {};
    multiply_by_rows(known, operand, stage + Stage::WEIGHTS, lane);
    const int part = 2 * (threadIdx.x >> 5);
    unsigned upper[4], lower[4];
    load_transposed(upper, stage + Stage::TURNED + at_part<VALUES / 8>(lane, part));
    load_transposed(lower, stage + Stage::TURNED + at_part<VALUES / 8>(lane, part + 1));
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        sums[n][0] = low_of(upper[n]) - known[n][0], sums[n][1] = high_of(upper[n]) - known[n][1];
        sums[n][2] = low_of(lower[n]) - known[n][2], sums[n][3] = high_of(lower[n]) - known[n][3];
    }
    as_operands<4>(fresh, sums);
}

// sums[values, tokens], turned: rows of tokens
template <typename Out>
__device__ void store_turned(Out out, long long at, long long row_width, int num_tokens, const float (&sums)[4][4],
                             int lane) {
    const int r = lane >> 2;
    at += r * row_width + 2 * (lane & 3);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        const unsigned upper = transposed(pack(sums[n][0], sums[n][1])), lower = transposed(pack(sums[n][2], sums[n][3]));
        if (8 * n + r < num_tokens) {
            store4(out, at + 8 * n * row_width, upper);
            store4(out, at + 8 * n * row_width + 8, lower);
        }
    }
}

extern "C" __global__ void kda_scan(
    const bfloat16* weights, const bfloat16* values, const bfloat16* queries, const bfloat16* keys, const bfloat16* scores,
    const float* decay, const float* growth, const float* initial, float* final, float* ends, int* ready, bfloat16* out,
    const long long* bounds, const long long* first_chunk, int length, int chunks_per_sequence, int heads, int width_v) {
    const Way<decltype(bounds)> way(bounds, first_chunk, length, chunks_per_sequence, heads, width_v, blockIdx.z, gridDim.z);
    if (way.is_empty()) return;
    const int lane = way.lane;
    float state[WIDTH / 8][4] = {};
    int num_before = 0;
    if (!way.is_first())
        num_before = find_state(state, way, growth, ends, ready, way.first, -1);
    else if (is_there(initial))
        take_state(state, way, initial, blockIdx.x);
    const auto copy = [&](unsigned stage, int step) {
        const long long chunk = way.chunk(step);
        copy_keys(stage + Stage::WEIGHTS, weights, chunk);
        copy_keys(stage + Stage::KEYS, keys, chunk);
        copy_rows<VALUES / 8>(stage + Stage::TURNED, values, chunk * TOKENS * width_v + blockIdx.y * VALUES, width_v);
        copy_decay(stage, decay, chunk);
        if (step < way.first) return;
        copy_keys(stage + Stage::QUERIES, queries, chunk);
        copy_rows<TOKENS / 8>(stage + Stage::SCORES, scores, chunk * (TOKENS * TOKENS), TOKENS);
    };
    walk(way.first - num_before, way.end - way.first + num_before, 1, copy, [&](unsigned stage, int step) {
        unsigned operand[WIDTH / 16][4], fresh[2][4];
        as_operands<WIDTH / 8>(operand, state);
        float sums[4][4], answer[4][4] = {};
        find_new(fresh, sums, operand, stage, lane);
        decay_state(state, stage, way.q);
        multiply_by_columns(state, fresh, stage + Stage::KEYS, lane);
        if (step < way.first) return;
        multiply_by_rows(answer, operand, stage + Stage::QUERIES, lane);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            unsigned b[4];
            load_matrices(b, stage + Stage::SCORES + at_part<TOKENS / 8>(lane & 7, lane >> 3) + 512 * n);
            multiply(answer[n], fresh[0], b[0], b[1]);
            multiply(answer[n], fresh[1], b[2], b[3]);
        }
        int num_tokens;
        const long long first = way.first_token(step, num_tokens);
        store_turned(out, (first * heads + way.head) * width_v + way.value, (long long)heads * width_v, num_tokens, answer,
                     lane);
    });
    if (way.is_last()) {
        give_state(final, way, blockIdx.x, state);
    } else {
        give_state(ends, way, way.number_of(way.segment), state);
        publish(ready, way.flag_of(way.segment));
    }
}

// ---------------------------------------------------------------- there and back, for a backward pass
// 16 values of a state, by way of shared memory that only this warp uses
template <typename Out>
__device__ void keep_state(Out states, long long at, const unsigned (&operand)[WIDTH / 16][4], int lane) {
    const unsigned mine = start_of_shared() + STAGES * Stage::BYTES + (threadIdx.x >> 5) * (16 * WIDTH * 2);
#pragma unroll
    for (int k = 0; k < WIDTH / 16; ++k)
        store_matrices(mine + at_part<WIDTH / 8>(lane & 15, 2 * k + (lane >> 4)), operand[k]);
    await_warp();
    const int parts = WIDTH / 8, rows = 32 / parts;
#pragma unroll
    for (int i = 0; i < 16 / rows; ++i) {
        const int row = i * rows + lane / parts, part = lane % parts;
        store16(states, at + row * WIDTH + part * 8, take16(mine + at_part<parts>(row, part)));
    }
    await_warp();
}

// forward through the chunks: each one's first state, and V' in the place of its values
template <typename Walk, typename In, typename Floats, typename Out>
__device__ void go_there(const Walk& way, In weights, Out values, In keys, Floats decay, Floats initial, Floats ends,
                         Out states) {
    const int lane = way.lane, width_v = way.width_v;
    float state[WIDTH / 8][4] = {};
    if (!way.is_first())
        take_state(state, way, ends, way.number_of(way.segment * way.joined - 1));
    else if (is_there(initial))
        take_state(state, way, initial, blockIdx.x);
    const auto copy = [&](unsigned stage, int step) {
        const long long chunk = way.chunk(step);
        copy_keys(stage + Stage::WEIGHTS, weights, chunk);
        copy_keys(stage + Stage::KEYS, keys, chunk);
        copy_rows<VALUES / 8>(stage + Stage::TURNED, values, chunk * TOKENS * width_v + blockIdx.y * VALUES, width_v);
        copy_decay(stage, decay, chunk);
    };
    walk(way.first, way.end - way.first, 1, copy, [&](unsigned stage, int step) {
        const long long chunk = way.chunk(step);
        unsigned operand[WIDTH / 16][4], fresh[2][4];
        float sums[4][4];
        as_operands<WIDTH / 8>(operand, state);
        keep_state(states, (chunk * width_v + way.value) * WIDTH, operand, lane);
        find_new(fresh, sums, operand, stage, lane);
        decay_state(state, stage, way.q);
        multiply_by_columns(state, fresh, stage + Stage::KEYS, lane);
        store_turned(values, chunk * TOKENS * width_v + way.value, width_v, TOKENS, sums, lane);
    });
}

// backward through the chunks: the gradient of each one's last state, and of its V'
template <typename Walk, typename In, typename Floats, typename Wide, typename Flags, typename Out>
__device__ void go_back(const Walk& way, In weights, In queries, In keys, In scores, Floats decay, Floats growth, In grad_out,
                        Floats grad_final, Wide grad_initial, Wide grad_ends, Flags ready, Out grad_values, Out grad_states) {
    const int lane = way.lane, width_v = way.width_v;
    float grad[WIDTH / 8][4] = {};
    int num_before = 0;
    if (!way.is_last())
        num_before = find_state(grad, way, growth, grad_ends, ready, way.end - 1, 1);
    else if (is_there(grad_final))
        take_state(grad, way, grad_final, blockIdx.x);
    const auto copy = [&](unsigned stage, int step) {
        const long long chunk = way.chunk(step);
        int num_tokens;
        const long long first = way.first_token(step, num_tokens);
        copy_keys(stage + Stage::WEIGHTS, weights, chunk);
        copy_keys(stage + Stage::QUERIES, queries, chunk);
        copy_keys(stage + Stage::KEYS, keys, chunk);
        copy_rows<VALUES / 8>(stage + Stage::TURNED, grad_out,
                              (first * way.heads + way.head) * width_v + blockIdx.y * VALUES,
                              (long long)way.heads * width_v, num_tokens);
        copy_rows<TOKENS / 8>(stage + Stage::SCORES, scores, chunk * (TOKENS * TOKENS), TOKENS);
        copy_decay(stage, decay, chunk);
    };
    walk(way.end - 1 + num_before, way.end - way.first + num_before, -1, copy, [&](unsigned stage, int step) {
        const long long chunk = way.chunk(step);
        unsigned operand[WIDTH / 16][4], of_out[2][4], of_values[2][4];
        float sums[4][4] = {};
        as_operands<WIDTH / 8>(operand, grad);
        if (step < way.end) keep_state(grad_states, (chunk * width_v + way.value) * WIDTH, operand, lane);
#pragma unroll
        for (int k = 0; k < 2; ++k)
            load_transposed(of_out[k], stage + Stage::TURNED +
                                           at_part<VALUES / 8>(16 * k + 8 * (lane >> 4) + (lane & 7),
                                                               2 * (threadIdx.x >> 5) + (lane >> 3 & 1)));
        multiply_by_rows(sums, operand, stage + Stage::KEYS, lane);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            unsigned b[4];
            load_transposed(b, stage + Stage::SCORES + at_part<TOKENS / 8>(lane, n));
            multiply(sums[n], of_out[0], b[0], b[1]);
            multiply(sums[n], of_out[1], b[2], b[3]);
        }
        if (step < way.end)
            store_turned(grad_values, chunk * TOKENS * width_v + way.value, width_v, TOKENS, sums, lane);
        as_operands<4>(of_values, sums);
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
            for (int e = 0; e < 4; ++e) of_values[k][e] ^= 0x80008000u;  // what comes of them is subtracted
        decay_state(grad, stage, way.q);
        multiply_by_columns(grad, of_values, stage + Stage::WEIGHTS, lane);
        multiply_by_columns(grad, of_out, stage + Stage::QUERIES, lane);
    });
    if (!way.is_first()) {
        give_state(grad_ends, way, way.number_of(way.segment - 1), grad);
        publish(ready, way.flag_of(way.segment - 1));
    } else if (is_there(grad_initial)) {
        give_state(grad_initial, way, blockIdx.x, grad);
    }
}

// half of the blocks go there and the others back: neither needs what the other finds
extern "C" __global__ void kda_there_and_back(
    const bfloat16* weights, bfloat16* values, const bfloat16* queries, const bfloat16* keys, const bfloat16* scores,
    const float* decay, const float* growth, const float* initial, const float* ends, bfloat16* states,
    const bfloat16* grad_out, const float* grad_final, float* grad_initial, float* grad_ends, int* ready,
    bfloat16* grad_values, bfloat16* grad_states, const long long* bounds, const long long* first_chunk, int joined,
    int length, int chunks_per_sequence, int heads, int width_v) {
    const int num_segments = gridDim.z / 2, nth = blockIdx.z / 2;
    const bool goes_there = blockIdx.z % 2 == 1;
    const Way<decltype(bounds)> way(bounds, first_chunk, length, chunks_per_sequence, heads, width_v,
                                    goes_there ? nth : num_segments - 1 - nth, num_segments, joined);
    if (way.is_empty()) return;
    if (goes_there)
        go_there(way, weights, values, keys, decay, initial, ends, states);
    else
        go_back(way, weights, queries, keys, scores, decay, growth, grad_out, grad_final, grad_initial, grad_ends, ready,
                grad_values, grad_states);
}

// ---------------------------------------------------------------- gradients inside a chunk
// A block takes a chunk of a head, and a warp 32 channels of it. All warps read the gradients of outputs, V' and the
// gradients of values in slots of the block; a warp's own states come through a ring of stages, then its queries, keys and
// gates. First each warp takes its share of the values, then of the pairs, for all of them.
//
// A sum of gates from a chunk's start to token t appears in the loss by way of what t takes from the first state, what it
// adds to the last, and its pairs. Z_t is the derivative by that sum. The gradient of a gate is the sum of Z over its own
// and all later tokens, and what the last state gives to all of them. A pair's two terms cancel in the sums before it, so
// both are products of the same rounded factors.
#define RING 4
#define RING_STAGE (8 * SLOT)
#define PAIR_BYTES (TOKENS * TOKENS * 2)
// what the slots of a block hold; WRITTEN are the gradients of V', then of what was written into the state
enum { OUTPUTS, NEW_VALUES, WRITTEN, OLD_VALUES, MATRICES };

// rows 8*q.. of 32 values of a state, and 4 channels from 4*r on: operands of a product that sums over values
struct StateRows {
    uint2 rows[8];
    __device__ void take(unsigned slots) {
#pragma unroll
        for (int t = 0; t < 8; ++t) rows[t] = take8(slots + t * (SLOT / 2));
    }
    __device__ unsigned word(int t, int channel) const { return channel < 2 ? rows[t].x : rows[t].y; }
    __device__ float value(int t, int channel) const {
        return channel & 1 ? high_of(word(t, channel)) : low_of(word(t, channel));
    }
    // of rows t and t + 1
    __device__ unsigned pair(int t, int channel) const {
        const unsigned a = word(t, channel), b = word(t + 1, channel);
        return channel & 1 ? a >> 16 | (b & 0xffff0000u) : (a & 0xffffu) | b << 16;
    }
};

// the inverse of a chunk's triangular system, transposed: rows 0 to 15 by their first and second 16 columns, and the rest
struct TurnedInverse {
    unsigned first[4], joining[4], second[4];
    __device__ TurnedInverse(unsigned matrix, int lane) {
        const int row = (lane & 7) + 8 * (lane >> 4), part = lane >> 3 & 1;
        load_transposed(first, matrix + at_part<TOKENS / 8>(row, part));
        load_transposed(joining, matrix + at_part<TOKENS / 8>(16 + row, part));
        load_transposed(second, matrix + at_part<TOKENS / 8>(16 + row, 2 + part));
    }
    // for two values of a thread and all its rows
    __device__ void solve(float (&upper)[4], float (&lower)[4], const unsigned (&rows)[ROWS][4], int p) const {
        unsigned turned[ROWS];
#pragma unroll
        for (int m = 0; m < ROWS; ++m) turned[m] = transposed(rows[m][p]);
        multiply(upper, first, turned[0], turned[1]);
        multiply(upper, joining, turned[2], turned[3]);
        multiply(lower, second, turned[2], turned[3]);
    }
};

// what a thread has of 32 tokens and 32 channels, as products leave it
struct Sums {
    float tiles[2][4][4] = {};
    __device__ float& at(int m, int c) { return tiles[m >> 1][c & 3][2 * (m & 1) + (c >> 2)]; }
    // += rows[tokens, values] @ state[values, channels]
    __device__ void add_product(unsigned slots, const StateRows& state) {
        unsigned rows[ROWS][4];
        take_rows(rows, slots);
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const unsigned a[4] = {rows[2 * m][2 * k], rows[2 * m + 1][2 * k], rows[2 * m][2 * k + 1],
                                       rows[2 * m + 1][2 * k + 1]};
#pragma unroll
                for (int n = 0; n < 4; ++n) multiply(tiles[m][n], a, state.pair(4 * k, n), state.pair(4 * k + 2, n));
            }
    }
};

// a 32 x 32 matrix of pairs in shared memory, of which the pairs of some levels count
struct Levels {
    unsigned corner, turned_corner;  // of 8 x 8 on the diagonal, which pairs a thread keeps
    bool joins_eights, joins_halves;

    __device__ Levels(int first, int end, int lane) {
        const int r = lane >> 2, q = lane & 3;
        corner = turned_corner = 0u;
        for (int level = first; level < least(end, 3); ++level)
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                const unsigned half = side ? 0xffff0000u : 0xffffu;
                if (meet(r, 2 * q + side, level)) corner |= half;
                if (meet(2 * q + side, r, level)) turned_corner |= half;
            }
        joins_eights = first <= 3 && 3 < end, joins_halves = end > 4;
    }
    // sums[tokens, 8 channels] += matrix @ rows; columns of rows are given as operands, eight tokens each
    __device__ void multiply_by(float (&upper)[4], float (&lower)[4], unsigned matrix, const unsigned (&rows)[ROWS],
                                int lane) const {
        const unsigned at = matrix + at_part<TOKENS / 8>(lane & 15, lane >> 4);
        const unsigned below = matrix + at_part<TOKENS / 8>(16 + (lane & 15), lane >> 4);
        const unsigned last = matrix + at_part<TOKENS / 8>(16 + (lane & 15), 2 + (lane >> 4));
        unsigned a[4];
        load_matrices(a, at);
        keep(a);
        multiply(upper, a, rows[0], rows[1]);
        load_matrices(a, last);
        keep(a);
        multiply(lower, a, rows[2], rows[3]);
        if (!joins_halves) return;
        load_matrices(a, below);
        multiply(lower, a, rows[0], rows[1]);
    }
    // the same with the matrix transposed
    __device__ void multiply_turned(float (&upper)[4], float (&lower)[4], unsigned matrix, const unsigned (&rows)[ROWS],
                                    int lane) const {
        const int row = (lane & 7) + 8 * (lane >> 4), part = lane >> 3 & 1;
        unsigned a[4];
        load_transposed(a, matrix + at_part<TOKENS / 8>(row, part));
        keep_turned(a);
        multiply(upper, a, rows[0], rows[1]);
        load_transposed(a, matrix + at_part<TOKENS / 8>(16 + row, 2 + part));
        keep_turned(a);
        multiply(lower, a, rows[2], rows[3]);
        if (!joins_halves) return;
        load_transposed(a, matrix + at_part<TOKENS / 8>(16 + row, part));
        multiply(upper, a, rows[2], rows[3]);
    }
    __device__ void keep(unsigned (&a)[4]) const {
        a[0] &= corner, a[1] = joins_eights ? a[1] : 0u, a[2] = 0u, a[3] &= corner;
    }
    __device__ void keep_turned(unsigned (&a)[4]) const {
        a[0] &= turned_corner, a[1] = 0u, a[2] = joins_eights ? a[2] : 0u, a[3] &= turned_corner;
    }
};

__device__ float diagonal_of(unsigned matrix, int token) {
    const uint4 eight = take16(matrix + at_part<TOKENS / 8>(token, token >> 3));
    const unsigned two = token & 4 ? (token & 2 ? eight.w : eight.z) : (token & 2 ? eight.y : eight.x);
    return token & 1 ? high_of(two) : low_of(two);
}

// of the rows of tile m, which the compiler does not know
__device__ float from_rows(const float (&rows)[ROWS], int m, int half) { return m ? rows[2 + half] : rows[half]; }

// two channels of a row in a thread's slots
__device__ unsigned pair_in(unsigned slots, int m, int p) { return __float_as_uint(shared_float(slots + m * SLOT + 4 * p)); }

// what pairs add. The exponent is that of a pair's later token; its earlier one has it times turn
template <typename Exponent>
__device__ void add_pairs(Sums& of_query, Sums& of_key, Sums& z, float (&of_strength)[ROWS],
                          unsigned queries, unsigned keys, Exponent exponent, float turn, const Levels& levels,
                          unsigned pairs, int lane) {
    const unsigned scores = pairs, overlaps = pairs + PAIR_BYTES, weighed = pairs + 2 * PAIR_BYTES;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        float rise[ROWS][2], fall[ROWS][2];
        unsigned later_query[ROWS], later_key[ROWS], earlier_key[ROWS];
        unsigned query_columns[ROWS], later_columns[ROWS], earlier_columns[ROWS];
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                const float of_later = exponent(m, 2 * p + side);
                rise[m][side] = power_of_two(of_later);
                fall[m][side] = power_of_two(of_later * turn);
            }
            const unsigned query = pair_in(queries, m, p), key = pair_in(keys, m, p);
            later_query[m] = pack(low_of(query) * rise[m][0], high_of(query) * rise[m][1]);
            later_key[m] = pack(low_of(key) * rise[m][0], high_of(key) * rise[m][1]);
            earlier_key[m] = pack(low_of(key) * fall[m][0], high_of(key) * fall[m][1]);
            query_columns[m] = transposed(later_query[m]);
            later_columns[m] = transposed(later_key[m]);
            earlier_columns[m] = transposed(earlier_key[m]);
        }
        float to_query[2][4] = {}, to_later[2][4] = {}, to_earlier[2][4] = {}, unweighed[2][4] = {};
        levels.multiply_by(to_query[0], to_query[1], scores, earlier_columns, lane);
        levels.multiply_by(to_later[0], to_later[1], weighed, earlier_columns, lane);
        levels.multiply_by(unweighed[0], unweighed[1], overlaps, earlier_columns, lane);
        levels.multiply_turned(to_earlier[0], to_earlier[1], weighed, later_columns, lane);
        levels.multiply_turned(to_earlier[0], to_earlier[1], scores, query_columns, lane);
#pragma unroll
        for (int m = 0; m < ROWS; ++m)
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                const int c = 2 * p + side, e = 2 * (m & 1) + side;
                const float q = side ? high_of(later_query[m]) : low_of(later_query[m]);
                const float later = side ? high_of(later_key[m]) : low_of(later_key[m]);
                const float earlier = side ? high_of(earlier_key[m]) : low_of(earlier_key[m]);
                const float a = to_query[m >> 1][e], b = to_later[m >> 1][e], d = to_earlier[m >> 1][e];
                of_strength[m] += later * unweighed[m >> 1][e];
                z.at(m, c) += q * a + later * b - earlier * d;
                of_query.at(m, c) += a * rise[m][side];
                of_key.at(m, c) += b * rise[m][side] + d * fall[m][side];
            }
    }
}

extern "C" __global__ void kda_gradients(
    const bfloat16* q, const bfloat16* k, const bfloat16* v, const float* g, const float* beta, const long long* bounds,
    const bfloat16* inverse, const float* decay, const bfloat16* values, const bfloat16* states, const bfloat16* grad_out,
    const bfloat16* grad_values, const bfloat16* grad_states, bfloat16* grad_q, bfloat16* grad_k, bfloat16* grad_v,
    float* grad_g, float* grad_beta, float scale, long long num_rows, int length, int chunks_per_sequence, int heads,
    int width_v) {
    const int lane = threadIdx.x & 31, r = lane >> 2, quad = lane & 3, warp = threadIdx.x >> 5, warps = WIDTH / GROUP;
    const int groups = width_v / GROUP, column = GROUP * warp + CHANNELS * quad;
    const Chunk chunk = chunk_of(bounds, length, chunks_per_sequence, heads);
    const unsigned common = start_of_shared() + 16 * lane, pairs = start_of_shared() + MATRICES * groups * ROWS * SLOT;
    const unsigned ring = pairs + 3 * PAIR_BYTES + warp * (RING * RING_STAGE), solver = pairs + 2 * PAIR_BYTES;
    const auto slots_of = [&](int matrix, int group) { return common + (matrix * groups + group) * ROWS * SLOT; };
    // 32 values of both states at a time, then queries and keys, then gates
    const auto fetch = [&](int item) {
        const unsigned stage = ring + item % RING * RING_STAGE;
        if (item < groups) {
            const long long at = (chunk.index * width_v + GROUP * item + 8 * quad) * WIDTH + GROUP * warp + 4 * r;
#pragma unroll
            for (int t = 0; t < 8; ++t) {
                copy8(stage + t * (SLOT / 2) + 8 * lane, states, at + t * WIDTH);
                copy8(stage + (8 + t) * (SLOT / 2) + 8 * lane, grad_states, at + t * WIDTH);
            }
        } else if (item == groups) {
            fetch_rows(stage + 16 * lane, q, chunk, WIDTH, column, r);
            fetch_rows(stage + ROWS * SLOT + 16 * lane, k, chunk, WIDTH, column, r);
        } else if (item == groups + 1) {
            fetch_gates(stage + 16 * lane, g, chunk, WIDTH, GROUP * warp + 4 * r, quad);
        }
        end_copies();
    };
    for (int group = warp; group < groups; group += warps) {
        const int of_value = GROUP * group + CHANNELS * quad;
        fetch_rows(slots_of(OUTPUTS, group), grad_out, chunk, width_v, of_value, r);
        fetch_rows(slots_of(OLD_VALUES, group), v, chunk, width_v, of_value, r);
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            const long long at = (chunk.index * TOKENS + r + 8 * m) * width_v + of_value;
            copy16(slots_of(NEW_VALUES, group) + m * SLOT, values, at);
            copy16(slots_of(WRITTEN, group) + m * SLOT, grad_values, at);
        }
    }
    for (int i = threadIdx.x; i < TOKENS * 4; i += WIDTH)  // 16 bytes of a row
        copy16(solver + at_part<TOKENS / 8>(i >> 2, i & 3), inverse, chunk.index * (TOKENS * TOKENS) + i * 8);
    end_copies();
#pragma unroll
    for (int item = 0; item < RING; ++item) fetch(item);
    const float kept = decay[chunk.index * WIDTH], poison = kept != kept ? kept : 0.0f;
    float strength[ROWS], of_strength[ROWS] = {};
#pragma unroll
    for (int m = 0; m < ROWS; ++m) strength[m] = chunk.has(r + 8 * m) ? beta[chunk.row(r + 8 * m)] : 0.0f;
    await_copies<RING>();
    __syncthreads();

    // values: the gradient of V' becomes that of beta*v, before the triangular system
    const TurnedInverse solved(solver, lane);
#pragma unroll 1
    for (int group = warp; group < groups; group += warps) {
        unsigned rows[ROWS][4], old[ROWS][4], written[ROWS][4], given[ROWS][4];
        take_rows(rows, slots_of(WRITTEN, group));
        take_rows(old, slots_of(OLD_VALUES, group));
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            float halves[2][4] = {};
            solved.solve(halves[0], halves[1], rows, p);
#pragma unroll
            for (int m = 0; m < ROWS; ++m) {
                const float a = halves[m >> 1][2 * (m & 1)], b = halves[m >> 1][2 * (m & 1) + 1];
                of_strength[m] += a * low_of(old[m][p]) + b * high_of(old[m][p]);
                written[m][p] = pack(a, b);
                given[m][p] = pack(a * strength[m] + poison, b * strength[m] + poison);
            }
        }
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            put16(slots_of(WRITTEN, group) + m * SLOT, uint4{written[m][0], written[m][1], written[m][2], written[m][3]});
            if (chunk.has(r + 8 * m))
                store16(grad_v, chunk.row(r + 8 * m) * width_v + GROUP * group + CHANNELS * quad,
                        uint4{given[m][0], given[m][1], given[m][2], given[m][3]});
        }
    }
    __syncthreads();

    // pairs: the gradients of scores and overlaps, a tile of one of them at a time
#pragma unroll 1
    for (int i = warp; i < 2 * TILES; i += warps) {
        const bool is_score = i < TILES;
        const int t = is_score ? i : i - TILES, m = t < 2 ? 0 : 1, n = t - 2 * m;
        float sums[4] = {};
        for (int group = 0; group < groups; ++group) {
            const unsigned left = slots_of(is_score ? OUTPUTS : WRITTEN, group) + 2 * m * SLOT;
            const uint4 x = take16(left), y = take16(left + SLOT), z = take16(slots_of(NEW_VALUES, group) + n * SLOT);
            const unsigned first[4] = {x.x, y.x, x.y, y.y}, second[4] = {x.z, y.z, x.w, y.w};
            multiply(sums, first, z.x, z.y);
            multiply(sums, second, z.z, z.w);
        }
        const float times = is_score ? scale : -1.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float a = sums[2 * half] * times, b = sums[2 * half + 1] * times;
            const unsigned at = pairs + at_part<TOKENS / 8>(row_of(m, 2 * half, r), n) + 4 * quad;
            const float weight = from_rows(strength, m, half);
            put4(is_score ? at : at + PAIR_BYTES, pack(a, b));
            if (!is_score) put4(at + 2 * PAIR_BYTES, pack(a * weight, b * weight));
        }
    }
    __syncthreads();

    Sums of_query, of_key, z;  // z is the gradient of weighed keys first
    float of_decay[4] = {};
#pragma unroll 1
    for (int group = 0; group < groups; ++group) {
        await_copies<RING - 1>();
        const unsigned stage = ring + group % RING * RING_STAGE + 8 * lane;
        StateRows state, grad_state;
        state.take(stage);
        grad_state.take(stage + RING_STAGE / 2);
#pragma unroll
        for (int t = 0; t < 8; ++t)
#pragma unroll
            for (int c = 0; c < 4; ++c) of_decay[c] += state.value(t, c) * grad_state.value(t, c);
        of_query.add_product(slots_of(OUTPUTS, group), state);
        z.add_product(slots_of(WRITTEN, group), state);
        of_key.add_product(slots_of(NEW_VALUES, group), grad_state);
        await_warp();
        fetch(group + RING);
    }
    const unsigned queries = ring + groups % RING * RING_STAGE + 16 * lane, keys = queries + ROWS * SLOT;
    float gates[8][4], sums[ROWS][CHANNELS], middle[CHANNELS], own[ROWS];
    await_copies<0>();
    take_gates(gates, ring + (groups + 1) % RING * RING_STAGE + 16 * lane);
    sum_gates(sums, gates, r, quad);
    const bool is_steep = any_lane(find_middle(middle, sums, quad));
    if (is_steep) {
        clean(gates, quad);
        sum_gates(sums, gates, r, quad);
    }
#pragma unroll
    for (int m = 0; m < ROWS; ++m) own[m] = diagonal_of(pairs, r + 8 * m);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        of_decay[c] = sum_over_quads(of_decay[c], lane);
    }
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        unsigned query[ROWS], key[ROWS];
#pragma unroll
        for (int m = 0; m < ROWS; ++m) query[m] = pair_in(queries, m, p), key[m] = pair_in(keys, m, p);
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            const int c = 2 * p + side;
            const float end = from_lane(sums[3][c], 28 + quad);
            float of_last = 0.0f;  // what the last state gives to every gate: by the last token
#pragma unroll
            for (int m = 0; m < ROWS; ++m) {
                const float a = side ? high_of(query[m]) : low_of(query[m]), b = side ? high_of(key[m]) : low_of(key[m]);
                const float since_start = power_of_two(sums[m][c]);
                const float grad_query = of_query.at(m, c) * since_start * scale, grad_weighed = -z.at(m, c) * since_start;
                const float grad_key = of_key.at(m, c) * power_of_two(end - sums[m][c]);
                of_strength[m] += grad_weighed * b;
                of_last += b * grad_key;
                z.at(m, c) = a * grad_query + b * (grad_weighed * strength[m] - grad_key);
                of_query.at(m, c) = grad_query + own[m] * b;
                of_key.at(m, c) = grad_key + grad_weighed * strength[m] + own[m] * a;
            }
#pragma unroll
            for (int step = 4; step < 32; step *= 2) of_last += from_lane(of_last, lane ^ step);
            of_last += power_of_two(end) * from_lane(of_decay[c & 3], 4 * (2 * quad + (c >> 2)));
            z.at(ROWS - 1, c) += r == 7 ? of_last : 0.0f;
        }
    }
    if (is_steep) {
#pragma unroll 1
        for (int level = 0; level < 5; ++level) {
            const auto exponent = [&](int m, int c) { return distance_of(sums, m, c, level, lane); };
            add_pairs(of_query, of_key, z, of_strength, queries, keys, exponent, 1.0f, Levels(level, level + 1, lane), pairs,
                      lane);
        }
    } else {  // all pairs meet in the middle of the chunk
        const auto exponent = [&](int m, int c) { return sums[m][c] - middle[c]; };
        add_pairs(of_query, of_key, z, of_strength, queries, keys, exponent, -1.0f, Levels(0, 5, lane), pairs, lane);
    }
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
#pragma unroll
        for (int step = 1; step < 8; step *= 2)
#pragma unroll
            for (int m = 0; m < ROWS; ++m) {
                const float later = from_lane(z.at(m, c), lane + 4 * step & 31);
                z.at(m, c) += r + step < 8 ? later : 0.0f;
            }
#pragma unroll
        for (int m = ROWS - 2; m >= 0; --m) z.at(m, c) += from_lane(z.at(m + 1, c), quad);
    }
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
        of_strength[m] = sum_over_quads(of_strength[m], lane);
        if (!chunk.has(r + 8 * m)) continue;
        const long long row = chunk.row(r + 8 * m), at = row * WIDTH + column;
        const auto pair_of = [&](Sums& sums, int p) { return pack(sums.at(m, 2 * p) + poison, sums.at(m, 2 * p + 1) + poison); };
        store16(grad_q, at, uint4{pair_of(of_query, 0), pair_of(of_query, 1), pair_of(of_query, 2), pair_of(of_query, 3)});
        store16(grad_k, at, uint4{pair_of(of_key, 0), pair_of(of_key, 1), pair_of(of_key, 2), pair_of(of_key, 3)});
#pragma unroll
        for (int c = 0; c < CHANNELS; c += 4)
            store16(grad_g, at + c, as_bits(z.at(m, c) + poison, z.at(m, c + 1) + poison, z.at(m, c + 2) + poison,
                                            z.at(m, c + 3) + poison));
        if (quad == 0) grad_beta[warp * num_rows + row] = of_strength[m] + poison;
    }
}
