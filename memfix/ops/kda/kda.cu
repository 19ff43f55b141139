// Kimi delta attention in bfloat16, in chunks of 32 tokens. Compiled at run time and launched by cuda.py; prepare in
// kernels.py defines the effect of a chunk on a state.
//
// A warp takes one part, 16 channels of a chunk and head, at a time and keeps it in registers. A thread holds the rows
// (tokens) r, r+8, r+16 and r+24, r = lane/4, and the 4 channels from 4*(lane%4) on: 8 bytes of a row, whose pairs are
// operands of the tensor cores as they are, because a product may sum over channels in any order. Of a group of 32 values
// it holds the 8 from 8*(lane%4) on. The four lanes that hold the same rows are a quad.
//
// The source is compiled for a WIDTH of keys, the number of WARPS in a block of a scan, and STAGES_BOTH_WAYS, the
// number of chunks that such a block buffers in shared memory in a backward pass.

#define TOKENS 32     // per chunk
#define ROWS 4        // per thread
#define PART 16       // channels that a warp takes at a time: 32 would need too many registers
#define CHANNELS 4    // per thread
#define GROUP 32      // values that a warp takes at a time
#define STEEPEST 116.0f       // as _steepest in kernels.py
#define LOWEST_GATE -300.0f   // stands for -inf: its power of two is 0 too, but -inf itself would turn sums into NaN
#define LOG2_E 1.4426950408889634f
#define ONES 0x3f803f80u      // two ones in bfloat16
#define INFINITE __int_as_float(0x7f800000)
#define WIDE_NAN 0x7fffffff

__device__ float low_of(unsigned both) { return __int_as_float(both << 16); }
__device__ float high_of(unsigned both) { return __int_as_float(both & 0xffff0000u); }
__device__ float half_of(unsigned both, int side) { return side ? high_of(both) : low_of(both); }
__device__ uint4 as_bits(float a, float b, float c, float d) {
    return uint4{__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d)};
}
__device__ int least(int a, int b) { return a < b ? a : b; }
// the sum of value over the four lanes of a quad
__device__ float sum_over_quads(float value, int lane) {
    value += shuffle(value, lane ^ 1);
    return value + shuffle(value, lane ^ 2);
}

// ---------------------------------------------------------------- tiles
// a lower triangular 32 x 32 matrix is kept as six tiles of 16 x 8: tile (m, n) begins at row 16*m and column 8*n,
// n < 2*m + 2
#define TILES 6
__device__ int tile(int m, int n) { return 2 * m + n; }
// row and column of one of the four elements that a thread holds of a tile; r = lane/4, q = lane%4
__device__ int row_of(int m, int element, int r) { return 16 * m + r + 8 * (element >> 1); }
__device__ int column_of(int n, int element, int q) { return 8 * n + 2 * q + (element & 1); }

// whether tokens i and j are a pair of this level: i in the second half of a block of 2^(level+1) tokens, j in its first
__device__ bool meet(int i, int j, int level) { return (i >> level) == (j >> level) + 1 && ((i >> level) & 1); }

// sums += x @ y for 16 x 16 matrices of two tiles each; y is given transposed. Accumulators serve as operands, so that the
// product sums over the even columns of x first
__device__ void multiply_blocks(float (&sums)[2][4], const float (&x)[2][4], const float (&y_transposed)[2][4]) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int k = 0; k < 2; ++k)
            multiply_floats(sums[n], x[k][0], x[k][2], x[k][1], x[k][3], y_transposed[k][2 * n], y_transposed[k][2 * n + 1]);
}

// solved = the inverse of I + lower, 16 x 16, beside its transpose: blocks of 2^level tokens are inverted, and each level
// joins two of them
__device__ void invert_block(const float (&lower)[2][4], float (&solved)[2][4], float (&solved_transposed)[2][4],
                             int lane) {
    const int r = lane >> 2, q = lane & 3;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int i = row_of(0, e, r), j = column_of(n, e, q);
            const float below = shuffle(lower[n][e & 2], (lane + 4) & 31);  // the element of row i + 1, column 8*n + 2*q
            solved[n][e] = i == j ? 1.0f : meet(i, j, 0) ? -lower[n][e] : 0.0f;
            solved_transposed[n][e] = i == j ? 1.0f : meet(j, i, 0) ? -below : 0.0f;
        }
#pragma unroll
    for (int level = 1; level < 4; ++level) {
        float joining[2][4], product[2][4] = {}, change[2][4] = {}, change_transposed[2][4] = {};
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                joining[n][e] = meet(row_of(0, e, r), column_of(n, e, q), level) ? lower[n][e] : 0.0f;
        multiply_blocks(product, solved_transposed, joining);  // (joining @ solved), transposed
        multiply_blocks(change, solved, product);
        multiply_blocks(change_transposed, product, solved);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) solved[n][e] -= change[n][e], solved_transposed[n][e] -= change_transposed[n][e];
    }
}

// the inverse of I + lower, 32 x 32, in three blocks of 16 x 16: upper left, lower left and lower right
__device__ void invert(float (&blocks)[3][2][4], const float (&lower)[TILES][4], int lane) {
    float parts[3][2][4], first_transposed[2][4], second_transposed[2][4], product[2][4] = {}, joining[2][4] = {};
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            parts[0][n][e] = lower[tile(0, n)][e];
            parts[1][n][e] = lower[tile(1, n)][e];
            parts[2][n][e] = lower[tile(1, 2 + n)][e];
        }
    invert_block(parts[0], blocks[0], first_transposed, lane);
    invert_block(parts[2], blocks[2], second_transposed, lane);
    multiply_blocks(product, first_transposed, parts[1]);  // (joining @ first), transposed
    multiply_blocks(joining, blocks[2], product);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) blocks[1][n][e] = -joining[n][e];
}

// multiplies the columns of the inverse by the strengths of their tokens
__device__ void strengthen(float (&blocks)[3][2][4], const float (&strength)[ROWS], int q) {
#pragma unroll
    for (int n = 0; n < ROWS; ++n)
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            const float of_token = shuffle(strength[n], 4 * (2 * q + side));
#pragma unroll
            for (int e = side; e < 4; e += 2) {
                if (n < 2) blocks[0][n][e] *= of_token;
                blocks[n < 2 ? 1 : 2][n & 1][e] *= of_token;
            }
        }
}

// the three blocks of the inverse in bfloat16, as left operands of products
struct Inverse {
    unsigned first[4], joining[4], second[4];
    __device__ Inverse(const float (&blocks)[3][2][4]) {
        as_operand(first, blocks[0]);
        as_operand(joining, blocks[1]);
        as_operand(second, blocks[2]);
    }
    static __device__ void as_operand(unsigned (&operand)[4], const float (&block)[2][4]) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            operand[2 * n] = pack(block[n][0], block[n][1]);
            operand[2 * n + 1] = pack(block[n][2], block[n][3]);
        }
    }
};

// solved = inverse @ rows, where a thread holds 8 columns (channels or values) of four rows
__device__ void solve(const Inverse& inverse, const unsigned (&rows)[ROWS][4], unsigned (&solved)[ROWS][4]) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        unsigned columns[ROWS];
#pragma unroll
        for (int m = 0; m < ROWS; ++m) columns[m] = transposed(rows[m][p]);
        float upper[4] = {}, lower[4] = {};
        multiply(upper, inverse.first, columns[0], columns[1]);
        multiply(lower, inverse.joining, columns[0], columns[1]);
        multiply(lower, inverse.second, columns[2], columns[3]);
        solved[0][p] = pack(upper[0], upper[1]);
        solved[1][p] = pack(upper[2], upper[3]);
        solved[2][p] = pack(lower[0], lower[1]);
        solved[3][p] = pack(lower[2], lower[3]);
    }
}

// ---------------------------------------------------------------- rows and gates
struct Chunk {
    long long first_row, index;
    int num_tokens, heads;
    // offset of a token's row in a tensor whose rows have this width
    __device__ long long at(int token, int width) const { return first_row * width + token * (heads * width); }
    __device__ bool has(int token) const { return token < num_tokens; }
};

template <typename Bounds>
__device__ Chunk chunk_of(Bounds bounds, int length, int chunks_per_sequence, int heads) {
    // blocks that run at once take neighbouring heads, whose rows are adjacent in memory
    const unsigned slot = blockIdx.x / heads, head = blockIdx.x - slot * heads;
    long long first, end;
    if (length == 0) {  // packed
        first = bounds[2ll * slot];
        end = bounds[2ll * slot + 1];
    } else {
        const unsigned sequence = slot / chunks_per_sequence;
        first = (long long)sequence * length + (slot - sequence * chunks_per_sequence) * TOKENS;
        end = (sequence + 1ll) * length;
    }
    return Chunk{first * heads + head, blockIdx.x, int(end - first < TOKENS ? end - first : TOKENS), heads};
}

// A warp prefetches into shared memory what it reads itself, so it waits for no other warp. A slot is 512 bytes of shared
// memory, 16 for each lane. Rows beyond a chunk's tokens are zeros.
#define SLOT 512

// offset in shared memory of a 16-byte part of a row. Parts are swizzled, so that eight rows can be read without bank
// conflicts, and by wgmma. Rows of more than 128 bytes lie in panels: first 128 bytes of every row, then the next 128
template <int PARTS, int NUM_ROWS = TOKENS> __device__ unsigned at_part(int row, int part) {
    if (PARTS > 8) return at_part<8>(row, part & 7) + (part >> 3) * (NUM_ROWS * 128);
    return (row * PARTS + (part ^ (PARTS == 8 ? row & 7 : row >> 1 & 3))) * 16;
}

__device__ void load_row(unsigned (&row)[4], unsigned at) {
    const uint4 four = load_shared16(at);
    row[0] = four.x, row[1] = four.y, row[2] = four.z, row[3] = four.w;
}
__device__ void load_rows(unsigned (&rows)[ROWS][4], unsigned slots) {
#pragma unroll
    for (int m = 0; m < ROWS; ++m) load_row(rows[m], slots + m * SLOT);
}

