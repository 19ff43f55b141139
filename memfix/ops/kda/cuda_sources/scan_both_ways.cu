// The scans of a backward pass, in both directions at once.
#include "scan.h"

// stores 16 values of a state in rows of channels, via shared memory that only this warp uses
template <typename Out>
__device__ void keep_state(Out states, long long at, const unsigned (&operand)[WIDTH / 16][4], int lane) {
    const unsigned mine = start_of_shared() + STAGES * Stage::BYTES + (threadIdx.x >> 5) * (16 * WIDTH * 2);
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
__device__ void scan_forward(const Scan& scan, In weights, Out values, In keys, Floats decay, Floats initial, Floats inner,
                         Out states) {
    const int lane = scan.lane, width_v = scan.width_v;
    float state[WIDTH / 8][4] = {};
    if (!scan.is_first())
        load_state(state, scan, inner, scan.number_of(scan.segment - 1));
    else if (is_not_null(initial))
        load_state(state, scan, initial, blockIdx.x);
    const auto copy = [&](unsigned stage, int step) {
        const long long chunk = scan.chunk(step);
        copy_keys(stage + Stage::WEIGHTS, weights, chunk);
        copy_keys(stage + Stage::KEYS, keys, chunk);
        copy_rows<VALUES / 8>(stage + Stage::TRANSPOSED, values, chunk * TOKENS * width_v + blockIdx.y * VALUES, width_v);
        copy_decay(stage, decay, chunk);
    };
    for_each_chunk(scan.first, scan.end - scan.first, 1, copy, [&](unsigned stage, int step) {
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
        num_before = warm_up_or_await_state(grad, scan, growth, grad_final, grad_ends, ready, scan.end - 1, 1);
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
    for_each_chunk(scan.end - 1 + num_before, num_steps, -1, copy, [&](unsigned stage, int step) {
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
    const float* decay, const float* growth, const float* initial, const float* inner, bfloat16* states,
    const bfloat16* grad_out, const float* grad_final, float* grad_initial, float* grad_ends, int* ready,
    bfloat16* grad_values, bfloat16* grad_states, const long long* bounds, const long long* first_chunk,
    int segment_chunks, int start_row, int length, int stride, int chunks_per_sequence, int heads, int width_v) {
    const int num_segments = gridDim.z / 2, order = blockIdx.z / 2;
    const bool is_forward = blockIdx.z % 2 == 1;
    const SegmentScan<decltype(bounds)> scan(bounds, first_chunk, start_row, length, stride, chunks_per_sequence, heads,
                                             width_v, is_forward ? order : num_segments - 1 - order, num_segments,
                                             segment_chunks);
    if (scan.is_empty()) return;
    if (is_forward)
        scan_forward(scan, weights, values, keys, decay, initial, inner, states);
    else
        scan_backward(scan, weights, queries, keys, scores, decay, growth, grad_out, grad_final, grad_initial, grad_ends,
                      ready, grad_values, grad_states);
}
