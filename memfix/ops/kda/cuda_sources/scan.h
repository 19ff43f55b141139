// Scans from chunk to chunk.
//
// A warp scans with 16 values of the state, and keeps all their channels in registers. The accumulators of a product are
// operands of the next product, so the warps of a block synchronize only when the next chunk arrives in shared memory.
//
// A sequence is cut into segments, which blocks scan in parallel. Where the chunks before a segment leave next to nothing
// of an earlier state, its block scans these chunks first, from a zero state; elsewhere it waits for the state that the
// block of the segment before publishes.
//
// A scan is compiled for the number of WARPS in a block, and for STAGES, the number of chunks that a block buffers in
// shared memory.
#include "chunk.h"

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

// The work of a warp in a scan: 16 values of one sequence and head, through the chunks of one segment. All segments but the
// last have segment_chunks, or if that is 0, the sequence is cut into equal ones.
template <typename Bounds> struct SegmentScan {
    Bounds bounds;
    int start_row, length, stride, heads, width_v, num_chunks, segment, first, end, lane, r, q, value;
    long long sequence, head, begin;

    __device__ SegmentScan(Bounds bounds, Bounds first_chunk, int start_row, int length, int stride,
                           int chunks_per_sequence, int heads, int width_v, int segment, int num_segments,
                           int segment_chunks = 0)
        : bounds(bounds), start_row(start_row), length(length), stride(stride), heads(heads), width_v(width_v),
          segment(segment) {
        lane = threadIdx.x & 31, r = lane >> 2, q = lane & 3;
        value = blockIdx.y * VALUES + 16 * (threadIdx.x >> 5);
        sequence = blockIdx.x / heads, head = blockIdx.x % heads;
        begin = length == 0 ? first_chunk[sequence] : sequence * chunks_per_sequence;
        num_chunks = uniform(length == 0 ? int(first_chunk[sequence + 1] - begin) : chunks_per_sequence);
        const int per_segment = segment_chunks > 0 ? segment_chunks : (num_chunks + num_segments - 1) / num_segments;
        first = least(segment * per_segment, num_chunks), end = least(first + per_segment, num_chunks);
    }
    __device__ bool is_first() const { return segment == 0; }
    __device__ bool is_last() const { return end == num_chunks; }
    __device__ bool is_empty() const { return first == end && segment > 0; }
    __device__ long long chunk(int step) const { return (begin + step) * heads + head; }
    // returns the first token of a chunk, and sets how many tokens it has
    __device__ long long first_token(int step, int& num_tokens) const {
        const long long start = start_row + sequence * stride;
        long long first = start + (long long)step * TOKENS, end = start + length;
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
    // how many chunks, from `from` on in this direction, leave next to nothing of a state; 0 if so many would be needed that
    // waiting for the neighbouring segment is faster, or if a bound in this direction is NaN or infinite
    template <typename Floats> __device__ int num_to_forget(Floats growth, int from, int direction) const {
        const int available = direction < 0 ? from + 1 : num_chunks - from;
        const int most = least(available, greatest(end - first, available / 2));
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
// whether the state with which the sequence begins in this direction has no NaN and no infinity in the block's values
template <typename Scan, typename Given> __device__ bool begins_finite(const Scan& scan, Given given) {
    if (!is_not_null(given)) return true;
    float state[WIDTH / 8][4], probe = 0.0f;
    load_state(state, scan, given, blockIdx.x);
#pragma unroll
    for (int n = 0; n < WIDTH / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) probe += state[n][e] * 0.0f;
    const unsigned flag = start_of_shared();
    if (threadIdx.x == 0) store_shared4(flag, 0u);
    __syncthreads();
    if (probe != probe) store_shared4(flag, 1u);
    __syncthreads();
    const bool is_finite = load_shared4(flag) == 0u;
    __syncthreads();  // the chunks that are copied next overwrite the flag
    return is_finite;
}
// returns how many chunks a block scans before its segment, which begins at from, from a state of zeros; or awaits and loads
// the state of the neighbouring segment, and returns 0. given is the state with which the sequence begins: a NaN in it
// reaches all segments
template <typename Scan, typename Floats, typename Given, typename States, typename Flags>
__device__ int warm_up_or_await_state(float (&state)[WIDTH / 8][4], const Scan& scan, Floats growth, Given given,
                                      States states, Flags ready, int from, int direction) {
    const int num_before = scan.num_to_forget(growth, from + direction, direction);
    if (num_before > 0 && begins_finite(scan, given)) return num_before;
    const int border = direction < 0 ? scan.segment - 1 : scan.segment;
    acquire_flag(ready, scan.flag_of(border));
    load_state(state, scan, states, scan.number_of(border));
    return 0;
}

// calls step(stage, chunk) for num_chunks chunks from `from` on, in this direction; copies the next chunks to the other
// stages meanwhile
template <typename Copy, typename Step>
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