// a token's strength, stored in float32 or in bfloat16: one of the pointers is null
template <typename Wide, typename Narrow>
__device__ float strength_of(Wide wide, Narrow narrow, const Chunk& chunk, int token) {
    if (!chunk.has(token)) return 0.0f;
    const long long at = chunk.at(token, 1);
    if (is_not_null(wide)) return wide[at];
    const bfloat16 rounded = narrow[at];
    return low_of(rounded.bits);
}
template <typename Wide, typename Narrow> __device__ void store_either(Wide wide, Narrow narrow, long long at, float value) {
    if (is_not_null(wide))
        wide[at] = value;
    else
        narrow[at] = bfloat16{(unsigned short)pack(value, 0.0f)};
}
__device__ void load_strengths(float (&strength)[ROWS], unsigned strengths, int r) {
#pragma unroll
    for (int m = 0; m < ROWS; ++m) strength[m] = load_shared_float(strengths + 4 * (r + 8 * m));
}

// The stage of a part in shared memory holds its queries and keys in bfloat16, or its gates in float32. A lane copies 16
// bytes that other lanes read, so the warp must synchronize
#define PART_STAGE (TOKENS * PART * 4)
#define PART_KEYS (PART_STAGE / 2)
template <typename Tensor>
__device__ void copy_part(unsigned stage, Tensor q, Tensor k, const Chunk& chunk, int part, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int token = (lane >> 1) + 16 * i;
        const long long at = chunk.at(token, WIDTH) + PART * part + 8 * (lane & 1);
        async_copy16(stage + i * SLOT + 16 * lane, q, at, chunk.has(token));
        async_copy16(stage + PART_KEYS + i * SLOT + 16 * lane, k, at, chunk.has(token));
    }
}
__device__ void load_part(unsigned (&rows)[ROWS][2], unsigned stage, int lane) {
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
        const uint2 two = load_shared8(stage + m * (SLOT / 2) + 8 * lane);
        rows[m][0] = two.x, rows[m][1] = two.y;
    }
}

// a thread holds the gates of tokens 2*q + (t & 1) + 8*(t >> 1), t < 8, and channels 2*r and 2*r + 1 of a part. A stage
// orders tokens by t, then q, so that a warp reads adjacent bytes
__device__ int token_of_gate(int t, int q) { return 2 * q + (t & 1) + 8 * (t >> 1); }
template <typename Gates>
__device__ void copy_gates(unsigned stage, Gates g, const Chunk& chunk, int part, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int token = token_of_gate(2 * i + (lane >> 4), lane >> 2 & 3);
        const long long at = chunk.at(token, WIDTH) + PART * part + 4 * (lane & 3);
        async_copy16(stage + i * SLOT + 16 * lane, g, at, chunk.has(token));
    }
}
// loads gates and converts them to exponents of 2
__device__ void load_gates(float (&gates)[8][2], unsigned stage, int lane) {
#pragma unroll
    for (int t = 0; t < 8; ++t) {
        const uint2 two = load_shared8(stage + t * (SLOT / 2) + 64 * (lane & 3) + 8 * (lane >> 2));
        gates[t][0] = __int_as_float(two.x) * LOG2_E, gates[t][1] = __int_as_float(two.y) * LOG2_E;
    }
}

// sums = for each row and channel of a thread, the sum of gates from the chunk's start to that row, its own included: a
// triangular matrix of ones times the gates. A gate is split into two bfloat16: one alone would leave a strong gate few
// binary places, and its power of two as few digits
__device__ void sum_gates(float (&sums)[ROWS][CHANNELS], const float (&gates)[8][2], int r, int q) {
    const unsigned corner = (2 * q <= r ? 0x3f80u : 0u) | (2 * q + 1 <= r ? 0x3f800000u : 0u);
    const unsigned triangle[4] = {corner, ONES, 0u, corner}, ones[4] = {ONES, ONES, ONES, ONES};
#pragma unroll
    for (int c = 0; c < 2; ++c) {
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
        sums[0][c] = upper[0], sums[0][c + 2] = upper[1], sums[1][c] = upper[2], sums[1][c + 2] = upper[3];
        sums[2][c] = lower[0], sums[2][c + 2] = lower[1], sums[3][c] = lower[2], sums[3][c + 2] = lower[3];
    }
}

// middle = the sums at the middle of the chunk. Returns whether a sum of this thread is too far from it: steep, -inf or NaN
__device__ bool find_middle(float (&middle)[CHANNELS], const float (&sums)[ROWS][CHANNELS], int q) {
    bool is_steep = false;
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
        middle[c] = shuffle(sums[1][c], 28 + q);
#pragma unroll
        for (int m = 0; m < ROWS; ++m) is_steep |= !(fabsf(sums[m][c] - middle[c]) <= STEEPEST);
    }
    return is_steep;
}

// replaces NaN and -inf in the gates of a part; returns the first token with a NaN, or TOKENS, the same in all lanes
__device__ int clean(float (&gates)[8][2], int q) {
    int first_nan = TOKENS;
#pragma unroll
    for (int t = 0; t < 8; ++t)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            if (gates[t][c] != gates[t][c]) {
                first_nan = least(first_nan, token_of_gate(t, q));
                gates[t][c] = 0.0f;
            }
            gates[t][c] = gates[t][c] < LOWEST_GATE ? LOWEST_GATE : gates[t][c];
        }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int lane = threadIdx.x & 31;
        first_nan = least(first_nan, int(shuffle(float(first_nan), lane ^ step)));
    }
    return first_nan;
}

// ---------------------------------------------------------------- pairs of tokens
// sums of tile (m, n) += rows 16*m.. of left @ (rows 8*n.. of right) transposed, over 16 channels
__device__ void multiply_rows(float (&sums)[4], const unsigned (&left)[ROWS][2], const unsigned (&right)[ROWS][2], int m,
                              int n) {
    const unsigned a[4] = {left[2 * m][0], left[2 * m + 1][0], left[2 * m][1], left[2 * m + 1][1]};
    multiply(sums, a, right[n][0], right[n][1]);
}

// scaled = values * factors, in bfloat16
__device__ void scale_rows(unsigned (&scaled)[ROWS][2], const unsigned (&values)[ROWS][2],
                           const float (&factors)[ROWS][CHANNELS]) {
#pragma unroll
    for (int m = 0; m < ROWS; ++m)
#pragma unroll
        for (int p = 0; p < 2; ++p)
            scaled[m][p] = pack(low_of(values[m][p]) * factors[m][2 * p], high_of(values[m][p]) * factors[m][2 * p + 1]);
}

// adds the products of all pairs over the 16 channels of a part; the factors decay from and to the middle of the chunk
__device__ void add_flat_pairs(float (&overlaps)[TILES][4], float (&weighed)[TILES][4],
                               const unsigned (&later_query)[ROWS][2], const unsigned (&later_key)[ROWS][2],
                               const unsigned (&earlier_key)[ROWS][2]) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < 2 * m + 2; ++n) {
            multiply_rows(overlaps[tile(m, n)], later_key, earlier_key, m, n);
            multiply_rows(weighed[tile(m, n)], later_query, earlier_key, m, n);
        }
}

// the sum of gates between row m of a thread and the border between the halves of its block at a level
__device__ float distance_of(const float (&sums)[ROWS][CHANNELS], int m, int c, int level, int lane) {
    const int token = (lane >> 2) + 8 * m, border = (token >> (level + 1) << (level + 1)) + (1 << level) - 1;
    // the border is row border/8 of its lanes; an index into registers must be known at compile time
    const float there = level < 3 ? sums[m][c] : level == 3 ? sums[m & ~1][c] : sums[1][c];
    const float distance = sums[m][c] - shuffle(there, (border & 7) * 4 + (lane & 3));
    return token > border ? distance : -distance;
}

// the same for gates of any size, level by level: the border between two halves lies between the tokens of a pair. Level
// -1 has the pairs of a token with itself, which do not decay
__device__ void add_steep_pairs(float (&overlaps)[TILES][4], float (&weighed)[TILES][4], const unsigned (&query)[ROWS][2],
                                const unsigned (&key)[ROWS][2], const float (&sums)[ROWS][CHANNELS], int lane) {
    const int r = lane >> 2, q = lane & 3;
#pragma unroll
    for (int level = -1; level < 5; ++level) {
        float factors[ROWS][CHANNELS];
        unsigned decayed_query[ROWS][2], decayed_key[ROWS][2];
#pragma unroll
        for (int m = 0; m < ROWS; ++m)
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c)
                factors[m][c] = level < 0 ? 1.0f : power_of_two(distance_of(sums, m, c, level, lane));
        scale_rows(decayed_query, query, factors);
        scale_rows(decayed_key, key, factors);
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int n = 0; n < 2 * m + 2; ++n) {
                if (level == 4 ? n >= 2 * m : level == 3 ? n != 2 * m : n < 2 * m) continue;  // no pairs of this level
                float of_keys[4] = {}, of_queries[4] = {};
                multiply_rows(of_keys, decayed_key, decayed_key, m, n);
                multiply_rows(of_queries, decayed_query, decayed_key, m, n);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int i = row_of(m, e, r), j = column_of(n, e, q);
                    if (level < 0 ? i == j : meet(i, j, level)) {
                        overlaps[tile(m, n)][e] += of_keys[e];
                        weighed[tile(m, n)][e] += of_queries[e];
                    }
                }
            }
    }
}

// ---------------------------------------------------------------- prepare
// stores pairs * scale as a 32 x 32 matrix, with zeros above the diagonal
template <typename Out>
__device__ void store_pairs(Out out, const Chunk& chunk, const float (&pairs)[TILES][4], float scale, int lane) {
    const int r = lane >> 2, q = lane & 3;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float two[2] = {};
#pragma unroll
                for (int side = 0; side < 2; ++side)
                    if (n < 2 * m + 2 && row_of(m, 2 * half, r) >= column_of(n, side, q))
                        two[side] = pairs[tile(m, n < 2 * m + 2 ? n : 0)][2 * half + side] * scale;
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
                const unsigned below = n < 2 ? inverse.joining[at] : inverse.second[at];
                const unsigned two = m == 1 ? below : n < 2 ? inverse.first[at] : 0u;
                store4(out, (chunk.index * TOKENS + row_of(m, 2 * half, r)) * TOKENS + column_of(n, 0, q), two);
            }
}

