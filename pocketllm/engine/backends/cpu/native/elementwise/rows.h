// Declared in kernels.h, `Kernels`.
#pragma once

#include "kernels.h"

namespace pocketllm::POCKETLLM_ISA {

void rms_norm(const float* x, int64_t runs, int width, const float* weight, float eps, float* out);
void layer_norm(const float* x, int64_t runs, int width, const float* weight, const float* bias, float eps, float* out);
void add(const float* x, const float* y, int64_t n, float* out);
void scale(const float* x, float by, int64_t n, float* out);
void silu_mul(const float* gate, const float* up, int64_t n, float* out);
void gelu_mul(const float* gate, const float* up, int64_t n, float* out);
void bounded_mul(const float* gate, const float* up, int64_t n, float slope, float limit, float* out);
void limited_mul(const float* gate, const float* up, int64_t n, float limit, float* out);
void sigmoid_mul(const float* gate, const float* x, int64_t n, float* out);
void mul(const float* x, const float* y, int64_t n, float* out);
void hadamard(const float* x, const float* signs, int64_t n, int block, bool inverse, float* out);
void rope(const float* x, int heads, const Rotation& how, const float* cos, const float* sin, float* out);

}  // namespace pocketllm::POCKETLLM_ISA
