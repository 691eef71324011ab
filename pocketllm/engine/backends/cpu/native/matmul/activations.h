// Rows of activations as the matrix kernels read them: int8 with a float scale and a float middle for each 32 columns.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layouts/formats.h"

namespace pocketllm::POCKETLLM_ISA {

// 32 columns of one row, x ≈ d · q + z, z halfway between the least and the largest of them: a scale around zero wastes
// the codes of the side that has no values. Everything a kernel needs of a block is one line of the cache.
struct ActivationBlock {
    int8_t q[32];  // -127 to 127
    float d, z;
    float sum;                // Σ q, for formats with minimums
    float sum_16[2];          // … of columns 0-15 and 16-31
    int32_t minus_sum;        // -Σ q: codes are kept unsigned, and what was added to them is taken away with it
    int32_t minus_sum_16[2];
};
static_assert(sizeof(ActivationBlock) == 64);

// An odd number of lines: rows of a power of two would all fall on the same few sets of a cache.
constexpr int activation_blocks(int cols) {
    return (cols + kActivationCols - 1) / kActivationCols * (kActivationCols / 32) + 1;
}

size_t quantized_bytes(int cols);
void quantize(const float* x, int64_t ld, int cols, int first, int last, const float* norm, float eps, uint8_t* out);

}  // namespace pocketllm::POCKETLLM_ISA
