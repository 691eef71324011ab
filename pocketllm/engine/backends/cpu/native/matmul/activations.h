// Rows of activations as the matrix kernels read them: int8 with a float scale for each 32 columns.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layouts/formats.h"

namespace pocketllm::POCKETLLM_ISA {

// 32 columns of one row, x ≈ d · q. Everything a kernel needs of them lies side by side, so that a row is one pointer.
struct ActivationBlock {
    int8_t q[32];
    float d;
    int32_t minus_sum;        // -Σ q: codes are kept unsigned, and what was added to them is taken away with it
    int32_t minus_sum_16[2];  // … of columns 0-15 and 16-31
};
static_assert(sizeof(ActivationBlock) == 48);

constexpr int activation_blocks(int cols) { return (cols + kActivationCols - 1) / kActivationCols * (kActivationCols / 32); }

size_t quantized_bytes(int cols);
void quantize(const float* x, int64_t ld, int cols, int first, int last, const float* norm, float eps, uint8_t* out);

}  // namespace pocketllm::POCKETLLM_ISA
