// Parts of a chunk, 16 channels of its queries, keys and gates, and the sums of their gates.
#include "chunk.h"

#define STEEPEST 116.0f       // as _steepest in kernels.py
#define LOWEST_GATE -300.0f   // stands for -inf: its power of two is 0 too, but -inf itself would turn sums into NaN
#define LOG2_E 1.4426950408889634f
#define ONES 0x3f803f80u      // two ones in bfloat16

// The stage of a part in shared memory holds its queries and keys in bfloat16, or its gates in the type GATE, for which a
// file is compiled: float or bfloat16. A lane copies 16 bytes that other lanes read, so the warp must synchronize
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
#define GATE_ROW (PART * int(sizeof(GATE)))  // bytes of a token's gates
__device__ int token_of_gate(int t, int q) { return 2 * q + (t & 1) + 8 * (t >> 1); }
template <typename Gates>
__device__ void copy_gates(unsigned stage, Gates g, const Chunk& chunk, int part, int lane) {
    const int lanes = GATE_ROW / 16;  // per token
#pragma unroll
    for (int i = 0; i < lanes; ++i) {
        const int place = (32 * i + lane) / lanes, token = token_of_gate(place >> 2, place & 3);
        const long long at = chunk.at(token, WIDTH) + PART * part + PART / lanes * (lane % lanes);
        async_copy16(stage + i * SLOT + 16 * lane, g, at, chunk.has(token));
    }
}
// loads gates and converts them to exponents of 2
__device__ void load_gates(float (&gates)[8][2], unsigned stage, int lane) {
#pragma unroll
    for (int t = 0; t < 8; ++t) {
        const unsigned at = stage + (4 * t + (lane & 3)) * GATE_ROW + (lane >> 2) * (GATE_ROW / 8);
        if (sizeof(GATE) == 2) {
            const unsigned two = load_shared4(at);
            gates[t][0] = low_of(two) * LOG2_E, gates[t][1] = high_of(two) * LOG2_E;
        } else {
            const uint2 two = load_shared8(at);
            gates[t][0] = __int_as_float(two.x) * LOG2_E, gates[t][1] = __int_as_float(two.y) * LOG2_E;
        }
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

// the sum of gates between row m of a thread and the border between the halves of its block at a level
__device__ float distance_of(const float (&sums)[ROWS][CHANNELS], int m, int c, int level, int lane) {
    const int token = (lane >> 2) + 8 * m, border = (token >> (level + 1) << (level + 1)) + (1 << level) - 1;
    // the border is row border/8 of its lanes; an index into registers must be known at compile time
    const float there = level < 3 ? sums[m][c] : level == 3 ? sums[m & ~1][c] : sums[1][c];
    const float distance = sums[m][c] - shuffle(there, (border & 7) * 4 + (lane & 3));
    return token > border ? distance : -distance;
}
