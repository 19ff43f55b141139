// The effect of each chunk on a state.
#include "gates.h"
#include "inverse.h"

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

// ---------------------------------------------------------------- what is stored
// stores a 32 x 32 matrix of a chunk; two_of(m, n, half) gives two neighbouring elements of one of this thread's rows
template <typename Out, typename TwoOf>
__device__ void store_matrix(Out out, const Chunk& chunk, TwoOf two_of, int lane) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                store4(out,
                       (chunk.index * TOKENS + row_of(m, 2 * half, lane >> 2)) * TOKENS + column_of(n, 0, lane & 3),
                       two_of(m, n, half));
}

// stores pairs * scale, with zeros above the diagonal
template <typename Out>
__device__ void store_pairs(Out out, const Chunk& chunk, const float (&pairs)[TILES][4], float scale, int lane) {
    const auto two_of = [&](int m, int n, int half) {
        float two[2] = {};
#pragma unroll
        for (int side = 0; side < 2; ++side)
            if (n < 2 * m + 2 && row_of(m, 2 * half, lane >> 2) >= column_of(n, side, lane & 3))
                two[side] = pairs[tile(m, n < 2 * m + 2 ? n : 0)][2 * half + side] * scale;
        return pack(two[0], two[1]);
    };
    store_matrix(out, chunk, two_of, lane);
}

template <typename Out> __device__ void store_inverse(Out out, const Chunk& chunk, const Inverse& inverse, int lane) {
    const auto two_of = [&](int m, int n, int half) {
        const int at = 2 * (n & 1) + half;
        const unsigned below = n < 2 ? inverse.joining[at] : inverse.second[at];
        return m == 1 ? below : n < 2 ? inverse.first[at] : 0u;
    };
    store_matrix(out, chunk, two_of, lane);
}

// An upper bound on the factor by which a chunk scales the length of a state, as an exponent of 2. A token scales no
// channel by more than its largest gate, and I - beta*k*k^T scales no vector by more than max(1, |1 - beta*|k|^2|). The
// bound is NaN if a gate is NaN, and INFINITE if a key, a value or a strength is NaN or infinite.
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

// prefetches 64 values of each token into a stage
#define PREPARE_VALUES 64
template <typename In>
__device__ void copy_values(unsigned stage, In v, const Chunk& chunk, int first, int width_v, int lane) {
    const int column = first + 8 * (lane & 7), token = lane >> 3;
#pragma unroll
    for (int j = 0; j < 8; ++j)
        async_copy16(stage + at_part<8>(token + 4 * j, lane & 7), v,
                     chunk.at(token + 4 * j, opaque(width_v)) + column, chunk.has(token + 4 * j) && column < width_v);
}

// overlaps become the system that the weights solve, without its diagonal of ones: the pairs of a token with earlier ones,
// times its strength
__device__ void make_system(float (&overlaps)[TILES][4], const float (&strength)[ROWS], int lane) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < 2 * m + 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                overlaps[tile(m, n)][e] = row_of(m, e, lane >> 2) > column_of(n, e, lane & 3)
                                              ? overlaps[tile(m, n)][e] * strength[2 * m + (e >> 1)]
                                              : 0.0f;
}

// stores the weights of a chunk: the inverse @ the right side in shared memory
template <typename Out>
__device__ void store_weights(Out weights, const Inverse& inverse, const Chunk& chunk, unsigned to_solve, int lane) {
    unsigned rows[ROWS][4], solved[ROWS][4];
#pragma unroll 1
    for (int group = 0; group < WIDTH / GROUP; ++group) {
        load_rows(rows, to_solve + 16 * opaque(lane) + group * ROWS * SLOT);
        solve(inverse, rows, solved);
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            const long long row = chunk.index * TOKENS + (lane >> 2) + 8 * m;
            const long long at = row * WIDTH + GROUP * group + CHANNELS * (lane & 3);
            store8(weights, at, uint2{solved[m][0], solved[m][1]});
            store8(weights, at + PART, uint2{solved[m][2], solved[m][3]});
        }
    }
}

