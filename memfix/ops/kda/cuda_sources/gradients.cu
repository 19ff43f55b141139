// The gradients inside a chunk.
//
// A block takes a chunk of a head, and a warp two parts of its channels, one after the other. Slots that all warps read hold
// the gradients of outputs, V', the gradients of values, and the values. Each warp prefetches the states of its parts, then
// queries, keys and gates, into its own ring of stages. Before its parts, a warp does its share of the values, then of the
// pairs, for all warps.
//
// The loss depends on the sum of gates from a chunk's start to token t through t's read of the first state, its write to the
// last state, and its pairs. Z_t is the derivative with respect to that sum. The gradient of a gate is the sum of Z over its
// own and all later tokens, plus one term of the last state for all gates. In the gradients of gates before both tokens of a
// pair, the pair's two terms cancel, so both are products of the same rounded factors.
#include "gradient_products.h"

#define RING 4  // stages per warp
#define PAIR_BYTES (TOKENS * TOKENS * 2)
// matrices in the slots of a block; WRITTEN holds the gradients of V', then of the right side of the triangular system
enum { OUTPUTS, NEW_VALUES, WRITTEN, OLD_VALUES, MATRICES };

// where a block's shared memory holds what; slots are those of this lane, and stages those of this warp
struct SharedLayout {
    int groups;
    unsigned slots, pairs, inverse, strengths, ring;

    __device__ SharedLayout(int groups, int warp, int lane) : groups(groups) {
        slots = start_of_shared() + 16 * lane, pairs = start_of_shared() + MATRICES * groups * ROWS * SLOT;
        inverse = pairs + 2 * PAIR_BYTES, strengths = pairs + 3 * PAIR_BYTES;  // later pairs overwrite the inverse
        ring = strengths + TOKENS * 4 + warp * (RING * PART_STAGE);
    }
    __device__ unsigned slots_of(int matrix, int group) const { return slots + (matrix * groups + group) * ROWS * SLOT; }
    __device__ unsigned stage_of(int item) const { return ring + item % RING * PART_STAGE; }
    __device__ void set_strength(int token, float strength) const {
        store_shared4(strengths + 4 * token, __float_as_uint(strength));
    }
};

// copies what all warps read
template <typename In>
__device__ void copy_matrices(const SharedLayout& shared, In grad_out, In v, In values, In grad_values, In inverse,
                              const Chunk& chunk, int width_v, int warp, int lane) {
    for (int i = warp; i < 2 * shared.groups; i += WIDTH / 32) {
        const int group = i >> 1, of_value = GROUP * group + 8 * (lane & 3);
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            const int token = (lane >> 2) + 8 * m;
            const long long at = (i & 1 ? chunk.at(token, width_v) : (chunk.index * TOKENS + token) * width_v) + of_value;
            if (i & 1) {
                async_copy16(shared.slots_of(OUTPUTS, group) + m * SLOT, grad_out, at, chunk.has(token));
                async_copy16(shared.slots_of(OLD_VALUES, group) + m * SLOT, v, at, chunk.has(token));
            } else {
                async_copy16(shared.slots_of(NEW_VALUES, group) + m * SLOT, values, at);
                async_copy16(shared.slots_of(WRITTEN, group) + m * SLOT, grad_values, at);
            }
        }
    }
    for (int i = threadIdx.x; i < TOKENS * 4; i += WIDTH)  // each 16 bytes of a row
        async_copy16(shared.inverse + at_part<TOKENS / 8>(i >> 2, i & 3), inverse,
                     chunk.index * (TOKENS * TOKENS) + i * 8);
    commit_copies();
}

// the gradient of V' becomes that of the triangular system's right side, which contains beta*v; stores the gradient of v
template <typename Out>
__device__ void solve_for_values(float (&of_strength)[ROWS], const SharedLayout& shared, const float (&strength)[ROWS],
                                 float poison, Out grad_v, const Chunk& chunk, int width_v, int warp, int lane) {
    const int r = lane >> 2, quad = lane & 3;
    const TransposedInverse inverse(shared.inverse, lane);
#pragma unroll 1
    for (int group = warp; group < shared.groups; group += WIDTH / 32) {
        unsigned rows[ROWS][4], old[ROWS][4], written[ROWS][4], given[ROWS][4];
        load_rows(rows, shared.slots_of(WRITTEN, group));
        load_rows(old, shared.slots_of(OLD_VALUES, group));
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            float halves[2][4] = {};
            inverse.solve(halves[0], halves[1], rows, p);
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
            store_shared16(shared.slots_of(WRITTEN, group) + m * SLOT,
                           uint4{written[m][0], written[m][1], written[m][2], written[m][3]});
            if (chunk.has(r + 8 * m))
                store16(grad_v, chunk.at(r + 8 * m, width_v) + GROUP * group + 8 * quad,
                        uint4{given[m][0], given[m][1], given[m][2], given[m][3]});
        }
    }
}

