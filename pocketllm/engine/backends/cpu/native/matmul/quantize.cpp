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

// The bits of |x|, which as integers are in the order of the values, with NaN above all: it ends up in d.
float largest_magnitude(const float* x) {
    uint32_t largest = 0;
    for (int i = 0; i < 32; i++) {
        uint32_t bits;
        std::memcpy(&bits, x + i, 4);
        bits &= 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    float value;
    std::memcpy(&value, &largest, 4);
    return value;
}

// The nearest integer, ties to even, of |x| <= 2^22: the sum's last bit is worth one.
int32_t nearest(float x) {
    constexpr float kMagic = 12582912.0f;  // 1.5 · 2^23
    const float sum = x + kMagic;
    int32_t bits;
    std::memcpy(&bits, &sum, 4);
    return bits - 0x4B400000;
}

constexpr float kSmallest = 1e-30f;  // below it a block is zeros: 127 / x would leave the range of floats

void quantize_block(const float* x, ActivationBlock& out) {
    const float largest = largest_magnitude(x);
    const float scale = largest > kSmallest ? 127.0f / largest : 0.0f;
    int32_t sums[2] = {0, 0};
    for (int half = 0; half < 2; half++) {
        for (int i = 16 * half; i < 16 * half + 16; i++) {
            out.q[i] = static_cast<int8_t>(nearest(x[i] * scale));
            sums[half] += out.q[i];
        }
    }
    out.d = largest / 127.0f;
    out.minus_sum = -(sums[0] + sums[1]);
    out.minus_sum_16[0] = -sums[0];
    out.minus_sum_16[1] = -sums[1];
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
            for (int i = 0; i < here; i++) values[i] = norm ? row[32 * b + i] * scale * norm[32 * b + i] : row[32 * b + i];
            quantize_block(values, to[b]);
        }
    }
}

}  // namespace pocketllm::POCKETLLM_ISA
