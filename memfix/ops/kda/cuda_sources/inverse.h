// The inverse of I + a strictly lower triangular 32 x 32 matrix, and products by it.
#include "chunk.h"

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