// An upper bound on the factor by which a chunk scales the length of a state, as an exponent of 2. A token scales no
// channel by more than its largest gate, and I - beta*k*k^T scales no vector by more than max(1, |1 - beta*|k|^2|). The
// bound is NaN if a gate is NaN, and INFINITE if another input is NaN or infinite.
struct Growth {
    unsigned slots;  // two, with the largest gate of each token over this lane's channels: too many for registers
    __device__ void add_gates(const float (&gates)[8][2], bool is_first) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float most[4];
            const uint4 before = load_shared16(slots + half * SLOT);
            const unsigned bits[4] = {before.x, before.y, before.z, before.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                most[i] = fmaxf(gates[4 * half + i][0], gates[4 * half + i][1]);
                if (!is_first) most[i] = fmaxf(most[i], __int_as_float(bits[i]));
            }
            store_shared16(slots + half * SLOT, as_bits(most[0], most[1], most[2], most[3]));
        }
    }
    // |k|^2 is on the diagonal of overlaps; its factors have eight binary digits, hence times 1.02
    __device__ float bound(const float (&overlaps)[TILES][4], const float (&strength)[ROWS], int lane) const {
        const int r = lane >> 2;
        float sum = 0.0f, longer = 1.0f;
#pragma unroll
        for (int t = 0; t < 8; ++t) {
            float most = load_shared_float(slots + (t >> 2) * SLOT + 4 * (t & 3));
#pragma unroll
            for (int step = 4; step < 32; step *= 2) most = fmaxf(most, shuffle(most, lane ^ step));
            sum += most;
        }
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            const float (&own)[4] = overlaps[tile(m >> 1, m)];
            const float length = 1.02f * (r & 1 ? own[2 * (m & 1) + 1] : own[2 * (m & 1)]);
            const float stretch = fabsf(1.0f - strength[m] * length);
            longer *= stretch <= 1.0f || (lane & 3) != r >> 1 ? 1.0f : stretch;
        }
        float stretched = log2f(longer);
#pragma unroll
        for (int step = 1; step < 32; step *= 2) stretched += shuffle(stretched, lane ^ step);
        sum = sum_over_quads(sum, lane) + stretched;
        return sum == sum ? sum : INFINITE;
    }
};

// A part of a chunk with decays. The constructor stores queries, keys and the right side of the system that the weights
// solve; the members are the factors of pairs, which decay from and to the middle of the chunk. Steep gates have no such
// factors
template <bool STEEP> struct DecayedPart {
    unsigned later_query[ROWS][2], later_key[ROWS][2], earlier_key[ROWS][2];

    template <typename Out, typename Decay>
    __device__ DecayedPart(const unsigned (&query)[ROWS][2], const unsigned (&key)[ROWS][2],
                           const float (&sums)[ROWS][CHANNELS], const float (&middle)[CHANNELS], unsigned to_solve,
                           Out queries, Out keys, Decay decay, const Chunk& chunk, int column, float scale, int lane) {
        const int r = lane >> 2;
        float end[CHANNELS], from_start[CHANNELS], to_end[CHANNELS];
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) {
            end[c] = shuffle(sums[3][c], 28 + (lane & 3));
            from_start[c] = STEEP ? 1.0f : power_of_two(middle[c]);
            to_end[c] = STEEP ? 1.0f : power_of_two(end[c] - middle[c]);
        }
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            unsigned of_query[2], of_key[2], of_weight[2];
            float whole[CHANNELS];
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                float a[2], b[2], rise[2], fall[2];
#pragma unroll
                for (int side = 0; side < 2; ++side) {
                    const int c = 2 * p + side;
                    const float distance = STEEP ? sums[m][c] : sums[m][c] - middle[c];
                    a[side] = half_of(query[m][p], side), b[side] = half_of(key[m][p], side);
                    rise[side] = power_of_two(distance);
                    fall[side] = b[side] * power_of_two(STEEP ? end[c] - distance : -distance);
                    whole[c] = rise[side] * from_start[c];
                }
                if (!STEEP) {
                    later_query[m][p] = pack(a[0] * rise[0], a[1] * rise[1]);
                    later_key[m][p] = pack(b[0] * rise[0], b[1] * rise[1]);
                    earlier_key[m][p] = pack(fall[0], fall[1]);
                }
                of_query[p] = pack(a[0] * whole[2 * p] * scale, a[1] * whole[2 * p + 1] * scale);
                of_key[p] = pack(fall[0] * to_end[2 * p], fall[1] * to_end[2 * p + 1]);
                of_weight[p] = pack(b[0] * whole[2 * p], b[1] * whole[2 * p + 1]);
            }
            const long long at = (chunk.index * TOKENS + opaque(r) + 8 * m) * WIDTH + column;
            store8(queries, at, uint2{of_query[0], of_query[1]});
            store8(keys, at, uint2{of_key[0], of_key[1]});
            store_shared8(to_solve + m * SLOT, uint2{of_weight[0], of_weight[1]});
            if (m == 3 && r == 7)
                store16(decay, chunk.index * WIDTH + column, as_bits(whole[0], whole[1], whole[2], whole[3]));
        }
    }
};

// adds a part's channels to the pairs of a chunk and to the bound on its growth, and stores the part's queries, keys and
// decay; returns the first token with a NaN gate, or TOKENS
template <typename Out, typename Decay>
__device__ int prepare_part(float (&overlaps)[TILES][4], float (&weighed)[TILES][4], Growth& growth, unsigned stage,
                            unsigned to_solve, Out queries, Out keys, Decay decay, const Chunk& chunk, int part, float scale,
                            int lane) {
    const int r = lane >> 2, quad = lane & 3, column = PART * part + CHANNELS * quad;
    float gates[8][2], sums[ROWS][CHANNELS], middle[CHANNELS];
    unsigned query[ROWS][2], key[ROWS][2];
    load_part(query, stage, lane);
    load_part(key, stage + PART_KEYS, lane);
    load_gates(gates, stage + PART_STAGE, lane);
    growth.add_gates(gates, part == 0);
    sum_gates(sums, gates, r, quad);
    if (!any_lane(find_middle(middle, sums, quad))) {
        const DecayedPart<false> rows(query, key, sums, middle, to_solve, queries, keys, decay, chunk, column, scale, lane);
        add_flat_pairs(overlaps, weighed, rows.later_query, rows.later_key, rows.earlier_key);
        return TOKENS;
    }
    const int first_nan = clean(gates, quad);
    sum_gates(sums, gates, r, quad);
    add_steep_pairs(overlaps, weighed, query, key, sums, lane);
    DecayedPart<true>(query, key, sums, middle, to_solve, queries, keys, decay, chunk, column, scale, lane);
    return first_nan;
}

// after a NaN gate: makes the queries NaN from its token on, and the chunk's decay in all channels
template <typename Out, typename Decay>
__device__ void spread_nan(Out queries, Decay decay, const Chunk& chunk, int first_nan, int lane) {
    const int r = lane >> 2, quad = lane & 3;
    const unsigned nan = 0x7fff7fffu;
    for (int column = CHANNELS * quad; column < WIDTH; column += PART) {
#pragma unroll
        for (int m = 0; m < ROWS; ++m)
            if (r + 8 * m >= first_nan)
                store8(queries, (chunk.index * TOKENS + r + 8 * m) * WIDTH + column, uint2{nan, nan});
        if (r == 7) store16(decay, chunk.index * WIDTH + column, uint4{WIDE_NAN, WIDE_NAN, WIDE_NAN, WIDE_NAN});
    }
}

// A block of one warp prepares a chunk of a head. Shared memory: two stages, first for parts, then for values; the right
// side of the system that the weights solve; and the slots of Growth.
#define PREPARE_VALUES 64  // per stage
extern "C" __global__ void __launch_bounds__(32, 12) kda_prepare(
    const bfloat16* q, const bfloat16* k, const bfloat16* v, const float* g, const float* beta, const bfloat16* narrow_beta,
    const long long* bounds, bfloat16* weights, bfloat16* values, bfloat16* queries, bfloat16* keys, bfloat16* scores,
    bfloat16* inverse_out, float* decay, float* growth, float scale, int length, int chunks_per_sequence, int heads,
    int width_v) {
    const int lane = threadIdx.x, r = lane >> 2, quad = lane & 3, parts = WIDTH / PART;
    const Chunk chunk = chunk_of(bounds, length, chunks_per_sequence, heads);
    const unsigned to_solve = start_of_shared() + 4 * PART_STAGE + 16 * lane;
    const auto stage_of = [](int i) { return start_of_shared() + i % 2 * (2 * PART_STAGE); };
    // prefetches item i: the parts of the channels come first, then the values
    const auto fetch = [&](int i) {
        if (i < parts) {
            copy_part(stage_of(i), q, k, chunk, i, opaque(lane));
            copy_gates(stage_of(i) + PART_STAGE, g, chunk, i, opaque(lane));
        } else {
            const int column = PREPARE_VALUES * (i - parts) + 8 * (lane & 7), token = lane >> 3;
#pragma unroll
            for (int j = 0; j < 8; ++j)
                async_copy16(stage_of(i) + at_part<8>(token + 4 * j, lane & 7), v,
                       chunk.at(token + 4 * j, opaque(width_v)) + column,
                       chunk.has(token + 4 * j) && column < width_v);
        }
        commit_copies();
    };
    Growth growing = {to_solve + WIDTH / GROUP * ROWS * SLOT};
    fetch(0);
    fetch(1);
    float overlaps[TILES][4] = {}, weighed[TILES][4] = {};
    int first_nan = TOKENS;
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
        await_copies<1>();
        await_warp();
        first_nan = least(first_nan, prepare_part(overlaps, weighed, growing, stage_of(part),
                                                  to_solve + part / 2 * ROWS * SLOT + part % 2 * 8, queries, keys, decay,
                                                  chunk, part, scale, lane));
        await_warp();
        fetch(part + 2);
    }
    store_pairs(scores, chunk, weighed, scale, lane);
    // chunk_of runs again: its result, kept during the loop, would take registers that the parts need
    const Chunk same = chunk_of(bounds, length, chunks_per_sequence, opaque(heads));
    const float own_strength = strength_of(beta, narrow_beta, same, lane);
    float strength[ROWS];
