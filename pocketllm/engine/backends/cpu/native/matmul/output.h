// Where sums go when they are whole: bias and residual added, rows that only fill up the last group left out.
#pragma once

#include "kernels.h"
#include "simd/simd.h"

namespace pocketllm::POCKETLLM_ISA {

// Writes the outputs of 16 rows of a group for one row of activations. sums: [16]
inline void write_group(const Matrix& w, const Output& out, int group, int token, const float* sums) {
    const int row = kGroupRows * group;
    float* y = out.y + out.ld * token + row;
    const float* residual = out.residual ? out.residual + out.ld_residual * token + row : nullptr;
    if (row + kGroupRows <= w.rows) {
        for (int i = 0; i < kGroupRows; i += kLanes) {
            Floats sum = load(sums + i);
            if (out.bias) sum = add(sum, load(out.bias + row + i));
            if (residual) sum = add(sum, load(residual + i));
            store(y + i, sum);
        }
        return;
    }
    for (int i = 0; i < w.rows - row; i++) {
        float sum = sums[i];
        if (out.bias) sum += out.bias[row + i];
        if (residual) sum += residual[i];
        y[i] = sum;
    }
}

}  // namespace pocketllm::POCKETLLM_ISA
