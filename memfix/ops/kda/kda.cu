// Kimi delta attention in bfloat16, in chunks of 32 tokens. Compiled at run time; see also cuda.py and kernels.py, whose
// prepare says what a chunk does to a state.
//
// A warp takes a chunk of a head and keeps it in registers. A thread has the rows r, r+8, r+16 and r+24, r = lane/4, and
// of every 32 channels the 8 from 8*(lane%4) on: 16 bytes of a row, whose pairs are operands of the tensor cores as they
// are, because a product may sum over channels in any order.

#define TOKENS 32
#define ROWS 4        // of a thread
#define CHANNELS 8    // of a thread, of every GROUP
#define GROUP 32
#define STEEPEST 116.0f       // as _steepest in kernels.py
#define LOWEST_GATE -300.0f   // its power of two is 0; -inf itself would leave sums as NaN
#define LOG2_E 1.4426950408889634f
#define ONES 0x3f803f80u      // two ones in bfloat16

struct bfloat16 {
    unsigned short bits;
};

// ---------------------------------------------------------------- what the GPU has instructions for
#ifndef MEMFIX_EMULATION
template <typename T> __device__ void store16(T* to, long long at, uint4 value) {
    *reinterpret_cast<uint4*>(to + at) = value;
}
__device__ void store4(bfloat16* to, long long at, unsigned value) { *reinterpret_cast<unsigned*>(to + at) = value; }
// two floats as bfloat16, the first in the low half
__device__ unsigned pack(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ float power_of_two(float exponent) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    return power;
}
// sums[16, 8] += a[16, 16] @ b[16, 8]
__device__ void multiply(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ unsigned with_ten_digits(float value) {
    unsigned rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
    return rounded;
}
// sums[16, 8] += a[16, 8] @ b[8, 8] with ten binary digits
__device__ void multiply_floats(float (&sums)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(with_ten_digits(a0)), "r"(with_ten_digits(a1)), "r"(with_ten_digits(a2)), "r"(with_ten_digits(a3)),
          "r"(with_ten_digits(b0)), "r"(with_ten_digits(b1)));
}
// an 8 x 8 matrix, two elements of row lane/4 in each thread
__device__ unsigned transposed(unsigned pair) {
    unsigned turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
    return turned;
}
__device__ float from_lane(float value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
__device__ bool any_lane(bool flag) { return __any_sync(0xffffffffu, flag); }
// four 8 x 8 matrices from shared memory; of each, eight lanes say where a row begins
__device__ void load_matrices(unsigned (&matrices)[4], unsigned at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(at));
}
__device__ void load_transposed(unsigned (&matrices)[4], unsigned at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(at));
}
// 16 bytes of global memory, or zeros
template <typename T> __device__ void copy16(unsigned to, const T* from, long long at, bool exists = true) {
    const T* source = exists ? from + at : from;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(source), "r"(exists ? 16 : 0));
}
__device__ uint4 take16(unsigned at) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(at));
    return value;
}
__device__ void put16(unsigned at, uint4 value) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w));
}
__device__ float shared_float(unsigned at) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(at));
    return value;
}
__device__ void end_copies() { asm volatile("cp.async.commit_group;"); }
template <int LATER> __device__ void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LATER)); }
extern __shared__ __align__(256) char shared[];
__device__ unsigned start_of_shared() { return static_cast<unsigned>(__cvta_generic_to_shared(shared)); }
#endif