#pragma unroll
    for (int m = 0; m < ROWS; ++m) strength[m] = shuffle(own_strength, r + 8 * m);
    const float bound = growing.bound(overlaps, strength, lane);
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < 2 * m + 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                overlaps[tile(m, n)][e] = row_of(m, e, r) > column_of(n, e, quad)
                                              ? overlaps[tile(m, n)][e] * strength[2 * m + (e >> 1)]
                                              : 0.0f;
    float blocks[3][2][4];
    invert(blocks, overlaps, lane);
    if (is_not_null(inverse_out)) store_inverse(inverse_out, chunk, Inverse(blocks), lane);
    strengthen(blocks, strength, quad);
    const Inverse inverse(blocks);
    unsigned rows[ROWS][4], solved[ROWS][4];
#pragma unroll 1
    for (int group = 0; group < WIDTH / GROUP; ++group) {
        load_rows(rows, start_of_shared() + 4 * PART_STAGE + 16 * opaque(lane) + group * ROWS * SLOT);
        solve(inverse, rows, solved);
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            const long long at = (chunk.index * TOKENS + r + 8 * m) * WIDTH + GROUP * group + CHANNELS * quad;
            store8(weights, at, uint2{solved[m][0], solved[m][1]});
            store8(weights, at + PART, uint2{solved[m][2], solved[m][3]});
        }
    }
    float nan_probe[4] = {};  // zeros times values: NaN if a value is NaN or infinite, else 0
#pragma unroll 1
    for (int group = 0; group * GROUP < width_v; ++group) {
        const int item = parts + group / 2;
        if (group % 2 == 0) {
            if (group > 0) {
                await_warp();
                fetch(item + 1);
            }
            await_copies<1>();
            await_warp();
        }
#pragma unroll
        for (int m = 0; m < ROWS; ++m) load_row(rows[m], stage_of(item) + at_part<8>(r + 8 * m, group % 2 * 4 + quad));
        solve(inverse, rows, solved);
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const unsigned zeros[4] = {};
            multiply(nan_probe, zeros, rows[0][p], rows[1][p]);
            multiply(nan_probe, zeros, rows[2][p], rows[3][p]);
        }
#pragma unroll
        for (int m = 0; m < ROWS; ++m)
            store16(values, (chunk.index * TOKENS + r + 8 * m) * width_v + GROUP * group + 8 * quad,
                    uint4{solved[m][0], solved[m][1], solved[m][2], solved[m][3]});
    }
    const bool has_nonfinite = any_lane(nan_probe[0] != nan_probe[0] || nan_probe[1] != nan_probe[1]);
    if (lane == 0) growth[chunk.index] = first_nan < TOKENS ? __int_as_float(WIDE_NAN) : has_nonfinite ? INFINITE : bound;
    if (first_nan < TOKENS) spread_nan(queries, decay, chunk, first_nan, lane);
}

// ---------------------------------------------------------------- from chunk to chunk
// A warp scans with 16 values of the state, and keeps all their channels in registers. The accumulators of a product are
// operands of the next product, so the warps of a block synchronize only when the next chunk arrives in shared memory.
//
// A sequence is cut into segments, which blocks scan in parallel. Where the chunks before a segment leave next to nothing
// of an earlier state, its block scans these chunks first, from a zero state; elsewhere it waits for the state that the
// block of the segment before publishes.
#define STAGES_OF_SCAN 3
#define FORGOTTEN -40.0f  // growth, as an exponent of 2, below which a state is left out: float32 has 24 digits
#define VALUES (16 * WARPS)  // per block
#define USES_WGMMA (HAS_WGMMA && WARPS % 4 == 0)  // whether four warps multiply together

// offsets in the stage of a chunk in shared memory. TRANSPOSED holds its values, or the gradients of its outputs: matrices
// [tokens, values] that are read transposed
struct Stage {
    static const int WEIGHTS = 0, QUERIES = TOKENS * WIDTH * 2, KEYS = 2 * QUERIES, TRANSPOSED = 3 * QUERIES;
    static const int SCORES = TRANSPOSED + TOKENS * VALUES * 2, DECAY = SCORES + TOKENS * TOKENS * 2;
    static const int BYTES = (DECAY + WIDTH * 4 + 1023) / 1024 * 1024;
};

// copies num_rows rows of PARTS * 16 bytes, and zeros up to 32 rows. A thread copies one 16-byte part of every rows-th
// row, and every eighth part of a row that has more than eight
#define PANEL_BYTES (TOKENS * 128)
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
            async_copy16(to + i * rows * beside * 16 + j * PANEL_BYTES, from, at + i * rows * row_width + j * 64,
                   row + i * rows < num_rows);
}
template <typename In> __device__ void copy_keys(unsigned to, In from, long long chunk) {
    copy_rows<WIDTH / 8>(to, from, chunk * (TOKENS * WIDTH), WIDTH);
}
template <typename Decay> __device__ void copy_decay(unsigned stage, Decay decay, long long chunk) {
    if (threadIdx.x < WIDTH / 4)
        async_copy16(stage + Stage::DECAY + 16 * threadIdx.x, decay, chunk * WIDTH + 4 * threadIdx.x);
}

// The work of a warp in a scan: 16 values of one sequence and head, through the chunks of one segment. In a backward pass
// a segment joins several of forward's.
template <typename Bounds> struct SegmentScan {
    Bounds bounds;
    int length, heads, width_v, num_chunks, segment, joined, first, end, lane, r, q, value;
    long long sequence, head, begin;

    __device__ SegmentScan(Bounds bounds, Bounds first_chunk, int length, int chunks_per_sequence, int heads, int width_v,
                   int segment, int num_segments, int joined = 1)
        : bounds(bounds), length(length), heads(heads), width_v(width_v), segment(segment), joined(joined) {
        lane = threadIdx.x & 31, r = lane >> 2, q = lane & 3;
        value = blockIdx.y * VALUES + 16 * (threadIdx.x >> 5);
        sequence = blockIdx.x / heads, head = blockIdx.x % heads;
        begin = length == 0 ? first_chunk[sequence] : sequence * chunks_per_sequence;
        num_chunks = uniform(length == 0 ? int(first_chunk[sequence + 1] - begin) : chunks_per_sequence);
        const int num_parts = num_segments * joined, per_segment = (num_chunks + num_parts - 1) / num_parts * joined;
        first = least(segment * per_segment, num_chunks), end = least(first + per_segment, num_chunks);
    }
    __device__ bool is_first() const { return segment == 0; }
    __device__ bool is_last() const { return end == num_chunks; }
    __device__ bool is_empty() const { return first == end && segment > 0; }
    __device__ long long chunk(int step) const { return (begin + step) * heads + head; }
    // returns the first token of a chunk, and sets how many tokens it has
    __device__ long long first_token(int step, int& num_tokens) const {
        long long first = sequence * length + (long long)step * TOKENS, end = (sequence + 1) * length;
        if (length == 0) first = bounds[2 * (begin + step)], end = bounds[2 * (begin + step) + 1];
        num_tokens = end - first < TOKENS ? int(end - first) : TOKENS;
        return first;
    }
    // whether no bound on growth is NaN or infinite in the chunks from `from` to the sequence's end in this direction
    template <typename Floats> __device__ bool is_finite(Floats growth, int from, int direction) const {
        bool has_nonfinite = false;
        for (int i = lane; i < (direction < 0 ? from + 1 : num_chunks - from); i += 32)
            has_nonfinite |= !(growth[chunk(from + direction * i)] < INFINITE);
        return !any_lane(has_nonfinite);
    }
    // how many chunks, from `from` on in this direction, leave next to nothing of a state; 0 if more chunks than a segment
    // has would be needed, or if a bound in this direction is NaN or infinite
    template <typename Floats> __device__ int num_to_forget(Floats growth, int from, int direction) const {
        const int most = least(end - first, direction < 0 ? from + 1 : num_chunks - from);
        float before = 0.0f;
        for (int done = 0; done < most; done += 32) {
            const bool exists = done + lane < most;
            float sum = exists ? growth[chunk(from + direction * (done + lane))] : INFINITE;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const float earlier = shuffle(sum, lane - step & 31);
                sum += lane < step ? 0.0f : earlier;
            }
            int found = sum + before <= FORGOTTEN ? lane : 32;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) found = least(found, int(shuffle(float(found), lane ^ step)));
            if (found < 32) return is_finite(growth, from, direction) ? done + found + 1 : 0;
            before += shuffle(sum, 31);
        }
        return 0;
    }
    // index of the state between a segment and the next, and of the flag that says that the state is there
    __device__ long long number_of(int segment) const { return (long long)segment * gridDim.x + blockIdx.x; }
    __device__ long long flag_of(int segment) const { return number_of(segment) * gridDim.y + blockIdx.y; }
    // offset of the thread's first element in state number, and from there of element e in its tile n
    __device__ long long state_at(long long number) const { return number * WIDTH * width_v + value + r; }
    __device__ long long element_at(int n, int e) const { return (long long)column_of(n, e, q) * width_v + 8 * (e >> 1); }
};

