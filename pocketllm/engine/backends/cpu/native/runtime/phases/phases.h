// The phases there are, each made by one function. Buffers, weights and matrices are borrowed.
#pragma once

#include <memory>
#include <vector>

#include "runtime/cache.h"
#include "runtime/program.h"

namespace pocketllm {

enum class Elementwise : int32_t { kAdd, kSiluMul, kGeluMul };

struct ProjectionPlan {
    const Matrix* weight;
    const float* bias;      // or null
    const float* residual;  // or null
    float* out;             // [rows][weight->rows]
};

// -- rows.cpp
void add_embed(Program& program, const Matrix& table, float scale, Buffer out);
void add_rms_norm(Program& program, Rows rows, Buffer x, const float* weight, int weight_width, float eps, float* out);
void add_angles(Program& program, const float* inv_freq, int pairs, float magnitude, float* out);
void add_rope(Program& program, Buffer x, const float* angles, int pairs, int head_dim, bool half_split, float* out);
void add_elementwise(Program& program, Elementwise what, Rows rows, Buffer x, const float* y, float* out);
void add_take(Program& program, Buffer x, float* out);

// -- project.cpp
// exact: float activations; otherwise int8, except for matrices of floats.
void add_project(Program& program, const Kernels& kernels, Rows rows, Buffer x, const float* norm, float eps,
                 bool exact, const std::vector<ProjectionPlan>& projections);

// -- attend.cpp
void add_store_kv(Program& program, KvCache& cache, int layer, const float* k, const float* v);
struct AttentionPlan {
    int32_t num_heads, window;  // window 0: all
    float scale, softcap;       // softcap 0: none
};
void add_attend(Program& program, KvCache& cache, int layer, const AttentionPlan& plan, const float* q, float* out);

}  // namespace pocketllm
