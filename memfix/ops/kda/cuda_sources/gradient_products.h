// Operands and sums of the products in a chunk's gradients.
#include "gates.h"

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