template <typename Scan, typename In>
__device__ void load_state(float (&state)[WIDTH / 8][4], const Scan& scan, In from, long long number) {
#pragma unroll
    for (int n = 0; n < WIDTH / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) state[n][e] = from[scan.state_at(number) + scan.element_at(n, e)];
}
template <typename Scan, typename Out>
__device__ void store_state(Out to, const Scan& scan, long long number, const float (&state)[WIDTH / 8][4]) {
#pragma unroll
    for (int n = 0; n < WIDTH / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) to[scan.state_at(number) + scan.element_at(n, e)] = state[n][e];
}
// returns how many chunks a block scans before its segment, which begins at from, and leaves the zeros in state; or awaits
// and loads the state of the neighbouring segment, and returns 0
template <typename Scan, typename Floats, typename States, typename Flags>
__device__ int warm_up_or_await_state(float (&state)[WIDTH / 8][4], const Scan& scan, Floats growth, States states,
                                      Flags ready, int from, int direction) {
    const int num_before = scan.num_to_forget(growth, from + direction, direction);
    if (num_before == 0) {
        const int border = direction < 0 ? scan.segment - 1 : scan.segment;
        acquire_flag(ready, scan.flag_of(border));
        load_state(state, scan, states, scan.number_of(border));
    }
    return num_before;
}

// calls step(stage, chunk) for num_chunks chunks from `from` on, in this direction; copies the next chunks to the other
// stages meanwhile
template <int STAGES, typename Copy, typename Step>
__device__ void for_each_chunk(int from, int num_chunks, int direction, Copy copy, Step step) {
    const auto stage_of = [](int i) { return start_of_shared() + i % STAGES * Stage::BYTES; };
#pragma unroll
    for (int ahead = 0; ahead < STAGES - 1; ++ahead) {
        if (ahead < num_chunks) copy(stage_of(ahead), from + direction * ahead);
        commit_copies();
    }
#pragma unroll 1
    for (int i = 0; i < num_chunks; ++i) {
        await_copies<STAGES - 2>();
        fence_async_proxy();
        __syncthreads();
        const int ahead = i + STAGES - 1;
        if (ahead < num_chunks) copy(stage_of(ahead), from + direction * ahead);
        commit_copies();
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

// Products of the 16 values of each warp by a matrix that all warps read. On Hopper four warps multiply together (wgmma),
// straight from shared memory, which each of them would else load for itself; the sums are ready after await_wgmma.

// sums[values, tokens] = operand[values, channels] @ rows[tokens, channels]^T
__device__ void multiply_by_rows(float (&sums)[4][4], const unsigned (&operand)[WIDTH / 16][4], unsigned rows, int lane) {
#if USES_WGMMA
    begin_wgmma(sums, operand);
#pragma unroll
    for (int k = 0; k < WIDTH / 16; ++k)
        wgmma<false, 1>(sums, operand[k], WgmmaOperand<128>(rows + k / 4 * PANEL_BYTES + k % 4 * 32), k > 0);
    commit_wgmma();
#else
    const unsigned at = rows + at_part<WIDTH / 8>(lane & 7, lane >> 3);
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[n][e] = 0.0f;
#pragma unroll
    for (int k = 0; k < WIDTH / 32; ++k)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            unsigned b[4];
            load_matrices(b, (at ^ k % 2 * 64) + k / 2 * PANEL_BYTES + n * 1024);  // ^ 64: four parts further, swizzled
            multiply(sums[n], operand[2 * k], b[0], b[1]);
            multiply(sums[n], operand[2 * k + 1], b[2], b[3]);
        }
#endif
}
// state[values, channels] += SIGN * operand[values, tokens] @ rows[tokens, channels]
template <int SIGN = 1>
__device__ void multiply_by_columns(float (&state)[WIDTH / 8][4], const unsigned (&operand)[2][4], unsigned rows, int lane) {
#if USES_WGMMA
    begin_wgmma(state, operand);
#pragma unroll
    for (int k = 0; k < 2; ++k) wgmma<true, SIGN>(state, operand[k], WgmmaOperand<128>(rows + k * 2048, PANEL_BYTES));
    commit_wgmma();
#else
    const unsigned at = rows + at_part<WIDTH / 8>(lane, 0), sign = SIGN < 0 ? 0x80008000u : 0u;
    unsigned signed_operand[2][4];
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int e = 0; e < 4; ++e) signed_operand[k][e] = operand[k][e] ^ sign;
#pragma unroll
    for (int n = 0; n < WIDTH / 8; ++n) {
        unsigned b[4];
        load_transposed(b, (at ^ n % 8 * 16) + n / 8 * PANEL_BYTES);
        multiply(state[n], signed_operand[0], b[0], b[1]);
        multiply(state[n], signed_operand[1], b[2], b[3]);
    }
#endif
}
// sums[values, tokens] += operand[values, tokens] @ scores, or with TRANSPOSED @ scores transposed
template <bool TRANSPOSED>
__device__ void multiply_by_scores(float (&sums)[4][4], const unsigned (&operand)[2][4], unsigned scores, int lane) {
#if USES_WGMMA
    begin_wgmma(sums, operand);
#pragma unroll
    for (int k = 0; k < 2; ++k)
        wgmma<!TRANSPOSED, 1>(sums, operand[k], WgmmaOperand<64>(scores + k * (TRANSPOSED ? 32 : 1024)));
    commit_wgmma();
#else
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        unsigned b[4];
        if (TRANSPOSED)
            load_matrices(b, scores + at_part<TOKENS / 8>(8 * n + (lane & 7), lane >> 3));
        else
            load_transposed(b, scores + at_part<TOKENS / 8>(lane, n));
        multiply(sums[n], operand[0], b[0], b[1]);
        multiply(sums[n], operand[1], b[2], b[3]);
    }
#endif
}
__device__ void decay_state(float (&state)[WIDTH / 8][4], unsigned stage, int q) {
#pragma unroll
    for (int n = 0; n < WIDTH / 8; ++n) {
        const uint2 kept = load_shared8(stage + Stage::DECAY + 4 * column_of(n, 0, q));
        state[n][0] *= __int_as_float(kept.x), state[n][2] *= __int_as_float(kept.x);
        state[n][1] *= __int_as_float(kept.y), state[n][3] *= __int_as_float(kept.y);
    }
}

// V' = values - known: sums in float32, in the layout of accumulators, and fresh in bfloat16, as operands
__device__ void find_new(unsigned (&fresh)[2][4], float (&sums)[4][4], const float (&known)[4][4], unsigned stage,
                         int lane) {
    const int part = 2 * (threadIdx.x >> 5);
    unsigned upper[4], lower[4];
    load_transposed(upper, stage + Stage::TRANSPOSED + at_part<VALUES / 8>(lane, part));
    load_transposed(lower, stage + Stage::TRANSPOSED + at_part<VALUES / 8>(lane, part + 1));
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        sums[n][0] = low_of(upper[n]) - known[n][0], sums[n][1] = high_of(upper[n]) - known[n][1];
        sums[n][2] = low_of(lower[n]) - known[n][2], sums[n][3] = high_of(lower[n]) - known[n][3];
    }
    as_operands<4>(fresh, sums);
}

// stores sums[values, tokens] transposed: a row per token
template <typename Out>
__device__ void store_transposed(Out out, long long at, long long row_width, int num_tokens, const float (&sums)[4][4],
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
    const SegmentScan<decltype(bounds)> scan(bounds, first_chunk, length, chunks_per_sequence, heads, width_v, blockIdx.z,
                                             gridDim.z);
    if (scan.is_empty()) return;
    const int lane = scan.lane;
    float state[WIDTH / 8][4] = {};
    int num_before = 0;
    if (!scan.is_first())
        num_before = warm_up_or_await_state(state, scan, growth, ends, ready, scan.first, -1);
    else if (is_not_null(initial))
        load_state(state, scan, initial, blockIdx.x);
    const auto copy = [&](unsigned stage, int step) {
        const long long chunk = scan.chunk(step);
        copy_keys(stage + Stage::WEIGHTS, weights, chunk);
        copy_keys(stage + Stage::KEYS, keys, chunk);
        copy_rows<VALUES / 8>(stage + Stage::TRANSPOSED, values, chunk * TOKENS * width_v + blockIdx.y * VALUES, width_v);
        copy_decay(stage, decay, chunk);
        if (step < scan.first) return;
        copy_keys(stage + Stage::QUERIES, queries, chunk);
        copy_rows<TOKENS / 8>(stage + Stage::SCORES, scores, chunk * (TOKENS * TOKENS), TOKENS);
    };
    for_each_chunk<STAGES_OF_SCAN>(scan.first - num_before, scan.end - scan.first + num_before, 1, copy,
                                   [&](unsigned stage, int step) {
        unsigned operand[WIDTH / 16][4], fresh[2][4];
        as_operands<WIDTH / 8>(operand, state);
        float known[4][4], sums[4][4], answer[4][4];
        decay_state(state, stage, scan.q);
        multiply_by_rows(known, operand, stage + Stage::WEIGHTS, lane);
        await_wgmma<0>(known);
        find_new(fresh, sums, known, stage, lane);
        multiply_by_columns(state, fresh, stage + Stage::KEYS, lane);
        multiply_by_rows(answer, operand, stage + Stage::QUERIES, lane);
        multiply_by_scores<true>(answer, fresh, stage + Stage::SCORES, lane);
        await_wgmma<0>(state, answer);
        if (step < scan.first) return;  // before the segment: no queries and scores were copied, and no output is stored
        int num_tokens;
        const long long first = scan.first_token(step, num_tokens);
        store_transposed(out, (first * heads + scan.head) * width_v + scan.value, (long long)heads * width_v, num_tokens,
                         answer, lane);
    });
    if (scan.is_last()) {
        store_state(final, scan, blockIdx.x, state);
    } else {
        store_state(ends, scan, scan.number_of(scan.segment), state);
        release_flag(ready, scan.flag_of(scan.segment));
    }
}

