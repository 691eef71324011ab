// Rows of activations as the matrix kernels read them: for each 32 columns integers, a float scale and a float middle.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layouts/formats.h"

namespace pocketllm::POCKETLLM_ISA {

// What a block of 32 columns of one row has beside its integers q: x ≈ d · q + z, z halfway between the least and the
// largest of them. A scale around zero would waste the codes of the side that has no values.
struct BlockScales {
    float d, z;
    float sum;                // Σ q, for formats with minimums
    float sum_16[2];          // … of columns 0-15 and 16-31
    int32_t minus_sum;        // -Σ q: codes are kept unsigned, and what was added to them is taken away with it
    int32_t minus_sum_16[2];
};

// q as one plane of bytes. Everything a kernel needs of a block is one line of the cache.
struct Int8Block {
    static constexpr int kPlanes = 1;
    static constexpr float kLargest = 127;
    int8_t planes[kPlanes][32];  // -127 to 127
    BlockScales scales;
};
static_assert(sizeof(Int8Block) == 64);

// q = 255 · high + low: both planes are again -127 to 127, and every q up to 32512 has one such pair.
struct Int16Block {
    static constexpr int kPlanes = 2;
    static constexpr float kLargest = 127 * 255 + 127;
    int8_t planes[kPlanes][32];  // high, low
    BlockScales scales;
};
static_assert(sizeof(Int16Block) == 96);

// An odd number of blocks: rows of a power of two would all fall on the same few sets of a cache.
constexpr int activation_blocks(int cols) {
    return (cols + kActivationCols - 1) / kActivationCols * (kActivationCols / 32) + 1;
}

// kernels.h, `QuantizedRows`
template <typename Block>
size_t quantized_bytes(int cols) {
    return activation_blocks(cols) * sizeof(Block);
}
template <typename Block>
void quantize(const float* x, int64_t ld, int cols, int first, int last, const float* norm, float eps, uint8_t* out);

}  // namespace pocketllm::POCKETLLM_ISA
