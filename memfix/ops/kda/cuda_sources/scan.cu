// The scan of a forward pass.
#include "scan.h"

extern "C" __global__ void kda_scan(
    const bfloat16* weights, const bfloat16* values, const bfloat16* queries, const bfloat16* keys, const bfloat16* scores,
    const float* decay, const float* growth, const float* initial, float* final, float* ends, int* ready, float* inner,
    bfloat16* out, const long long* bounds, const long long* first_chunk, int num_inner, int start_row, int length,
    int stride, int chunks_per_sequence, int heads, int width_v) {
    const SegmentScan<decltype(bounds)> scan(bounds, first_chunk, start_row, length, stride, chunks_per_sequence, heads,
                                             width_v, blockIdx.z, gridDim.z);
    if (scan.is_empty()) return;
    const int lane = scan.lane;
    float state[WIDTH / 8][4] = {};
    int num_before = 0;
    if (!scan.is_first())
        num_before = warm_up_or_await_state(state, scan, growth, initial, ends, ready, scan.first, -1);
    else if (is_not_null(initial))
        load_state(state, scan, initial, blockIdx.x);
    const auto copy = [&](unsigned stage, int step) {
        const long long chunk = scan.chunk(step);
        copy_keys(stage + Stage::WEIGHTS, weights, chunk);
        copy_keys(stage + Stage::KEYS, keys, chunk);
        copy_rows<VALUES / 8>(stage + Stage::TRANSPOSED, values, chunk * TOKENS * width_v + blockIdx.y * VALUES, width_v);
        copy_decay(stage, decay, chunk);
        if (step < scan.first) return;
        copy_keys(stage + Stage::QUERIES, queries, chunk);
        copy_rows<TOKENS / 8>(stage + Stage::SCORES, scores, chunk * (TOKENS * TOKENS), TOKENS);
    };
    // how many chunks lie between the states that a backward pass begins with, and the chunk before which the next one lies
    const int apart = greatest(1, (scan.num_chunks + num_inner) / (num_inner + 1));
    int next_inner = (scan.first / apart + 1) * apart;
    for_each_chunk(scan.first - num_before, scan.end - scan.first + num_before, 1, copy, [&](unsigned stage, int step) {
        unsigned operand[WIDTH / 16][4], fresh[2][4];
        as_operands<WIDTH / 8>(operand, state);
        float known[4][4], sums[4][4], answer[4][4];
        decay_state(state, stage, scan.q);
        multiply_by_rows(known, operand, stage + Stage::WEIGHTS, lane);
        await_wgmma<0>(known);
        find_new(fresh, sums, known, stage, lane);
        multiply_by_columns(state, fresh, stage + Stage::KEYS, lane);
        multiply_by_rows(answer, operand, stage + Stage::QUERIES, lane);
        multiply_by_scores<true>(answer, fresh, stage + Stage::SCORES, lane);
        await_wgmma<0>(state, answer);
        if (step < scan.first) return;  // before the segment: no queries and scores were copied, and nothing is stored
        int num_tokens;
        const long long first = scan.first_token(step, num_tokens);
        store_transposed(out, (first * heads + scan.head) * width_v + scan.value, (long long)heads * width_v, num_tokens,
                         answer, lane);
        if (step + 1 == next_inner) {
            if (next_inner < scan.num_chunks) store_state(inner, scan, scan.number_of(step / apart), state);
            next_inner += apart;
        }
    });
    if (scan.is_last()) {
        store_state(final, scan, blockIdx.x, state);
    } else {
        store_state(ends, scan, scan.number_of(scan.segment), state);
        release_flag(ready, scan.flag_of(scan.segment));
    }
}