// ---------------------------------------------------------------- both ways, for a backward pass
// stores 16 values of a state in rows of channels, via shared memory that only this warp uses
template <typename Out>
__device__ void keep_state(Out states, long long at, const unsigned (&operand)[WIDTH / 16][4], int lane) {
    const unsigned mine = start_of_shared() + STAGES_BOTH_WAYS * Stage::BYTES + (threadIdx.x >> 5) * (16 * WIDTH * 2);
#pragma unroll
    for (int k = 0; k < WIDTH / 16; ++k)
        store_matrices(mine + at_part<WIDTH / 8, 16>(lane & 15, 2 * k + (lane >> 4)), operand[k]);
    await_warp();
    const int parts = WIDTH / 8, rows = 32 / parts;
#pragma unroll
    for (int i = 0; i < 16 / rows; ++i) {
        const int row = i * rows + lane / parts, part = lane % parts;
        store16(states, at + row * WIDTH + part * 8, load_shared16(mine + at_part<parts, 16>(row, part)));
    }
    await_warp();
}

// scans a segment forward: stores each chunk's first state, and overwrites its values with V'
template <typename Scan, typename In, typename Floats, typename Out>
__device__ void scan_forward(const Scan& scan, In weights, Out values, In keys, Floats decay, Floats initial, Floats ends,
                         Out states) {
    const int lane = scan.lane, width_v = scan.width_v;
    float state[WIDTH / 8][4] = {};
    if (!scan.is_first())
        load_state(state, scan, ends, scan.number_of(scan.segment * scan.joined - 1));
    else if (is_not_null(initial))
        load_state(state, scan, initial, blockIdx.x);
    const auto copy = [&](unsigned stage, int step) {
        const long long chunk = scan.chunk(step);
        copy_keys(stage + Stage::WEIGHTS, weights, chunk);
        copy_keys(stage + Stage::KEYS, keys, chunk);
        copy_rows<VALUES / 8>(stage + Stage::TRANSPOSED, values, chunk * TOKENS * width_v + blockIdx.y * VALUES, width_v);
        copy_decay(stage, decay, chunk);
    };
    for_each_chunk<STAGES_BOTH_WAYS>(scan.first, scan.end - scan.first, 1, copy, [&](unsigned stage, int step) {
        const long long chunk = scan.chunk(step);
        unsigned operand[WIDTH / 16][4], fresh[2][4];
        float known[4][4], sums[4][4];
        as_operands<WIDTH / 8>(operand, state);
        decay_state(state, stage, scan.q);
        multiply_by_rows(known, operand, stage + Stage::WEIGHTS, lane);
        keep_state(states, (chunk * width_v + scan.value) * WIDTH, operand, lane);
        await_wgmma<0>(known);
        find_new(fresh, sums, known, stage, lane);
        multiply_by_columns(state, fresh, stage + Stage::KEYS, lane);
        await_wgmma<0>(state);
        store_transposed(values, chunk * TOKENS * width_v + scan.value, width_v, TOKENS, sums, lane);
    });
}

// scans a segment backward: stores the gradients of each chunk's last state and of its V'
template <typename Scan, typename In, typename Floats, typename Wide, typename Flags, typename Out>
__device__ void scan_backward(const Scan& scan, In weights, In queries, In keys, In scores, Floats decay, Floats growth,
                        In grad_out, Floats grad_final, Wide grad_initial, Wide grad_ends, Flags ready, Out grad_values,
                        Out grad_states) {
    const int lane = scan.lane, width_v = scan.width_v;
    float grad[WIDTH / 8][4] = {};
    int num_before = 0;
    if (!scan.is_last())
        num_before = warm_up_or_await_state(grad, scan, growth, grad_ends, ready, scan.end - 1, 1);
    else if (is_not_null(grad_final))
        load_state(grad, scan, grad_final, blockIdx.x);
    const auto copy = [&](unsigned stage, int step) {
        const long long chunk = scan.chunk(step);
        int num_tokens;
        const long long first = scan.first_token(step, num_tokens);
        copy_keys(stage + Stage::WEIGHTS, weights, chunk);
        copy_keys(stage + Stage::QUERIES, queries, chunk);
        copy_keys(stage + Stage::KEYS, keys, chunk);
        copy_rows<VALUES / 8>(stage + Stage::TRANSPOSED, grad_out,
                              (first * scan.heads + scan.head) * width_v + blockIdx.y * VALUES,
                              (long long)scan.heads * width_v, num_tokens);
        copy_rows<TOKENS / 8>(stage + Stage::SCORES, scores, chunk * (TOKENS * TOKENS), TOKENS);
        copy_decay(stage, decay, chunk);
    };
    const int num_steps = scan.end - scan.first + num_before;
    for_each_chunk<STAGES_BOTH_WAYS>(scan.end - 1 + num_before, num_steps, -1, copy, [&](unsigned stage, int step) {
        const long long chunk = scan.chunk(step);
        unsigned operand[WIDTH / 16][4], of_out[2][4], of_values[2][4];
        float sums[4][4];
        as_operands<WIDTH / 8>(operand, grad);
#pragma unroll
        for (int k = 0; k < 2; ++k)
            load_transposed(of_out[k], stage + Stage::TRANSPOSED +
                                           at_part<VALUES / 8>(16 * k + 8 * (lane >> 4) + (lane & 7),
                                                               2 * (threadIdx.x >> 5) + (lane >> 3 & 1)));
        decay_state(grad, stage, scan.q);
        multiply_by_rows(sums, operand, stage + Stage::KEYS, lane);
        multiply_by_scores<false>(sums, of_out, stage + Stage::SCORES, lane);
        multiply_by_columns(grad, of_out, stage + Stage::QUERIES, lane);
        if (step < scan.end) keep_state(grad_states, (chunk * width_v + scan.value) * WIDTH, operand, lane);
        await_wgmma<0>(sums, grad);
        as_operands<4>(of_values, sums);
        multiply_by_columns<-1>(grad, of_values, stage + Stage::WEIGHTS, lane);
        await_wgmma<0>(grad);
        if (step < scan.end)
            store_transposed(grad_values, chunk * TOKENS * width_v + scan.value, width_v, TOKENS, sums, lane);
    });
    if (!scan.is_first()) {
        store_state(grad_ends, scan, scan.number_of(scan.segment - 1), grad);
        release_flag(ready, scan.flag_of(scan.segment - 1));
    } else if (is_not_null(grad_initial)) {
        store_state(grad_initial, scan, blockIdx.x, grad);
    }
}

// half of the blocks scan forward and half backward: neither needs the results of the other
extern "C" __global__ void kda_scan_both_ways(
    const bfloat16* weights, bfloat16* values, const bfloat16* queries, const bfloat16* keys, const bfloat16* scores,
    const float* decay, const float* growth, const float* initial, const float* ends, bfloat16* states,
    const bfloat16* grad_out, const float* grad_final, float* grad_initial, float* grad_ends, int* ready,
    bfloat16* grad_values, bfloat16* grad_states, const long long* bounds, const long long* first_chunk, int joined,
    int length, int chunks_per_sequence, int heads, int width_v) {
    const int num_segments = gridDim.z / 2, order = blockIdx.z / 2;
    const bool is_forward = blockIdx.z % 2 == 1;
    const SegmentScan<decltype(bounds)> scan(bounds, first_chunk, length, chunks_per_sequence, heads, width_v,
                                    is_forward ? order : num_segments - 1 - order, num_segments, joined);
    if (scan.is_empty()) return;
    if (is_forward)
        scan_forward(scan, weights, values, keys, decay, initial, ends, states);
    else
        scan_backward(scan, weights, queries, keys, scores, decay, growth, grad_out, grad_final, grad_initial, grad_ends,
                      ready, grad_values, grad_states);
}

// ---------------------------------------------------------------- gradients inside a chunk
// A block takes a chunk of a head, and a warp two parts of its channels, one after the other. Slots that all warps read hold
// the gradients of outputs, V', the gradients of values, and the values. Each warp prefetches the states of its parts, then
// queries, keys and gates, into its own ring of stages. Before its parts, a warp does its share of the values, then of the
// pairs, for all warps.
//
// The loss depends on the sum of gates from a chunk's start to token t through t's read of the first state, its write to the
// last state, and its pairs. Z_t is the derivative with respect to that sum. The gradient of a gate is the sum of Z over its
// own and all later tokens, plus one term of the last state for all gates. In the gradients of gates before both tokens of a
// pair, the pair's two terms cancel, so both are products of the same rounded factors.
#define RING 4  // stages per warp
#define PAIR_BYTES (TOKENS * TOKENS * 2)
// matrices in the slots of a block; WRITTEN holds the gradients of V', then of the right side of the triangular system
enum { OUTPUTS, NEW_VALUES, WRITTEN, OLD_VALUES, MATRICES };

// 32 values of a part of a state: a thread holds the rows (values) 8*q to 8*q + 7 and the channels 2*r and 2*r + 1, as right
// operands of products that sum over values
struct StateRows {
    unsigned rows[8];

    // the stage holds row 8*(i & 3) + (i >> 2) at place i, so that a warp reads adjacent bytes
    template <typename In> static __device__ void copy(unsigned stage, In states, long long at, int lane) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int place = (lane >> 1) + 16 * i;
            async_copy16(stage + i * SLOT + 16 * lane, states,
                         at + (8 * (place & 3) + (place >> 2)) * WIDTH + 8 * (lane & 1));
        }
    }
    __device__ void load(unsigned stage, int lane) {
#pragma unroll
        for (int t = 0; t < 8; ++t) rows[t] = load_shared4(stage + 128 * t + 32 * (lane & 3) + 4 * (lane >> 2));
    }
    // one channel of rows t and t + 1
    __device__ unsigned pair(int t, int channel) const {
        const unsigned a = rows[t], b = rows[t + 1];
        return channel ? a >> 16 | (b & 0xffff0000u) : (a & 0xffffu) | b << 16;
    }
};

