// Which experts a token is sent to, and which slot its row gets there.
#include <algorithm>
#include <cmath>

#include "runtime/phases/mixture/mixture.h"

namespace pocketllm {

namespace {

// What one thread needs to route a token.
struct RouteScratch {
    float *scores, *ranks, *strengths;  // [experts]; of groups
    int32_t* found;                     // [experts]

    RouteScratch(uint8_t* room, int experts)
        : scores(reinterpret_cast<float*>(room)),
          ranks(scores + experts),
          strengths(ranks + experts),
          found(reinterpret_cast<int32_t*>(strengths + experts)) {}
};

// Places of the `count` largest of n values, best first; of equal ones the lower place.
void find_largest(const float* values, int n, int count, int32_t* found) {
    for (int i = 0; i < count; ++i) {
        int best = -1;
        for (int at = 0; at < n; ++at) {
            if (best >= 0 && !(values[at] > values[best])) continue;
            if (std::find(found, found + i, at) == found + i) best = at;
        }
        found[i] = best;
    }
}

// Scores of one token's logits. exp in float64, whose last bit is not seen in float32.
void score(const MixturePlan& plan, const float* logits, float* scores) {
    const int count = plan.num_experts;
    if (plan.gating == Gating::kRootSoftplus) {
        for (int i = 0; i < count; ++i) {
            const double x = logits[i];
            scores[i] = float(std::sqrt(x > 20 ? x : std::log1p(std::exp(x))));
        }
        return;
    }
    if (plan.gating == Gating::kSigmoid) {
        for (int i = 0; i < count; ++i) scores[i] = 1.0f / (1.0f + float(std::exp(-double(logits[i]))));
        return;
    }
    const float most = *std::max_element(logits, logits + count);
    float total = 0;
    for (int i = 0; i < count; ++i) total += scores[i] = float(std::exp(double(logits[i] - most)));
    for (int i = 0; i < count; ++i) scores[i] /= total;
}

// Experts outside the best groups get the rank -inf.
void leave_out_groups(const MixturePlan& plan, const RouteScratch& scratch) {
    float *const ranks = scratch.ranks, *const strengths = scratch.strengths;
    int32_t* const found = scratch.found;
    const int size = plan.num_experts / plan.num_groups;
    for (int group = 0; group < plan.num_groups; ++group) {
        find_largest(ranks + group * size, size, plan.best_of_group, found);
        strengths[group] = 0;
        for (int i = 0; i < plan.best_of_group; ++i) strengths[group] += ranks[group * size + found[i]];
    }
    find_largest(strengths, plan.num_groups, plan.num_groups_used, found);
    for (int group = 0; group < plan.num_groups; ++group) {
        if (std::find(found, found + plan.num_groups_used, group) == found + plan.num_groups_used)
            std::fill(ranks + group * size, ranks + (group + 1) * size, -INFINITY);
    }
}

}  // namespace

size_t route_bytes(int num_experts) { return size_t(num_experts) * (3 * sizeof(float) + sizeof(int32_t)); }

void route(const Mixture& mixture, const Run& run, const Mixture::Places& places, int token) {
    const MixturePlan& plan = mixture.plan;
    const RouteScratch scratch(run.mine, plan.num_experts);
    int32_t* chosen = places.chosen + token * plan.num_used;
    float* weights = places.weights + token * plan.num_used;
    score(plan, mixture.logits + int64_t(token) * plan.num_experts, scratch.scores);
    for (int i = 0; i < plan.num_experts; ++i) scratch.ranks[i] = scratch.scores[i] + (plan.bias ? plan.bias[i] : 0.0f);
    if (plan.num_groups > 1) leave_out_groups(plan, scratch);
    if (plan.routes) {
        std::copy_n(plan.routes + int64_t(run.step.input_ids[token]) * plan.num_used, plan.num_used, chosen);
    } else {
        find_largest(scratch.ranks, plan.num_experts, plan.num_used, chosen);
    }
    float total = 0;
    for (int i = 0; i < plan.num_used; ++i) total += weights[i] = scratch.scores[chosen[i]];
    for (int i = 0; i < plan.num_used; ++i)
        weights[i] = (plan.normalized ? weights[i] / total : weights[i]) * plan.scale *
                     (plan.expert_scale ? plan.expert_scale[chosen[i]] : 1.0f);
}

void group(const Mixture& mixture, const Run& run, const Mixture::Places& places) {
    const int experts = mixture.plan.num_experts, entries = mixture.entries(run.step);
    int32_t* begin = places.begin;
    std::fill(begin, begin + experts + 1, 0);
    for (int i = 0; i < entries; ++i) ++begin[places.chosen[i] + 1];
    for (int e = 0; e < experts; ++e) begin[e + 1] += begin[e];
    for (int i = 0; i < entries; ++i) places.slot[i] = begin[places.chosen[i]]++;
    for (int e = experts; e > 0; --e) begin[e] = begin[e - 1];  // each had moved on to its end
    begin[0] = 0;
}

}  // namespace pocketllm
