// Matrix products and row maxima in float32. Compiled at run time, or by the Makefile beside; see also tiled.py.
//
// c[M, N] = a[M, K] @ b[K, N]. The strides of a and b are in elements, so that transposed operands need no copy.
// c is contiguous. Blocks have TILE x TILE threads, and threadIdx.x walks along the rows of c.

#define TILE 16
#define ROW_THREADS 256

// one thread per element of c: every thread loads a row of a and a column of b itself, 2*M*N*K loads
extern "C" __global__ void matmul_one_thread(const float* __restrict__ a, const float* __restrict__ b, float* c,
                                             int M, int N, int K, long long a_row, long long a_column,
                                             long long b_row, long long b_column) {
    const int column = blockIdx.x * TILE + threadIdx.x;
    const int row = blockIdx.y * TILE + threadIdx.y;
    if (row >= M || column >= N) return;
    float sum = 0.0f;
    for (int k = 0; k < K; ++k) sum += a[row * a_row + k * a_column] * b[k * b_row + column * b_column];
    c[(long long)row * N + column] = sum;
}

// a block loads a tile of a and one of b into shared memory, where each element serves TILE threads
extern "C" __global__ void matmul_tiled(const float* __restrict__ a, const float* __restrict__ b, float* c,
                                        int M, int N, int K, long long a_row, long long a_column,
                                        long long b_row, long long b_column) {
    __shared__ float a_tile[TILE][TILE];
    __shared__ float b_tile[TILE][TILE];
    const int x = threadIdx.x, y = threadIdx.y;
    const int first_row = blockIdx.y * TILE, first_column = blockIdx.x * TILE;
    // neighbouring threads load neighbouring addresses, also of a transposed operand
    const int a_y = a_row == 1 ? x : y, a_x = a_row == 1 ? y : x;
    const int b_y = b_row == 1 ? x : y, b_x = b_row == 1 ? y : x;
    float sum = 0.0f;
    for (int first = 0; first < K; first += TILE) {
        const long long i = first_row + a_y, k = first + a_x;
        a_tile[a_y][a_x] = i < M && k < K ? a[i * a_row + k * a_column] : 0.0f;
        const long long l = first + b_y, j = first_column + b_x;
        b_tile[b_y][b_x] = l < K && j < N ? b[l * b_row + j * b_column] : 0.0f;
        __syncthreads();
#pragma unroll
        for (int step = 0; step < TILE; ++step) sum += a_tile[y][step] * b_tile[step][x];
        __syncthreads();
    }
    const int row = first_row + y, column = first_column + x;
    if (row < M && column < N) c[(long long)row * N + column] = sum;
}

// out[row] = fmaxf over a row of x: NaN is skipped, and a row of nothing but NaN gives -inf. One block per row
extern "C" __global__ void row_max(const float* __restrict__ x, float* out, int columns, long long x_row,
                                   long long x_column) {
    __shared__ float largest[ROW_THREADS];
    const long long row = blockIdx.x;
    float own = __int_as_float(0xff800000);
    for (int column = threadIdx.x; column < columns; column += ROW_THREADS)
        own = fmaxf(own, x[row * x_row + column * x_column]);
    largest[threadIdx.x] = own;
    __syncthreads();
#pragma unroll
    for (int half = ROW_THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) largest[threadIdx.x] = fmaxf(largest[threadIdx.x], largest[threadIdx.x + half]);
        __syncthreads();
    }
    if (threadIdx.x == 0) out[row] = largest[0];
}