// the inverse of a chunk's triangular system, transposed, in blocks of 16 x 16: upper left, upper right and lower right
struct TransposedInverse {
    unsigned first[4], joining[4], second[4];
    __device__ TransposedInverse(unsigned matrix, int lane) {
        const int row = (lane & 7) + 8 * (lane >> 4), part = lane >> 3 & 1;
        load_transposed(first, matrix + at_part<TOKENS / 8>(row, part));
        load_transposed(joining, matrix + at_part<TOKENS / 8>(16 + row, part));
        load_transposed(second, matrix + at_part<TOKENS / 8>(16 + row, 2 + part));
    }
    // upper and lower += inverse transposed @ rows, for values 2*p and 2*p + 1 of a thread and all its rows
    __device__ void solve(float (&upper)[4], float (&lower)[4], const unsigned (&rows)[ROWS][4], int p) const {
        unsigned columns[ROWS];
#pragma unroll
        for (int m = 0; m < ROWS; ++m) columns[m] = transposed(rows[m][p]);
        multiply(upper, first, columns[0], columns[1]);
        multiply(upper, joining, columns[2], columns[3]);
        multiply(lower, second, columns[2], columns[3]);
    }
};

// a thread's elements of a sum [32 tokens, 16 channels], in the layout of accumulators
struct Sums {
    float tiles[2][2][4] = {};
    __device__ float& at(int m, int c) { return tiles[m >> 1][c & 1][2 * (m & 1) + (c >> 1)]; }
    // += rows[tokens, values] @ state[values, channels]
    __device__ void add_product(unsigned slots, const StateRows& state) {
        unsigned rows[ROWS][4];
        load_rows(rows, slots);
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const unsigned a[4] = {rows[2 * m][2 * k], rows[2 * m + 1][2 * k], rows[2 * m][2 * k + 1],
                                       rows[2 * m + 1][2 * k + 1]};
#pragma unroll
                for (int n = 0; n < 2; ++n) multiply(tiles[m][n], a, state.pair(4 * k, n), state.pair(4 * k + 2, n));
            }
    }
};

// multiplies by a 32 x 32 matrix of pairs in shared memory, of which only the pairs of levels first to end - 1 count
struct Levels {
    unsigned corner, transposed_corner;  // masks of the pairs that a thread keeps in 8 x 8 blocks on the diagonal
    bool joins_eights, joins_halves;

    __device__ Levels(int first, int end, int lane) {
        const int r = lane >> 2, q = lane & 3;
        corner = transposed_corner = 0u;
        for (int level = first; level < least(end, 3); ++level)
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                const unsigned half = side ? 0xffff0000u : 0xffffu;
                if (meet(r, 2 * q + side, level)) corner |= half;
                if (meet(2 * q + side, r, level)) transposed_corner |= half;
            }
        joins_eights = first <= 3 && 3 < end, joins_halves = end > 4;
    }
    // sums[tokens, 8 channels] += matrix @ rows; each element of rows is the right operand of eight tokens
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
    __device__ void multiply_by_transposed(float (&upper)[4], float (&lower)[4], unsigned matrix,
                                           const unsigned (&rows)[ROWS], int lane) const {
        const int row = (lane & 7) + 8 * (lane >> 4), part = lane >> 3 & 1;
        unsigned a[4];
        load_transposed(a, matrix + at_part<TOKENS / 8>(row, part));
        keep_transposed(a);
        multiply(upper, a, rows[0], rows[1]);
        load_transposed(a, matrix + at_part<TOKENS / 8>(16 + row, 2 + part));
        keep_transposed(a);
        multiply(lower, a, rows[2], rows[3]);
        if (!joins_halves) return;
        load_transposed(a, matrix + at_part<TOKENS / 8>(16 + row, part));
        multiply(upper, a, rows[2], rows[3]);
    }
    __device__ void keep(unsigned (&a)[4]) const {
        a[0] &= corner, a[1] = joins_eights ? a[1] : 0u, a[2] = 0u, a[3] &= corner;
    }
    __device__ void keep_transposed(unsigned (&a)[4]) const {
        a[0] &= transposed_corner, a[1] = 0u, a[2] = joins_eights ? a[2] : 0u, a[3] &= transposed_corner;
    }
};

__device__ float diagonal_of(unsigned matrix, int token) {
    const uint4 eight = load_shared16(matrix + at_part<TOKENS / 8>(token, token >> 3));
    const unsigned two = token & 4 ? (token & 2 ? eight.w : eight.z) : (token & 2 ? eight.y : eight.x);
    return token & 1 ? high_of(two) : low_of(two);
}

// rows[2*m + half]; the compiler does not know m, and registers have no index at run time
__device__ float from_rows(const float (&rows)[ROWS], int m, int half) { return m ? rows[2 + half] : rows[half]; }

// channels 2*p and 2*p + 1 of row m of a thread, from the stage of a part
__device__ unsigned pair_in(unsigned stage, int m, int p, int lane) {
    return load_shared4(stage + m * (SLOT / 2) + 8 * lane + 4 * p);
}

// calls use(row, side, sum) for the accumulators of two channels and all rows of a thread
template <typename Use> __device__ void for_each(const float (&halves)[2][4], Use use) {
#pragma unroll
    for (int m = 0; m < ROWS; ++m)
#pragma unroll
        for (int side = 0; side < 2; ++side) use(m, side, halves[m >> 1][2 * (m & 1) + side]);
}

// adds what pairs contribute to the gradients. exponent(m, c) gives the factor of a token that is later in a pair; as the
// earlier one, its exponent is multiplied by sign
template <typename Exponent>
__device__ void add_pairs(Sums& of_query, Sums& of_key, Sums& z, float (&of_strength)[ROWS],
                          unsigned queries, unsigned keys, Exponent exponent, float sign, const Levels& levels,
                          unsigned pairs, int lane) {
    const unsigned scores = pairs, overlaps = pairs + PAIR_BYTES, weighed = pairs + 2 * PAIR_BYTES;
#pragma unroll
    for (int p = 0; p < 2; ++p) {
        float rise[ROWS][2], fall[ROWS][2];
        unsigned query[ROWS], later[ROWS], earlier[ROWS], columns[ROWS];
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                const float of_later = exponent(m, 2 * p + side);
                rise[m][side] = power_of_two(of_later);
                fall[m][side] = power_of_two(of_later * sign);
            }
            query[m] = pair_in(queries, m, p, lane), later[m] = pair_in(keys, m, p, lane);
            earlier[m] = pack(low_of(later[m]) * fall[m][0], high_of(later[m]) * fall[m][1]);
            query[m] = pack(low_of(query[m]) * rise[m][0], high_of(query[m]) * rise[m][1]);
            later[m] = pack(low_of(later[m]) * rise[m][0], high_of(later[m]) * rise[m][1]);
            columns[m] = transposed(earlier[m]);
        }
        // each product is used up before the next one: there are no registers for more
        float to_query[2][4] = {}, to_later[2][4] = {}, unweighed[2][4] = {}, to_earlier[2][4] = {};
        levels.multiply_by(to_query[0], to_query[1], scores, columns, lane);
        for_each(to_query, [&](int m, int side, float a) {
            z.at(m, 2 * p + side) += half_of(query[m], side) * a;
            of_query.at(m, 2 * p + side) += a * rise[m][side];
        });
        levels.multiply_by(to_later[0], to_later[1], weighed, columns, lane);
        for_each(to_later, [&](int m, int side, float b) {
            z.at(m, 2 * p + side) += half_of(later[m], side) * b;
            of_key.at(m, 2 * p + side) += b * rise[m][side];
        });
        levels.multiply_by(unweighed[0], unweighed[1], overlaps, columns, lane);
        for_each(unweighed, [&](int m, int side, float b) { of_strength[m] += half_of(later[m], side) * b; });
#pragma unroll
        for (int m = 0; m < ROWS; ++m) columns[m] = transposed(later[m]);
        levels.multiply_by_transposed(to_earlier[0], to_earlier[1], weighed, columns, lane);
#pragma unroll
        for (int m = 0; m < ROWS; ++m) columns[m] = transposed(query[m]);
        levels.multiply_by_transposed(to_earlier[0], to_earlier[1], scores, columns, lane);
        for_each(to_earlier, [&](int m, int side, float d) {
            z.at(m, 2 * p + side) -= half_of(earlier[m], side) * d;
            of_key.at(m, 2 * p + side) += d * fall[m][side];
        });
    }
}

extern "C" __global__ void __launch_bounds__(WIDTH, 384 / WIDTH) kda_gradients(
    const bfloat16* q, const bfloat16* k, const bfloat16* v, const float* g, const float* beta, const bfloat16* narrow_beta,
    const long long* bounds, const bfloat16* inverse, const float* growth, const bfloat16* values, const bfloat16* states,
    const bfloat16* grad_out, const bfloat16* grad_values, const bfloat16* grad_states, bfloat16* grad_q, bfloat16* grad_k,
    bfloat16* grad_v, float* grad_g, float* grad_beta, bfloat16* narrow_grad_beta, float scale, int length,
    int chunks_per_sequence, int heads, int width_v) {
    const int lane = threadIdx.x & 31, r = lane >> 2, quad = lane & 3, warp = threadIdx.x >> 5, warps = WIDTH / 32;
    const int groups = width_v / GROUP, per_part = groups + 2;
    const Chunk chunk = chunk_of(bounds, length, chunks_per_sequence, heads);
    const unsigned common = start_of_shared() + 16 * lane, pairs = start_of_shared() + MATRICES * groups * ROWS * SLOT;
    const unsigned solver = pairs + 2 * PAIR_BYTES, strengths = pairs + 3 * PAIR_BYTES;
    const unsigned ring = strengths + TOKENS * 4 + warp * (RING * PART_STAGE);
    const auto slots_of = [&](int matrix, int group) { return common + (matrix * groups + group) * ROWS * SLOT; };
    const auto stage_of = [&](int item) { return ring + item % RING * PART_STAGE; };
    // prefetches an item of a part: 32 values of the first state and of the last state's gradient at a time, then queries
    // and keys, then gates
    const auto fetch = [&](int item) {
        const int part_of_warp = item < per_part ? 0 : 1, part = 2 * warp + part_of_warp;
        const int i = item - part_of_warp * per_part;
        if (i < groups) {
            const long long at = (chunk.index * width_v + GROUP * i) * WIDTH + PART * part;
            StateRows::copy(stage_of(item), states, at, lane);
            StateRows::copy(stage_of(item) + PART_STAGE / 2, grad_states, at, lane);
        } else if (i == groups) {
            copy_part(stage_of(item), q, k, chunk, part, lane);
        } else if (i == groups + 1) {
            copy_gates(stage_of(item), g, chunk, part, lane);
        }
        commit_copies();
    };
    for (int i = warp; i < 2 * groups; i += warps) {
        const int group = i >> 1, of_value = GROUP * group + 8 * quad;
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            const int token = r + 8 * m;
            const long long at = (i & 1 ? chunk.at(token, width_v) : (chunk.index * TOKENS + token) * width_v) + of_value;
            if (i & 1) {
                async_copy16(slots_of(OUTPUTS, group) + m * SLOT, grad_out, at, chunk.has(token));
                async_copy16(slots_of(OLD_VALUES, group) + m * SLOT, v, at, chunk.has(token));
            } else {
                async_copy16(slots_of(NEW_VALUES, group) + m * SLOT, values, at);
                async_copy16(slots_of(WRITTEN, group) + m * SLOT, grad_values, at);
            }
        }
    }
    for (int i = threadIdx.x; i < TOKENS * 4; i += WIDTH)  // each 16 bytes of a row
        async_copy16(solver + at_part<TOKENS / 8>(i >> 2, i & 3), inverse, chunk.index * (TOKENS * TOKENS) + i * 8);
    commit_copies();
