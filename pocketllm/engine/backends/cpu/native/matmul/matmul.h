// Products of a matrix of any format with rows of activations; kernels.h says what each promises.
#pragma once

#include "kernels.h"

namespace pocketllm::POCKETLLM_ISA {

// Block: what the rows x consist of
template <typename Block>
void matmul(const Matrix& w, const uint8_t* x, int tokens, int first_group, int last_group, const Output& out);
void matmul_f32(const Matrix& w, const float* x, int64_t ld, int tokens, int first_group, int last_group,
                const Output& out);
void decode_row(const Matrix& w, int row, float* out);

}  // namespace pocketllm::POCKETLLM_ISA