__device__ float low_of(unsigned both) { return __int_as_float(both << 16); }
__device__ float high_of(unsigned both) { return __int_as_float(both & 0xffff0000u); }
__device__ uint4 as_bits(float a, float b, float c, float d) {
    return uint4{__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d)};
}
__device__ int least(int a, int b) { return a < b ? a : b; }

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
__device__ Chunk chunk_of(Bounds bounds, int packed, int length, int chunks_per_sequence, int heads) {
    const long long slot = blockIdx.x;
    const int head = blockIdx.y;
    long long first, end;
    if (packed) {
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
#define STAGE_SLOTS 16  // 4 of queries, 4 of keys and 8 of gates; or 4 of values

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

// for each row of a thread and each of its channels, the sum of all gates up to the row's own
__device__ void sum_gates(float (&sums)[ROWS][CHANNELS], const float (&gates)[8][4], int r, int q) {
    const unsigned corner = (2 * q <= r ? 0x3f80u : 0u) | (2 * q + 1 <= r ? 0x3f800000u : 0u);
    const unsigned triangle[4] = {corner, ONES, 0u, corner}, ones[4] = {ONES, ONES, ONES, ONES};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        unsigned pairs[4];
#pragma unroll
        for (int h = 0; h < 4; ++h) pairs[h] = pack(gates[2 * h][c], gates[2 * h + 1][c]);
        float upper[4] = {}, lower[4] = {};
        multiply(upper, triangle, pairs[0], pairs[1]);
        multiply(lower, ones, pairs[0], pairs[1]);
        multiply(lower, triangle, pairs[2], pairs[3]);
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

// the same by levels, whatever the gates: the border between two halves lies between the tokens of a pair
__device__ void add_steep_pairs(float (&overlaps)[TILES][4], float (&weighed)[TILES][4], const unsigned (&query)[ROWS][4],
                                const unsigned (&key)[ROWS][4], const float (&sums)[ROWS][CHANNELS], int lane) {
    const int r = lane >> 2, q = lane & 3;
#pragma unroll 1
    for (int level = 0; level < 5; ++level) {
        float factors[ROWS][CHANNELS];
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            const int token = r + 8 * m, border = (token >> (level + 1) << (level + 1)) + (1 << level) - 1;
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) {
                // of the rows of a thread, which must be known to the compiler, that of the border: border / 8
                const float there = level < 3 ? sums[m][c] : level == 3 ? sums[m & ~1][c] : sums[1][c];
                const float distance = sums[m][c] - from_lane(there, (border & 7) * 4 + q);
                factors[m][c] = power_of_two(token > border ? distance : -distance);
            }
        }
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

// 32 channels of a chunk: their part in its pairs, and what they make of its queries, keys and weights
template <typename Out, typename Decay>
__device__ int prepare_channels(float (&overlaps)[TILES][4], float (&weighed)[TILES][4], float (&own)[ROWS],
                                unsigned fetched, unsigned weights, Out queries, Out keys, Decay decay,
                                const Chunk& chunk, int width, int group, const float (&strength)[ROWS], float scale,
                                int lane) {
    const int r = lane >> 2, quad = lane & 3, column = GROUP * group + CHANNELS * quad;
    float gates[8][4], sums[ROWS][CHANNELS];
    unsigned query[ROWS][4], key[ROWS][4];
    take_rows(query, fetched);
    take_rows(key, fetched + 4 * SLOT);
    take_gates(gates, fetched + 8 * SLOT);
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
            later_query[m][p] = pack(q0 * rise0, q1 * rise1);
            later_key[m][p] = pack(k0 * rise0, k1 * rise1);
            earlier_key[m][p] = pack(k0 * fall0, k1 * fall1);
            whole[c] = rise0 * from_start[c], whole[d] = rise1 * from_start[d];
            of_query[p] = pack(q0 * whole[c] * scale, q1 * whole[d] * scale);
            of_key[p] = pack(k0 * fall0 * to_end[c], k1 * fall1 * to_end[d]);
            of_weight[p] = pack(k0 * whole[c] * strength[m], k1 * whole[d] * strength[m]);
        }
        const long long at = (chunk.index * TOKENS + r + 8 * m) * width + column;
        store16(queries, at, uint4{of_query[0], of_query[1], of_query[2], of_query[3]});
        store16(keys, at, uint4{of_key[0], of_key[1], of_key[2], of_key[3]});
        put16(weights + m * SLOT, uint4{of_weight[0], of_weight[1], of_weight[2], of_weight[3]});
        if (m == 3 && r == 7) {
            store16(decay, chunk.index * width + column, as_bits(whole[0], whole[1], whole[2], whole[3]));
            store16(decay, chunk.index * width + column + 4, as_bits(whole[4], whole[5], whole[6], whole[7]));
        }
    }
    if (!is_steep) add_flat_pairs(overlaps, weighed, later_query, later_key, earlier_key);
    return first_nan;
}

// a NaN gate: the queries are NaN from its token on, and the decay of the whole chunk
template <typename Out, typename Decay>
__device__ void spread_nan(Out queries, Decay decay, const Chunk& chunk, int width, int first_nan, int lane) {
    const int r = lane >> 2, quad = lane & 3;
    const unsigned nan = 0x7fff7fffu, wide_nan = 0x7fffffffu;
    for (int column = CHANNELS * quad; column < width; column += GROUP) {
#pragma unroll
        for (int m = 0; m < ROWS; ++m)
            if (r + 8 * m >= first_nan)
                store16(queries, (chunk.index * TOKENS + r + 8 * m) * width + column, uint4{nan, nan, nan, nan});
        if (r == 7) {
            store16(decay, chunk.index * width + column, uint4{wide_nan, wide_nan, wide_nan, wide_nan});
            store16(decay, chunk.index * width + column + 4, uint4{wide_nan, wide_nan, wide_nan, wide_nan});
        }
    }
}

template <int WIDTH, typename In, typename Gates, typename Beta, typename Bounds, typename Out, typename Decay>
__device__ void prepare(In q, In k, In v, Gates g, Beta beta, Bounds bounds, Out weights, Out values, Out queries, Out keys,
                        Out scores, Out inverse_out, Decay decay, float scale, int packed, int length,
                        int chunks_per_sequence, int heads, int width_v, int keeps_inverse) {
    const int lane = threadIdx.x, r = lane >> 2, quad = lane & 3, groups = WIDTH / GROUP;
    const unsigned fetched = start_of_shared() + 16 * lane, unsolved = fetched + 2 * STAGE_SLOTS * SLOT;
    const Chunk chunk = chunk_of(bounds, packed, length, chunks_per_sequence, heads);
    const auto fetch = [&](int group) {  // the channels of a group, then the values of one
        const unsigned slots = fetched + (group & 1) * STAGE_SLOTS * SLOT;
        const int column = (group < groups ? group : group - groups) * GROUP + CHANNELS * quad;
        if (group < groups) {
            fetch_rows(slots, q, chunk, WIDTH, column, r);
            fetch_rows(slots + 4 * SLOT, k, chunk, WIDTH, column, r);
            fetch_gates(slots + 8 * SLOT, g, chunk, WIDTH, group * GROUP + 4 * r, quad);
        } else if (column < width_v) {
            fetch_rows(slots, v, chunk, width_v, column, r);
        }
        end_copies();
        return fetched + ((group + 1) & 1) * STAGE_SLOTS * SLOT;  // those before
    };
    fetch(0);
    float strength[ROWS], own[ROWS] = {};
#pragma unroll
    for (int m = 0; m < ROWS; ++m) strength[m] = chunk.has(r + 8 * m) ? beta[chunk.row(r + 8 * m)] : 0.0f;
    float overlaps[TILES][4] = {}, weighed[TILES][4] = {};
    int first_nan = TOKENS;
#pragma unroll 1
    for (int group = 0; group < groups; ++group) {
        const unsigned slots = fetch(group + 1);
        await_copies<1>();
        first_nan = least(first_nan, prepare_channels(overlaps, weighed, own, slots, unsolved + group * ROWS * SLOT, queries,
                                                      keys, decay, chunk, WIDTH, group, strength, scale, lane));
    }
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
        own[m] += from_lane(own[m], lane ^ 1);
        own[m] += from_lane(own[m], lane ^ 2);
    }
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
    if (keeps_inverse) store_inverse(inverse_out, chunk, inverse, lane);
    unsigned rows[ROWS][4];
    uint4 solved[ROWS];
#pragma unroll 1
    for (int group = 0; group < groups; ++group) {
        take_rows(rows, unsolved + group * ROWS * SLOT);
        solve(inverse, rows, solved);
        store_rows(weights, chunk, WIDTH, GROUP * group + CHANNELS * quad, solved, r);
    }
#pragma unroll 1
    for (int group = 0; group * GROUP < width_v; ++group) {
        const unsigned slots = fetch(groups + group + 1);
        await_copies<1>();
        take_rows(rows, slots);
#pragma unroll
        for (int m = 0; m < ROWS; ++m)
#pragma unroll
            for (int p = 0; p < 4; ++p)
                rows[m][p] = pack(low_of(rows[m][p]) * strength[m], high_of(rows[m][p]) * strength[m]);
        solve(inverse, rows, solved);
        store_rows(values, chunk, width_v, GROUP * group + CHANNELS * quad, solved, r);
    }
    if (first_nan < TOKENS) spread_nan(queries, decay, chunk, WIDTH, first_nan, lane);
}

