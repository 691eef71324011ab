// The rest of the C interface (runtime/abi.h): how large a matrix becomes, and the matrix kernels one by one, in the
// thread that calls. Tests and measurements call the kernels; the engine calls them from its programs.
//
// groups is 64-byte aligned, group_bytes · ceil(rows / 16) long. What can fail returns 0, or nothing is written: an
// unknown format or instruction set, columns that are not whole blocks, quantized rows for a float format.
#pragma once

#include <stdint.h>

#define POCKETLLM_KERNEL_API extern "C" __attribute__((visibility("default")))

// Bytes of one group of 16 rows; 0 where the format is unknown or cols are not whole blocks.
POCKETLLM_KERNEL_API int64_t pocketllm_group_bytes(int32_t format, int32_t cols);

// Bytes of an element once loaded, zero rows and columns that fill up apart; 0 for an unknown format.
POCKETLLM_KERNEL_API double pocketllm_bytes_per_element(int32_t format);

// layouts/repack.h
POCKETLLM_KERNEL_API int32_t pocketllm_repack(int32_t format, const uint8_t* file, int32_t rows, int32_t cols,
                                              int32_t first_group, int32_t last_group, const int8_t* grid,
                                              uint8_t* groups);

// kernels.h; isa: a name, null or empty for the best that this processor has. activations: `Activations`, not floats.
POCKETLLM_KERNEL_API int32_t pocketllm_decode_row(const char* isa, int32_t format, const uint8_t* groups, int32_t rows,
                                                  int32_t cols, int32_t row, float* out);
POCKETLLM_KERNEL_API int64_t pocketllm_quantized_bytes(const char* isa, int32_t activations, int32_t cols);
POCKETLLM_KERNEL_API int32_t pocketllm_quantize(const char* isa, int32_t activations, const float* x, int32_t rows,
                                                int32_t cols, const float* norm, float eps, uint8_t* out);
// y [tokens, rows] = x · wᵀ (+ bias [rows]) (+ residual [tokens, rows]). x: rows that `pocketllm_quantize` wrote
POCKETLLM_KERNEL_API int32_t pocketllm_matmul(const char* isa, int32_t activations, int32_t format,
                                              const uint8_t* groups, int32_t rows, int32_t cols, const uint8_t* x,
                                              int32_t tokens, const float* bias, const float* residual, float* y);
// The same of floats x [tokens, cols]
POCKETLLM_KERNEL_API int32_t pocketllm_matmul_f32(const char* isa, int32_t format, const uint8_t* groups, int32_t rows,
                                                  int32_t cols, const float* x, int32_t tokens, const float* bias,
                                                  const float* residual, float* y);
