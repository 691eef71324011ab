// What phases over sequences share: where a sequence's tokens stand in the step, and which sequence a token is of.
#pragma once

#include <algorithm>
#include <cmath>

#include "runtime/phases/phases.h"

namespace pocketllm {

// One sequence's tokens in the step, and its state.
struct Segment {
    int first, tokens;
    bool begins;
    float* state;

    Segment(const Step& step, int sequence, const StatePlan& plan)
        : first(step.query_start_loc[sequence]),
          tokens(step.query_start_loc[sequence + 1] - first),
          begins(step.seq_lens[sequence] == tokens),
          state(plan.states + step.state_slots[sequence] * plan.slot_floats) {}
};

inline int sequence_of(const Step& step, int token) {
    const int32_t* ends = step.query_start_loc + 1;
    return int(std::upper_bound(ends, ends + step.num_sequences, token) - ends);
}

// Tokens of its sequence before a token, cached ones included.
inline int position_of(const Step& step, int sequence, int token) {
    return step.seq_lens[sequence] - step.query_start_loc[sequence + 1] + token;
}

inline const int32_t* blocks_of(const Step& step, int sequence) {
    return step.block_table + int64_t(sequence) * step.table_width;
}

// Cosines, then sines, of position · inv_freq, in float64 before they are rounded. out: [2 · pairs]
inline void angles_at(double position, const float* inv_freq, int pairs, double magnitude, float* out) {
    for (int pair = 0; pair < pairs; ++pair) {
        const double angle = position * double(inv_freq[pair]);
        out[pair] = float(std::cos(angle) * magnitude);
        out[pairs + pair] = float(std::sin(angle) * magnitude);
    }
}

inline void limit_states(Program& program, const StatePlan& states) {
    program.limits.state_slots = std::min<int64_t>(program.limits.state_slots, states.num_slots);
}

// -- attend.cpp
void check_layer(const KvCache& cache, int layer);
void limit_blocks(Program& program, const KvCache& cache);

}  // namespace pocketllm