// ---------------------------------------------------------------- from chunk to chunk
// A warp walks with 16 values of the state, all channels of them in registers: a sum of products is at once an operand of
// the next product, so warps meet only where the next chunk arrives in shared memory.
#define STAGES 3
#define WARPS 2
#define VALUES (16 * WARPS)  // of a block

template <int WIDTH> struct Stage {
    static const int WEIGHTS = 0, QUERIES = TOKENS * WIDTH * 2, KEYS = 2 * QUERIES, NEW = 3 * QUERIES;
    static const int SCORES = NEW + TOKENS * VALUES * 2, DECAY = SCORES + TOKENS * TOKENS * 2;
    static const int BYTES = DECAY + WIDTH * 4;
};

// where 16 bytes of a row lie in shared memory: such that eight rows can be read at once
template <int PARTS> __device__ unsigned at_part(int row, int part) {
    return (row * PARTS + (part ^ (PARTS >= 8 ? row & 7 : row >> 1 & 3))) * 16;
}

// 32 rows of PARTS * 16 bytes. A thread copies one part of every so-manieth row, and every eighth part if there are more
template <int PARTS, typename Tensor> __device__ void copy_rows(unsigned to, Tensor from, long long at, int row_width) {
    const int beside = PARTS < 8 ? PARTS : 8, rows = WARPS * 32 / beside;
    const int row = threadIdx.x / beside, part = threadIdx.x % beside;
    to += at_part<PARTS>(row, part);
    at += (long long)row * row_width + part * 8;
#pragma unroll
    for (int i = 0; i < TOKENS / rows; ++i)
#pragma unroll
        for (int j = 0; j < PARTS / beside; ++j)
            copy16(to + i * rows * PARTS * 16 + j * 128, from, at + (long long)i * rows * row_width + j * 64);
}