// the gradients of scores and overlaps; a warp takes one tile of one of them at a time
__device__ void find_pair_gradients(const SharedLayout& shared, const float (&strength)[ROWS], float scale, int warp,
                                    int lane) {
#pragma unroll 1
    for (int i = warp; i < 2 * TILES; i += WIDTH / 32) {
        const bool is_score = i < TILES;
        const int t = is_score ? i : i - TILES, m = t < 2 ? 0 : 1, n = t - 2 * m;
        float sums[4] = {};
        for (int group = 0; group < shared.groups; ++group) {
            const unsigned left = shared.slots_of(is_score ? OUTPUTS : WRITTEN, group) + 2 * m * SLOT;
            const uint4 x = load_shared16(left), y = load_shared16(left + SLOT);
            const uint4 z = load_shared16(shared.slots_of(NEW_VALUES, group) + n * SLOT);
            const unsigned first[4] = {x.x, y.x, x.y, y.y}, second[4] = {x.z, y.z, x.w, y.w};
            multiply(sums, first, z.x, z.y);
            multiply(sums, second, z.z, z.w);
        }
        const float times = is_score ? scale : -1.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float a = sums[2 * half] * times, b = sums[2 * half + 1] * times;
            const unsigned at = shared.pairs + at_part<TOKENS / 8>(row_of(m, 2 * half, lane >> 2), n) + 4 * (lane & 3);
            const float weight = from_rows(strength, m, half);
            store_shared4(is_score ? at : at + PAIR_BYTES, pack(a, b));
            if (!is_score) store_shared4(at + 2 * PAIR_BYTES, pack(a * weight, b * weight));
        }
    }
}

// the gradients of a part's channels
struct PartGradients {
    Sums of_query, of_key, z;  // z first holds the negated gradient of weighed keys

    // adds what 32 values of the chunk's first state contribute, and of the gradient of its last
    __device__ void add_states(float (&of_decay)[2], const SharedLayout& shared, int group, unsigned stage, int lane) {
        StateRows state, grad_state;
        state.load(stage, lane);
        grad_state.load(stage + PART_STAGE / 2, lane);
#pragma unroll
        for (int t = 0; t < 8; ++t)
#pragma unroll
            for (int c = 0; c < 2; ++c) of_decay[c] += half_of(state.rows[t], c) * half_of(grad_state.rows[t], c);
        of_query.add_product(shared.slots_of(OUTPUTS, group), state);
        z.add_product(shared.slots_of(WRITTEN, group), state);
        of_key.add_product(shared.slots_of(NEW_VALUES, group), grad_state);
    }

    // decays the products with states to gradients, and adds the pairs of a token with itself (own) in one channel; z
    // becomes Z without other pairs. of_decay is the gradient of the chunk's decay of this channel
    __device__ void decay(float (&of_strength)[ROWS], const float (&sums)[ROWS][CHANNELS], const float (&own)[ROWS],
                          const float (&strength)[ROWS], const unsigned (&query)[ROWS], const unsigned (&key)[ROWS],
                          float of_decay, int c, float scale, int lane) {
        const float end = shuffle(sums[3][c], 28 + (lane & 3));
        float of_last = 0.0f;  // the term of the last state for all gates, added to Z of the last token
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            const float a = half_of(query[m], c & 1), b = half_of(key[m], c & 1);
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
        of_last += power_of_two(end) * of_decay;
        z.at(ROWS - 1, c) += lane >> 2 == 7 ? of_last : 0.0f;
    }