#pragma unroll
    for (int item = 0; item < RING; ++item) fetch(item);
    if (warp == 0) store_shared4(strengths + 4 * lane, __float_as_uint(strength_of(beta, narrow_beta, chunk, lane)));
    const float grown = growth[chunk.index], poison = grown != grown ? grown : 0.0f;
    float strength[ROWS], of_strength[ROWS] = {};
    await_copies<RING>();
    __syncthreads();
    load_strengths(strength, strengths, r);

    // values: the gradient of V' becomes that of the triangular system's right side, which contains beta*v
    const TransposedInverse solved(solver, lane);
#pragma unroll 1
    for (int group = warp; group < groups; group += warps) {
        unsigned rows[ROWS][4], old[ROWS][4], written[ROWS][4], given[ROWS][4];
        load_rows(rows, slots_of(WRITTEN, group));
        load_rows(old, slots_of(OLD_VALUES, group));
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
            store_shared16(slots_of(WRITTEN, group) + m * SLOT,
                           uint4{written[m][0], written[m][1], written[m][2], written[m][3]});
            if (chunk.has(r + 8 * m))
                store16(grad_v, chunk.at(r + 8 * m, width_v) + GROUP * group + 8 * quad,
                        uint4{given[m][0], given[m][1], given[m][2], given[m][3]});
        }
    }
    __syncthreads();

    // pairs: the gradients of scores and overlaps; a warp takes one tile of one of them at a time
#pragma unroll 1
    for (int i = warp; i < 2 * TILES; i += warps) {
        const bool is_score = i < TILES;
        const int t = is_score ? i : i - TILES, m = t < 2 ? 0 : 1, n = t - 2 * m;
        float sums[4] = {};
        for (int group = 0; group < groups; ++group) {
            const unsigned left = slots_of(is_score ? OUTPUTS : WRITTEN, group) + 2 * m * SLOT;
            const uint4 x = load_shared16(left), y = load_shared16(left + SLOT);
            const uint4 z = load_shared16(slots_of(NEW_VALUES, group) + n * SLOT);
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
            store_shared4(is_score ? at : at + PAIR_BYTES, pack(a, b));
            if (!is_score) store_shared4(at + 2 * PAIR_BYTES, pack(a * weight, b * weight));
        }
    }
    __syncthreads();

#pragma unroll 1
    for (int part_of_warp = 0; part_of_warp < 2; ++part_of_warp) {
        const int first = part_of_warp * per_part;
        Sums of_query, of_key, z;  // z first holds the negated gradient of weighed keys
        float of_decay[2] = {};
#pragma unroll 1
        for (int group = 0; group < groups; ++group) {
            await_copies<RING - 1>();
            await_warp();
            const unsigned stage = stage_of(first + group);
            StateRows state, grad_state;
            state.load(stage, lane);
            grad_state.load(stage + PART_STAGE / 2, lane);
#pragma unroll
            for (int t = 0; t < 8; ++t)
#pragma unroll
                for (int c = 0; c < 2; ++c) of_decay[c] += half_of(state.rows[t], c) * half_of(grad_state.rows[t], c);
            of_query.add_product(slots_of(OUTPUTS, group), state);
            z.add_product(slots_of(WRITTEN, group), state);
            of_key.add_product(slots_of(NEW_VALUES, group), grad_state);
            await_warp();
            fetch(first + group + RING);
        }
        const unsigned queries = stage_of(first + groups), keys = queries + PART_KEYS;
        float gates[8][2], sums[ROWS][CHANNELS], middle[CHANNELS], own[ROWS];
        await_copies<RING - 2>();
        await_warp();
        load_gates(gates, stage_of(first + groups + 1), lane);
        sum_gates(sums, gates, r, quad);
        const bool is_steep = any_lane(find_middle(middle, sums, quad));
        if (is_steep) {
            clean(gates, quad);
            sum_gates(sums, gates, r, quad);
        }
#pragma unroll
        for (int m = 0; m < ROWS; ++m) own[m] = diagonal_of(pairs, r + 8 * m);
        load_strengths(strength, strengths, r);
#pragma unroll
        for (int c = 0; c < 2; ++c) of_decay[c] = sum_over_quads(of_decay[c], lane);
#pragma unroll
        for (int p = 0; p < 2; ++p) {
            unsigned query[ROWS], key[ROWS];
#pragma unroll
            for (int m = 0; m < ROWS; ++m) query[m] = pair_in(queries, m, p, lane), key[m] = pair_in(keys, m, p, lane);
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                const int c = 2 * p + side;
                const float end = shuffle(sums[3][c], 28 + quad);
                float of_last = 0.0f;  // the term of the last state for all gates, added to Z of the last token
#pragma unroll
                for (int m = 0; m < ROWS; ++m) {
                    const float a = half_of(query[m], side), b = half_of(key[m], side);
                    const float since_start = power_of_two(sums[m][c]);
                    const float grad_query = of_query.at(m, c) * since_start * scale;
                    const float grad_weighed = -z.at(m, c) * since_start;
                    const float grad_key = of_key.at(m, c) * power_of_two(end - sums[m][c]);
                    of_strength[m] += grad_weighed * b;
                    of_last += b * grad_key;
                    z.at(m, c) = a * grad_query + b * (grad_weighed * strength[m] - grad_key);
                    of_query.at(m, c) = grad_query + own[m] * b;
                    of_key.at(m, c) = grad_key + grad_weighed * strength[m] + own[m] * a;
                }
#pragma unroll
                for (int step = 4; step < 32; step *= 2) of_last += shuffle(of_last, lane ^ step);
                of_last += power_of_two(end) * shuffle(of_decay[c & 1], 4 * (2 * quad + (c >> 1)));
                z.at(ROWS - 1, c) += r == 7 ? of_last : 0.0f;
            }
        }
        if (is_steep) {
#pragma unroll 1
            for (int level = 0; level < 5; ++level) {
                const auto exponent = [&](int m, int c) { return distance_of(sums, m, c, level, lane); };
                const Levels levels(level, level + 1, lane);
                add_pairs(of_query, of_key, z, of_strength, queries, keys, exponent, 1.0f, levels, pairs, lane);
            }
        } else {  // all pairs decay from and to the middle of the chunk
            const auto exponent = [&](int m, int c) { return sums[m][c] - middle[c]; };
            add_pairs(of_query, of_key, z, of_strength, queries, keys, exponent, -1.0f, Levels(0, 5, lane), pairs, lane);
        }
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) {
#pragma unroll
            for (int step = 1; step < 8; step *= 2)
#pragma unroll
                for (int m = 0; m < ROWS; ++m) {
                    const float later = shuffle(z.at(m, c), lane + 4 * step & 31);
                    z.at(m, c) += r + step < 8 ? later : 0.0f;
                }
#pragma unroll
            for (int m = ROWS - 2; m >= 0; --m) z.at(m, c) += shuffle(z.at(m + 1, c), quad);
        }
        await_warp();
        fetch(first + groups + RING);
        fetch(first + groups + 1 + RING);
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            if (!chunk.has(r + 8 * m)) continue;
            const long long at = chunk.at(r + 8 * m, WIDTH) + PART * (2 * warp + part_of_warp) + CHANNELS * quad;
            const auto pair_of = [&](Sums& sums, int p) {
                return pack(sums.at(m, 2 * p) + poison, sums.at(m, 2 * p + 1) + poison);
            };
            store8(grad_q, at, uint2{pair_of(of_query, 0), pair_of(of_query, 1)});
            store8(grad_k, at, uint2{pair_of(of_key, 0), pair_of(of_key, 1)});
            store16(grad_g, at, as_bits(z.at(m, 0) + poison, z.at(m, 1) + poison, z.at(m, 2) + poison, z.at(m, 3) + poison));
        }
    }
    // reuses the slots of OLD_VALUES, which are no longer read
    const unsigned of_strengths = start_of_shared() + OLD_VALUES * groups * ROWS * SLOT;
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
        of_strength[m] = sum_over_quads(of_strength[m], lane);
        if (quad == 0) store_shared4(of_strengths + 4 * (TOKENS * warp + r + 8 * m), __float_as_uint(of_strength[m]));
    }
    __syncthreads();
    if (warp > 0 || !chunk.has(lane)) return;
    float all = poison;
#pragma unroll
    for (int i = 0; i < warps; ++i) all += load_shared_float(of_strengths + 4 * (TOKENS * i + lane));
    store_either(grad_beta, narrow_grad_beta, chunk.at(lane, 1), all);
}
