// Kimi delta attention in bfloat16, in chunks of 32 tokens: what all kernels share. cuda.py compiles the .cu files at run
// time and launches them; prepare in kernels.py defines the effect of a chunk on a state.
//
// A warp takes one part, 16 channels of a chunk and head, at a time and keeps it in registers. A thread holds the rows
// (tokens) r, r+8, r+16 and r+24, r = lane/4, and the 4 channels from 4*(lane%4) on: 8 bytes of a row, whose pairs are
// operands of the tensor cores as they are, because a product may sum over channels in any order. Of a group of 32 values
// it holds the 8 from 8*(lane%4) on. The four lanes that hold the same rows are a quad.
//
// Every file is compiled for a WIDTH of keys.

#define TOKENS 32     // per chunk
#define ROWS 4        // per thread
#define PART 16       // channels that a warp takes at a time: 32 would need too many registers
#define CHANNELS 4    // per thread
#define GROUP 32      // values that a warp takes at a time
#define INFINITE __int_as_float(0x7f800000)
#define WIDE_NAN 0x7fffffff

__device__ float low_of(unsigned both) { return __int_as_float(both << 16); }
__device__ float high_of(unsigned both) { return __int_as_float(both & 0xffff0000u); }
__device__ float half_of(unsigned both, int side) { return side ? high_of(both) : low_of(both); }
__device__ uint4 as_bits(float a, float b, float c, float d) {
    return uint4{__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d)};
}
__device__ int least(int a, int b) { return a < b ? a : b; }
__device__ int greatest(int a, int b) { return a > b ? a : b; }
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

// ---------------------------------------------------------------- the rows of a chunk
struct Chunk {
    long long first_row, index;
    int num_tokens, heads;
    // offset of a token's row in a tensor whose rows have this width
    __device__ long long at(int token, int width) const { return first_row * width + token * (heads * width); }
    __device__ bool has(int token) const { return token < num_tokens; }
};

template <typename Bounds>
__device__ Chunk chunk_of(Bounds bounds, int start_row, int length, int stride, int chunks_per_sequence, int heads) {
    // blocks that run at once take neighbouring heads, whose rows are adjacent in memory
    const unsigned slot = blockIdx.x / heads, head = blockIdx.x - slot * heads;
    long long first, end;
    if (length == 0) {  // packed
        first = bounds[2ll * slot];
        end = bounds[2ll * slot + 1];
    } else {
        const unsigned sequence = slot / chunks_per_sequence;
        const long long start = start_row + (long long)sequence * stride;
        first = start + (slot - sequence * chunks_per_sequence) * TOKENS;
        end = start + length;
    }
    return Chunk{first * heads + head, blockIdx.x, int(end - first < TOKENS ? end - first : TOKENS), heads};
}

// A warp prefetches into shared memory what it reads itself, so it waits for no other warp. A slot is 512 bytes of shared
// memory, 16 for each lane. Rows beyond a chunk's tokens are zeros.
#define SLOT 512
// waits until all but the last PENDING copies of the warp are there
template <int PENDING> __device__ void await_stage() {
    await_copies<PENDING>();
    await_warp();
}

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
// the strengths of a thread's rows, of which each lane loads one
template <typename Wide, typename Narrow>
__device__ void share_strengths(float (&strength)[ROWS], Wide wide, Narrow narrow, const Chunk& chunk, int lane) {
    const float own = strength_of(wide, narrow, chunk, lane);
#pragma unroll
    for (int m = 0; m < ROWS; ++m) strength[m] = shuffle(own, (lane >> 2) + 8 * m);
}
__device__ void load_strengths(float (&strength)[ROWS], unsigned strengths, int r) {
#pragma unroll
    for (int m = 0; m < ROWS; ++m) strength[m] = load_shared_float(strengths + 4 * (r + 8 * m));
}