    // z = the sum of Z over a token and all later ones
    __device__ void sum_over_later(int lane) {
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) {
#pragma unroll
            for (int step = 1; step < 8; step *= 2)
#pragma unroll
                for (int m = 0; m < ROWS; ++m) {
                    const float later = shuffle(z.at(m, c), lane + 4 * step & 31);
                    z.at(m, c) += (lane >> 2) + step < 8 ? later : 0.0f;
                }
#pragma unroll
            for (int m = ROWS - 2; m >= 0; --m) z.at(m, c) += shuffle(z.at(m + 1, c), lane & 3);
        }
    }

    template <typename Out, typename Gates>
    __device__ void store(Out grad_q, Out grad_k, Gates grad_g, const Chunk& chunk, int part, float poison, int lane) {
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            const int token = (lane >> 2) + 8 * m;
            if (!chunk.has(token)) continue;
            const long long at = chunk.at(token, WIDTH) + PART * part + CHANNELS * (lane & 3);
            const auto pair_of = [&](Sums& sums, int p) {
                return pack(sums.at(m, 2 * p) + poison, sums.at(m, 2 * p + 1) + poison);
            };
            store8(grad_q, at, uint2{pair_of(of_query, 0), pair_of(of_query, 1)});
            store8(grad_k, at, uint2{pair_of(of_key, 0), pair_of(of_key, 1)});
            if (sizeof(GATE) == 2)
                store8(grad_g, at, uint2{pair_of(z, 0), pair_of(z, 1)});
            else
                store16(grad_g, at, as_bits(z.at(m, 0) + poison, z.at(m, 1) + poison, z.at(m, 2) + poison, z.at(m, 3) + poison));
        }
    }
};

// adds what pairs contribute to the gradients. exponent(m, c) gives the factor of a token that is later in a pair; as the
// earlier one, its exponent is multiplied by sign
template <typename Exponent>
__device__ void add_pairs(PartGradients& part, float (&of_strength)[ROWS], unsigned queries, unsigned keys,
                          Exponent exponent, float sign, const Levels& levels, unsigned pairs, int lane) {
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
            part.z.at(m, 2 * p + side) += half_of(query[m], side) * a;
            part.of_query.at(m, 2 * p + side) += a * rise[m][side];
        });
        levels.multiply_by(to_later[0], to_later[1], weighed, columns, lane);
        for_each(to_later, [&](int m, int side, float b) {
            part.z.at(m, 2 * p + side) += half_of(later[m], side) * b;
            part.of_key.at(m, 2 * p + side) += b * rise[m][side];
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
            part.z.at(m, 2 * p + side) -= half_of(earlier[m], side) * d;
            part.of_key.at(m, 2 * p + side) += d * fall[m][side];
        });
    }
}

// finds the gradients of a part, whose queries, keys and gates are in shared memory, from its products with states
__device__ void finish_part(PartGradients& part, float (&of_strength)[ROWS], float (&of_decay)[2],
                            const SharedLayout& shared, unsigned queries, unsigned gates_at, float scale, int lane) {
    const unsigned keys = queries + PART_KEYS;
    const int quad = lane & 3;
    float gates[8][2], sums[ROWS][CHANNELS], middle[CHANNELS], own[ROWS], strength[ROWS];
    load_gates(gates, gates_at, lane);
    sum_gates(sums, gates, lane >> 2, quad);
    const bool is_steep = any_lane(find_middle(middle, sums, quad));
    if (is_steep) {
        clean(gates, quad);
        sum_gates(sums, gates, lane >> 2, quad);
    }
#pragma unroll
    for (int m = 0; m < ROWS; ++m) own[m] = diagonal_of(shared.pairs, (lane >> 2) + 8 * m);
    load_strengths(strength, shared.strengths, lane >> 2);
#pragma unroll
    for (int c = 0; c < 2; ++c) of_decay[c] = sum_over_quads(of_decay[c], lane);
#pragma unroll
    for (int p = 0; p < 2; ++p) {
        unsigned query[ROWS], key[ROWS];
#pragma unroll
        for (int m = 0; m < ROWS; ++m) query[m] = pair_in(queries, m, p, lane), key[m] = pair_in(keys, m, p, lane);
#pragma unroll
        for (int side = 0; side < 2; ++side)
            part.decay(of_strength, sums, own, strength, query, key, shuffle(of_decay[side], 4 * (2 * quad + p)),
                       2 * p + side, scale, lane);
    }
    if (is_steep) {
#pragma unroll 1
        for (int level = 0; level < 5; ++level) {
            const auto exponent = [&](int m, int c) { return distance_of(sums, m, c, level, lane); };
            const Levels levels(level, level + 1, lane);
            add_pairs(part, of_strength, queries, keys, exponent, 1.0f, levels, shared.pairs, lane);
        }
    } else {  // all pairs decay from and to the middle of the chunk
        const auto exponent = [&](int m, int c) { return sums[m][c] - middle[c]; };
        add_pairs(part, of_strength, queries, keys, exponent, -1.0f, Levels(0, 5, lane), shared.pairs, lane);
    }
    part.sum_over_later(lane);
}

