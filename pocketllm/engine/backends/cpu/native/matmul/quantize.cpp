#include <cmath>

#include "matmul/activations.h"
#include "simd/simd.h"

namespace pocketllm::POCKETLLM_ISA {

size_t quantized_bytes(int cols) { return activation_blocks(cols) * sizeof(ActivationBlock); }

namespace {

// Sums in 16 lanes and adds those up in pairs: one order whatever the width of a vector.
float sum_of_squares(const float* x, int cols) {
    float lanes[16] = {};
    int col = 0;
    for (; col + 16 <= cols; col += 16) {
        for (int i = 0; i < 16; i++) lanes[i] += x[col + i] * x[col + i];
    }
    for (int i = 0; col < cols; col++, i++) lanes[i] += x[col] * x[col];
    for (int width = 8; width > 0; width /= 2) {
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    }
    return lanes[0];
}

struct Range {
    float least, largest;
};

// A float's bits in the order of the values, with NaN beyond both ends: it becomes one of them. Its own inverse.
int32_t ordered(int32_t bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

Range range_of(const float* x) {
    int32_t least = INT32_MAX, largest = INT32_MIN;
    for (int i = 0; i < 32; i++) {
        int32_t bits;
        std::memcpy(&bits, x + i, 4);
        const int32_t key = ordered(bits);
        least = key < least ? key : least;
        largest = key > largest ? key : largest;
    }
    least = ordered(least), largest = ordered(largest);
    Range range;
    std::memcpy(&range.least, &least, 4);
    std::memcpy(&range.largest, &largest, 4);
    return range;
}

// The nearest integer, ties to even, of |x| <= 2^22: the sum's last bit is worth one.
int32_t nearest(float x) {
    constexpr float kMagic = 12582912.0f;  // 1.5 · 2^23
    const float sum = x + kMagic;
    int32_t bits;
    std::memcpy(&bits, &sum, 4);
    return bits - 0x4B400000;
}

constexpr float kSmallest = 1e-30f;  // a block that spans less is its middle: 127 / x would leave the range of floats

void quantize_block(const float* x, ActivationBlock& out) {
    const Range range = range_of(x);
    const float middle = 0.5f * range.least + 0.5f * range.largest;  // no sum of finite values overflows so
    // the middle may be rounded: of the two distances the larger, so that q stays within 127
    const float above = range.largest - middle, below = middle - range.least;
    const float reach = above > below ? above : below;
    const float scale = reach > kSmallest ? 127.0f / reach : 0.0f;
    int32_t sums[2] = {0, 0};
    for (int half = 0; half < 2; half++) {
        for (int i = 16 * half; i < 16 * half + 16; i++) {
            out.q[i] = static_cast<int8_t>(nearest((x[i] - middle) * scale));
            sums[half] += out.q[i];
        }
    }
    out.d = reach / 127.0f;
    out.z = middle;
    out.minus_sum = -(sums[0] + sums[1]);
    out.sum = static_cast<float>(sums[0] + sums[1]);
    for (int half = 0; half < 2; half++) {
        out.minus_sum_16[half] = -sums[half];
        out.sum_16[half] = static_cast<float>(sums[half]);
    }
}

}  // namespace

void quantize(const float* x, int64_t ld, int cols, int first, int last, const float* norm, float eps, uint8_t* out) {
    const int blocks = activation_blocks(cols);
    for (int token = first; token < last; token++) {
        const float* row = x + ld * token;
        auto* to = reinterpret_cast<ActivationBlock*>(out + quantized_bytes(cols) * token);
        const float scale = norm ? 1.0f / std::sqrt(sum_of_squares(row, cols) / static_cast<float>(cols) + eps) : 1.0f;
        for (int b = 0; b < blocks; b++) {
            const int here = cols - 32 * b < 32 ? cols - 32 * b : 32;
            alignas(64) float values[32] = {};
            for (int i = 0; i < here; i++) {
                values[i] = norm ? row[32 * b + i] * scale * norm[32 * b + i] : row[32 * b + i];
            }
            quantize_block(values, to[b]);
        }
    }
}

}  // namespace pocketllm::POCKETLLM_ISA
