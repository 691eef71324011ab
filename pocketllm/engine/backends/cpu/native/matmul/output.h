// Where sums go when they are whole: bias and residual added, rows that only fill up the last group left out.
#pragma once

#include "kernels.h"
#include "simd/simd.h"

namespace pocketllm::POCKETLLM_ISA {

// Writes the outputs of kLanes rows of the matrix, from `row` on, for one row of activations. sums: [kLanes]
inline void write_rows(const Matrix& w, const Output& out, int row, int token, const float* sums) {
    float* y = out.y + out.ld * token + row;
    const float* residual = out.residual ? out.residual + out.ld_residual * token + row : nullptr;
    if (row + kLanes <= w.rows) {
        Floats sum = load(sums);
        if (out.bias) sum = add(sum, load(out.bias + row));
        if (residual) sum = add(sum, load(residual));
        store(y, sum);
        return;
    }
    for (int i = 0; i < w.rows - row; i++) {
        float sum = sums[i];
        if (out.bias) sum += out.bias[row + i];
        if (residual) sum += residual[i];
        y[i] = sum;
    }
}

// The same of a whole group. sums: [16]
inline void write_group(const Matrix& w, const Output& out, int group, int token, const float* sums) {
    for (int i = 0; i < kGroupRows; i += kLanes) write_rows(w, out, kGroupRows * group + i, token, sums + i);
}

}  // namespace pocketllm::POCKETLLM_ISA