template <int WIDTH, typename In, typename Decay>
__device__ void copy_chunk(unsigned stage, In weights, In values, In queries, In keys, In scores, Decay decay,
                           long long chunk, int width_v) {
    typedef Stage<WIDTH> At;
    copy_rows<WIDTH / 8>(stage + At::WEIGHTS, weights, chunk * (TOKENS * WIDTH), WIDTH);
    copy_rows<WIDTH / 8>(stage + At::QUERIES, queries, chunk * (TOKENS * WIDTH), WIDTH);
    copy_rows<WIDTH / 8>(stage + At::KEYS, keys, chunk * (TOKENS * WIDTH), WIDTH);
    copy_rows<VALUES / 8>(stage + At::NEW, values, chunk * TOKENS * width_v + blockIdx.y * VALUES, width_v);
    copy_rows<TOKENS / 8>(stage + At::SCORES, scores, chunk * (TOKENS * TOKENS), TOKENS);
    if (threadIdx.x < WIDTH / 4) copy16(stage + At::DECAY + 16 * threadIdx.x, decay, chunk * WIDTH + 4 * threadIdx.x);
}

// sums[values, tokens] += operand[values, channels] @ rows[tokens, channels]^T
template <int WIDTH>
__device__ void multiply_by_rows(float (&sums)[4][4], const unsigned (&operand)[WIDTH / 16][4], unsigned rows, int lane) {
    const unsigned at = rows + at_part<WIDTH / 8>(lane & 7, lane >> 3);
#pragma unroll
    for (int k = 0; k < WIDTH / 32; ++k)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            unsigned b[4];
            load_matrices(b, (at ^ 64 * k) + 128 * WIDTH / 8 * n);  // rows begin at multiples of 128: part 4*k is a bit
            multiply(sums[n], operand[2 * k], b[0], b[1]);
            multiply(sums[n], operand[2 * k + 1], b[2], b[3]);
        }
}