// the sum of a token's strength gradients over all warps, for the lane of that token
__device__ float sum_over_warps(float (&of_strength)[ROWS], const SharedLayout& shared, int warp, int lane) {
    const unsigned sums = start_of_shared() + OLD_VALUES * shared.groups * ROWS * SLOT;  // values are no longer read
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
        of_strength[m] = sum_over_quads(of_strength[m], lane);
        const unsigned at = sums + 4 * (TOKENS * warp + (lane >> 2) + 8 * m);
        if ((lane & 3) == 0) store_shared4(at, __float_as_uint(of_strength[m]));
    }
    __syncthreads();
    float all = 0.0f;
#pragma unroll
    for (int i = 0; i < WIDTH / 32; ++i) all += load_shared_float(sums + 4 * (TOKENS * i + lane));
    return all;
}

extern "C" __global__ void __launch_bounds__(WIDTH, 384 / WIDTH) kda_gradients(
    const bfloat16* q, const bfloat16* k, const bfloat16* v, const GATE* g, const float* beta, const bfloat16* narrow_beta,
    const long long* bounds, const bfloat16* inverse, const float* growth, const bfloat16* values, const bfloat16* states,
    const bfloat16* grad_out, const bfloat16* grad_values, const bfloat16* grad_states, bfloat16* grad_q, bfloat16* grad_k,
    bfloat16* grad_v, GATE* grad_g, float* grad_beta, bfloat16* narrow_grad_beta, float scale, int start_row,
    int length, int stride, int chunks_per_sequence, int heads, int width_v) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, groups = width_v / GROUP, per_part = groups + 2;
    const Chunk chunk = chunk_of(bounds, start_row, length, stride, chunks_per_sequence, heads);
    const SharedLayout shared(groups, warp, lane);
    // prefetches an item of a part: 32 values of both states at a time, then queries and keys, then gates
    const auto fetch = [&](int item) {
        const int part_of_warp = item < per_part ? 0 : 1, part = 2 * warp + part_of_warp, i = item - part_of_warp * per_part;
        const unsigned stage = shared.stage_of(item);
        if (i < groups) {
            const long long at = (chunk.index * width_v + GROUP * i) * WIDTH + PART * part;
            StateRows::copy(stage, states, at, lane);
            StateRows::copy(stage + PART_STAGE / 2, grad_states, at, lane);
        } else if (i == groups) {
            copy_part(stage, q, k, chunk, part, lane);
        } else if (i == groups + 1) {
            copy_gates(stage, g, chunk, part, lane);
        }
        commit_copies();
    };
    copy_matrices(shared, grad_out, v, values, grad_values, inverse, chunk, width_v, warp, lane);
#pragma unroll
    for (int item = 0; item < RING; ++item) fetch(item);
    if (warp == 0) shared.set_strength(lane, strength_of(beta, narrow_beta, chunk, lane));
    const float grown = growth[chunk.index], poison = grown != grown ? grown : 0.0f;
    float strength[ROWS], of_strength[ROWS] = {};
    await_copies<RING>();
    __syncthreads();
    load_strengths(strength, shared.strengths, lane >> 2);
    solve_for_values(of_strength, shared, strength, poison, grad_v, chunk, width_v, warp, lane);
    __syncthreads();
    find_pair_gradients(shared, strength, scale, warp, lane);
    __syncthreads();
#pragma unroll 1
    for (int part_of_warp = 0; part_of_warp < 2; ++part_of_warp) {
        const int first = part_of_warp * per_part;
        PartGradients part;
        float of_decay[2] = {};
#pragma unroll 1
        for (int group = 0; group < groups; ++group) {
            await_stage<RING - 1>();
            part.add_states(of_decay, shared, group, shared.stage_of(first + group), lane);
            await_warp();
            fetch(first + group + RING);
        }
        await_stage<RING - 2>();
        finish_part(part, of_strength, of_decay, shared, shared.stage_of(first + groups),
                    shared.stage_of(first + groups + 1), scale, lane);
        await_warp();
        fetch(first + groups + RING), fetch(first + groups + 1 + RING);
        part.store(grad_q, grad_k, grad_g, chunk, 2 * warp + part_of_warp, poison, lane);
    }
    const float all = poison + sum_over_warps(of_strength, shared, warp, lane);
    if (warp == 0 && chunk.has(lane)) store_either(grad_beta, narrow_grad_beta, chunk.at(lane, 1), all);
}
