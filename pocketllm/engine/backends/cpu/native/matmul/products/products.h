// Which function multiplies a format's matrices: one file for each layouts/blocks_*.h, to compile side by side.
#pragma once

#include "kernels.h"

namespace pocketllm::POCKETLLM_ISA {

using Product = void (*)(const Matrix&, const uint8_t* x, int tokens, int first_group, int last_group, const Output&);

// Null for a format of another file. Block: what the rows of activations consist of
template <typename Block>
Product product_of_blocks_32(int32_t format);
template <typename Block>
Product product_of_blocks_k(int32_t format);
template <typename Block>
Product product_of_blocks_vector(int32_t format);

}  // namespace pocketllm::POCKETLLM_ISA