template <int WIDTH, typename In, typename Decay, typename Final, typename Out, typename Bounds>
__device__ void scan(In weights, In values, In queries, In keys, In scores, Decay decay, Decay initial, Final final,
                     Out out, Bounds bounds, Bounds first_chunk, int packed, int length, int chunks_per_sequence,
                     int heads, int width_v, int has_initial) {
    typedef Stage<WIDTH> At;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, r = lane >> 2, q = lane & 3;
    const long long sequence = blockIdx.x / heads, head = blockIdx.x % heads;
    const int value = blockIdx.y * VALUES + 16 * warp + r;  // and value + 8
    const long long state_at = (long long)blockIdx.x * WIDTH * width_v + value;
    const long long begin = packed ? first_chunk[sequence] : sequence * chunks_per_sequence;
    const int num_chunks = packed ? int(first_chunk[sequence + 1] - begin) : chunks_per_sequence;
    float state[WIDTH / 8][4];
#pragma unroll
    for (int n = 0; n < WIDTH / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            state[n][e] = has_initial ? initial[state_at + (long long)column_of(n, e, q) * width_v + 8 * (e >> 1)] : 0.0f;
#pragma unroll
    for (int ahead = 0; ahead < STAGES - 1; ++ahead) {
        if (ahead < num_chunks)
            copy_chunk<WIDTH>(start_of_shared() + ahead * At::BYTES, weights, values, queries, keys, scores, decay,
                              (begin + ahead) * heads + head, width_v);
        end_copies();
    }
#pragma unroll 1
    for (int step = 0; step < num_chunks; ++step) {
        await_copies<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < num_chunks)
            copy_chunk<WIDTH>(start_of_shared() + (step + STAGES - 1) % STAGES * At::BYTES, weights, values, queries, keys, scores,
                              decay, (begin + step + STAGES - 1) * heads + head, width_v);
        end_copies();
        const unsigned stage = start_of_shared() + step % STAGES * At::BYTES;
        unsigned operand[WIDTH / 16][4];
#pragma unroll
        for (int k = 0; k < WIDTH / 16; ++k) {
            operand[k][0] = pack(state[2 * k][0], state[2 * k][1]);
            operand[k][1] = pack(state[2 * k][2], state[2 * k][3]);
            operand[k][2] = pack(state[2 * k + 1][0], state[2 * k + 1][1]);
            operand[k][3] = pack(state[2 * k + 1][2], state[2 * k + 1][3]);
        }
        float known[4][4] = {}, answer[4][4] = {};
        multiply_by_rows<WIDTH>(known, operand, stage + At::WEIGHTS, lane);
        unsigned upper[4], lower[4], fresh[2][4];
        load_transposed(upper, stage + At::NEW + at_part<VALUES / 8>(lane, 2 * warp));
        load_transposed(lower, stage + At::NEW + at_part<VALUES / 8>(lane, 2 * warp + 1));
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            fresh[n >> 1][2 * (n & 1)] = pack(low_of(upper[n]) - known[n][0], high_of(upper[n]) - known[n][1]);
            fresh[n >> 1][2 * (n & 1) + 1] = pack(low_of(lower[n]) - known[n][2], high_of(lower[n]) - known[n][3]);
        }
        const unsigned keys_at = stage + At::KEYS + at_part<WIDTH / 8>(lane, 0);
#pragma unroll
        for (int n = 0; n < WIDTH / 8; ++n) {
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                const float kept = shared_float(stage + At::DECAY + 4 * column_of(n, side, q));
                state[n][side] *= kept, state[n][2 + side] *= kept;
            }
            unsigned b[4];
            load_transposed(b, keys_at ^ 16 * n);
            multiply(state[n], fresh[0], b[0], b[1]);
            multiply(state[n], fresh[1], b[2], b[3]);
        }
        multiply_by_rows<WIDTH>(answer, operand, stage + At::QUERIES, lane);
        long long first = sequence * length + (long long)step * TOKENS, end = (sequence + 1) * length;
        if (packed) first = bounds[2 * (begin + step)], end = bounds[2 * (begin + step) + 1];
        const int num_tokens = end - first < TOKENS ? int(end - first) : TOKENS;
        const long long out_at = ((first + r) * heads + head) * width_v + blockIdx.y * VALUES + 16 * warp + 2 * q;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            unsigned b[4];
            load_matrices(b, stage + At::SCORES + at_part<TOKENS / 8>(lane & 7, lane >> 3) + 512 * n);
            multiply(answer[n], fresh[0], b[0], b[1]);
            multiply(answer[n], fresh[1], b[2], b[3]);
            const unsigned of_upper = transposed(pack(answer[n][0], answer[n][1]));
            const unsigned of_lower = transposed(pack(answer[n][2], answer[n][3]));
            if (8 * n + r < num_tokens) {
                store4(out, out_at + (long long)n * (8 * heads * width_v), of_upper);
                store4(out, out_at + (long long)n * (8 * heads * width_v) + 8, of_lower);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < WIDTH / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            final[state_at + (long long)column_of(n, e, q) * width_v + 8 * (e >> 1)] = state[n][e];
}

