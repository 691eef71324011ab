// What index keys are worth to one token, each by itself: the same bits however many there are.
#include "attention/attention.h"
#include "elementwise/floats.h"

namespace pocketllm::POCKETLLM_ISA {

void index_scores(const IndexRows& rows, float* out) {
    const int width = padded_lanes(rows.dim);
    for (int number = 0; number < rows.count; ++number) {
        const float* key = rows.keys + int64_t(number) * width;
        float total = 0.0f;
        for (int head = 0; head < rows.heads; ++head) {
            const float* q = rows.q + int64_t(head) * width;
            Floats product = all(0.0f);
            for (int at = 0; at < width; at += kLanes) product = fma(load(q + at), load(key + at), product);
            const float match = sum(product), weight = rows.weights ? rows.weights[head] : 1.0f;
            total += weight * (match < 0.0f ? 0.0f : match);
        }
        out[number] = total;
    }
}

}  // namespace pocketllm::POCKETLLM_ISA