// stores the inverse @ the values; stage_of_group(group) returns the stage with these 32 values. Returns whether a value of
// this thread's columns is NaN or infinite
template <typename Out, typename StageOf>
__device__ bool store_values(Out values, const Inverse& inverse, const Chunk& chunk, int width_v, StageOf stage_of_group,
                             int lane) {
    const int r = lane >> 2, quad = lane & 3;
    unsigned rows[ROWS][4], solved[ROWS][4];
    float nan_probe[4] = {};  // zeros times values: NaN if a value is NaN or infinite, else 0
#pragma unroll 1
    for (int group = 0; group * GROUP < width_v; ++group) {
        const unsigned stage = stage_of_group(group);
#pragma unroll
        for (int m = 0; m < ROWS; ++m) load_row(rows[m], stage + at_part<8>(r + 8 * m, group % 2 * 4 + quad));
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
    return nan_probe[0] != nan_probe[0] || nan_probe[1] != nan_probe[1];
}

// A block of one warp prepares a chunk of a head. Shared memory: two stages, first for parts, then for values; the right
// side of the system that the weights solve; and the slots of Growth.
extern "C" __global__ void __launch_bounds__(32, 12) kda_prepare(
    const bfloat16* q, const bfloat16* k, const bfloat16* v, const GATE* g, const float* beta, const bfloat16* narrow_beta,
    const long long* bounds, bfloat16* weights, bfloat16* values, bfloat16* queries, bfloat16* keys, bfloat16* scores,
    bfloat16* inverse_out, float* decay, float* growth, float scale, int start_row, int length, int stride,
    int chunks_per_sequence, int heads, int width_v) {
    const int lane = threadIdx.x, parts = WIDTH / PART;
    const Chunk chunk = chunk_of(bounds, start_row, length, stride, chunks_per_sequence, heads);
    const unsigned right_side = start_of_shared() + 4 * PART_STAGE, to_solve = right_side + 16 * lane;
    const auto stage_of = [](int i) { return start_of_shared() + i % 2 * (2 * PART_STAGE); };
    // prefetches item i: the parts of the channels come first, then the values
    const auto fetch = [&](int i) {
        if (i < parts) {
            copy_part(stage_of(i), q, k, chunk, i, opaque(lane));
            copy_gates(stage_of(i) + PART_STAGE, g, chunk, i, opaque(lane));
        } else {
            copy_values(stage_of(i), v, chunk, PREPARE_VALUES * (i - parts), width_v, lane);
        }
        commit_copies();
    };
    Growth growing = {to_solve + WIDTH / GROUP * ROWS * SLOT};
    fetch(0), fetch(1);
    float overlaps[TILES][4] = {}, weighed[TILES][4] = {};
    int first_nan = TOKENS;
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
        await_stage<1>();
        first_nan = least(first_nan, prepare_part(overlaps, weighed, growing, stage_of(part),
                                                  to_solve + part / 2 * ROWS * SLOT + part % 2 * 8, queries, keys, decay,
                                                  chunk, part, scale, lane));
        await_warp();
        fetch(part + 2);
    }
    store_pairs(scores, chunk, weighed, scale, lane);
    // chunk_of runs again: its result, kept during the loop, would take registers that the parts need
    const Chunk same = chunk_of(bounds, start_row, length, stride, chunks_per_sequence, opaque(heads));
    float strength[ROWS], blocks[3][2][4];
    share_strengths(strength, beta, narrow_beta, same, lane);
    const float bound = growing.bound(overlaps, strength, lane);
    make_system(overlaps, strength, lane);
    invert(blocks, overlaps, lane);
    if (is_not_null(inverse_out)) store_inverse(inverse_out, chunk, Inverse(blocks), lane);
    strengthen(blocks, strength, lane & 3);
    const Inverse inverse(blocks);
    store_weights(weights, inverse, chunk, right_side, lane);
    // awaits 64 values at every second group, and prefetches those after them
    const auto stage_of_group = [&](int group) {
        const int item = parts + group / 2;
        if (group % 2 == 0) {
            if (group > 0) await_warp(), fetch(item + 1);
            await_stage<1>();
        }
        return stage_of(item);
    };
    const bool has_nonfinite = any_lane(store_values(values, inverse, chunk, width_v, stage_of_group, opaque(lane)));
    if (lane == 0) growth[chunk.index] = first_nan < TOKENS ? __int_as_float(WIDE_NAN) : has_nonfinite ? INFINITE : bound;
    if (first_nan < TOKENS) spread_nan(queries, decay, chunk, first_nan, lane);
}