extern "C" __global__ void kda_prepare_64(
    const bfloat16* q, const bfloat16* k, const bfloat16* v, const float* g, const float* beta, const long long* bounds,
    bfloat16* weights, bfloat16* values, bfloat16* queries, bfloat16* keys, bfloat16* scores, bfloat16* inverse,
    float* decay, float scale, int packed, int length, int chunks_per_sequence, int heads, int width_v, int keeps_inverse) {
    prepare<64>(q, k, v, g, beta, bounds, weights, values, queries, keys, scores, inverse, decay, scale, packed, length,
                chunks_per_sequence, heads, width_v, keeps_inverse);
}

extern "C" __global__ void kda_prepare_128(
    const bfloat16* q, const bfloat16* k, const bfloat16* v, const float* g, const float* beta, const long long* bounds,
    bfloat16* weights, bfloat16* values, bfloat16* queries, bfloat16* keys, bfloat16* scores, bfloat16* inverse,
    float* decay, float scale, int packed, int length, int chunks_per_sequence, int heads, int width_v, int keeps_inverse) {
    prepare<128>(q, k, v, g, beta, bounds, weights, values, queries, keys, scores, inverse, decay, scale, packed, length,
                 chunks_per_sequence, heads, width_v, keeps_inverse);
}

extern "C" __global__ void kda_scan_64(
    const bfloat16* weights, const bfloat16* values, const bfloat16* queries, const bfloat16* keys, const bfloat16* scores,
    const float* decay, const float* initial, float* final, bfloat16* out, const long long* bounds,
    const long long* first_chunk, int packed, int length, int chunks_per_sequence, int heads, int width_v,
    int has_initial) {
    scan<64>(weights, values, queries, keys, scores, decay, initial, final, out, bounds, first_chunk, packed, length,
             chunks_per_sequence, heads, width_v, has_initial);
}

extern "C" __global__ void kda_scan_128(
    const bfloat16* weights, const bfloat16* values, const bfloat16* queries, const bfloat16* keys, const bfloat16* scores,
    const float* decay, const float* initial, float* final, bfloat16* out, const long long* bounds,
    const long long* first_chunk, int packed, int length, int chunks_per_sequence, int heads, int width_v,
    int has_initial) {
    scan<128>(weights, values, queries, keys, scores, decay, initial, final, out, bounds, first_chunk, packed, length,
             chunks_per_sequence, heads, width_v, has_initial);
}
