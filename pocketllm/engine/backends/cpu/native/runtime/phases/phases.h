// The phases there are, each made by one function. Buffers, weights and matrices are borrowed.
#pragma once

#include <memory>
#include <vector>

#include "runtime/cache.h"
#include "runtime/program.h"

namespace pocketllm {

enum class Elementwise : int32_t { kAdd, kSiluMul, kGeluMul, kSigmoidMul, kMul };

struct ProjectionPlan {
    const Matrix* weight;
    const float* bias;      // or null
    const float* residual;  // or null
    float* out;             // [rows][weight->rows]
};

// A layer's states: `num_slots` of them, each `slot_floats` from the next.
struct StatePlan {
    float* states;
    int64_t slot_floats;
    int32_t num_slots;
};

// -- rows.cpp
void add_embed(Program& program, const Matrix& table, float scale, Buffer out);
void add_rms_norm(Program& program, Rows rows, Buffer x, const float* weight, int weight_width, float eps, float* out);
void add_layer_norm(Program& program, Rows rows, Buffer x, const float* weight, const float* bias, float eps,
                    float* out);
void add_scale(Program& program, Rows rows, Buffer x, float by, float* out);
void add_angles(Program& program, const float* inv_freq, int pairs, float magnitude, float* out);
void add_rope(Program& program, Buffer x, const float* angles, const Rotation& how, float* out);
void add_elementwise(Program& program, Elementwise what, Rows rows, Buffer x, const float* y, float* out);
void add_limited_mul(Program& program, Rows rows, Buffer gate, const float* up, float limit, float* out);
// by: one row for all, [x.width]
void add_mul_each(Program& program, Rows rows, Buffer x, const float* by, float* out);
void add_take(Program& program, Buffer x, float* out);
// Values [first, first + count) of each row.
void add_columns(Program& program, Rows rows, Buffer x, int first, int count, float* out);
// gate: one for each row of x
void add_gate_rows(Program& program, Buffer x, const float* gate, float* out);
void add_hadamard(Program& program, Rows rows, Buffer x, const float* signs, int block, bool inverse, float* out);

// -- project.cpp
// Matrices of floats meet floats, whatever the activations.
void add_project(Program& program, const Kernels& kernels, Rows rows, Buffer x, const float* norm, float eps,
                 Activations activations, const std::vector<ProjectionPlan>& projections);

// Each head's part of a row through a matrix of its own. heads: [num_heads]; x: [tokens][num_heads * in]
void add_project_heads(Program& program, const Kernels& kernels, Buffer x, Activations activations,
                       const Matrix* const* heads, int num_heads, float* out);

// -- attend.cpp
void add_store_kv(Program& program, KvCache& cache, int layer, const float* k, const float* v);
struct AttentionPlan {
    int32_t num_heads, window;  // window 0: all
    float scale, softcap;       // softcap 0: none
    const float* sinks;         // [num_heads] or null
};
// Which of the cache's keys each token attends, rows [width] of int32: their number, then the keys, ascending. Or null.
struct Selection {
    const int32_t* rows;
    int32_t width;
};
void add_attend(Program& program, KvCache& cache, int layer, const AttentionPlan& plan, const float* q,
                Selection selection, float* out);
// Of a cache of latents. key, q_rope: the dimensions after the latent's
void add_store_latent(Program& program, KvCache& cache, int layer, Buffer latent, const float* key);
void add_attend_latent(Program& program, KvCache& cache, int layer, const AttentionPlan& plan, Buffer q_latent,
                       const float* q_rope, Selection selection, float* out);

// -- select.cpp
// api/attention.py, `IndexerSpec`, and api/indexed.py, `GroupIndex`. Mirrored in library.py.
struct IndexPlan {
    int32_t num_heads, dim, num_best;
    int32_t ratio;   // tokens that one key stands for; in a cache of tokens it is the mean of theirs
    int32_t expand;  // what is picked: entries where 1, or that many tokens of each and those after the last whole group
    const float *norm, *inv_freq;  // [dim], [pairs] of a mean; or null
    int32_t pairs;
    float eps;
};
// The num_best best into selection rows `out`. weights: [tokens][num_heads], or null
void add_select(Program& program, KvCache& cache, int layer, const IndexPlan& plan, const float* q,
                const float* weights, float* out);

// -- compressed.cpp
// api/compressed.py, `Compressor`. Mirrored in library.py.
struct CompressPlan {
    int32_t ratio, dim, overlaps, pairs;
    float eps;
    const float *position, *norm, *inv_freq;  // [ratio][width], [dim] or null, [pairs]
};
// values, gates: [tokens][width]
void add_compress(Program& program, KvCache& cache, int layer, const CompressPlan& plan, Buffer values,
                  const float* gates, const StatePlan& states);
// api/compressed.py, `WindowSpec`. Mirrored in library.py.
struct WindowPlan {
    int32_t num_heads, dim, window;
    float scale;
    const float* sinks;  // [num_heads]
};
// rows: [tokens][dim]; cache: of entries, or null
void add_window_attend(Program& program, KvCache* cache, int layer, const WindowPlan& plan, const float* q,
                       const float* rows, const StatePlan& states, Selection selection, float* out);

// -- ngrams.cpp
// api/indexed.py, `NGrams`. Mirrored in library.py.
struct NGramPlan {
    int32_t length, heads_per_length;
    int64_t end_token;
    const int64_t *multipliers, *sizes, *offsets;  // [length], [heads], [heads]
};
void add_ngram_embed(Program& program, const Matrix& table, const NGramPlan& plan, const StatePlan& states, float* out);

// -- recurrent.cpp
void add_causal_conv(Program& program, Buffer x, const float* kernel, int taps, int dilation, bool silu,
                     const StatePlan& states, float* out);
// api/recurrent.py, `DeltaNet`. Mirrored in library.py.
struct DeltaPlan {
    int32_t num_key_heads, num_value_heads, key_dim, value_dim, is_tiled;
    float eps;
    const float *rate, *time_bias;  // [num_value_heads]
};
// mixed: queries, keys and values of all heads; step, share: logits [tokens][num_value_heads]
void add_gated_delta(Program& program, Buffer mixed, const float* step, const float* share, const DeltaPlan& plan,
                     const StatePlan& states, float* out);

// api/recurrent.py, `KimiDelta`. Mirrored in library.py.
struct KimiPlan {
    int32_t num_heads, dim, is_bounded;
    float lower_bound, eps;
    const float *rate, *time_bias;  // [num_heads], [num_heads * dim]
};
// q, k, v, step: [tokens][num_heads * dim]; share: logits [tokens][num_heads]
struct KimiInputs {
    const float *q, *k, *v, *step, *share;
};
void add_kimi_delta(Program& program, const KimiInputs& inputs, const KimiPlan& plan, const StatePlan& states,
                    float* out);

// -- streams.cpp
// api/ops.py, `HyperConnection`, without its projection. Mirrored in library.py.
struct StreamsPlan {
    int32_t num_streams, iterations;
    float eps, clamp;
    const float *scale, *base;  // [3], [2n + n · n]; where a connection only reads [1], [n]
    int32_t is_soft;            // api/compressed.py, `SoftConnection`, which only reads where there are no iterations
};
void add_open_streams(Program& program, Buffer x, int num_streams, float* out);
// logits: what the connection's projection gave; out: what a sublayer reads; shares: for write_streams
void add_read_streams(Program& program, Rows rows, Buffer streams, const float* logits, const StreamsPlan& plan, float* out,
                      float* shares);
void add_write_streams(Program& program, Buffer streams, const float* shares, Buffer y, float* out);
// streams + 2 · sigmoid(gate of each) · y
void add_gated_streams(Program& program, Buffer streams, const float* gates, Buffer y, float* out);
// sigmoid(signed root of |key · query / √hidden|) · value for each stream
void add_gate_streams(Program& program, Buffer keys, const float* queries, Buffer value, float* out);
void add_mean_streams(Program& program, Rows rows, Buffer streams, int num_streams, float* out);

// -- mixture.cpp
enum class Gating : int32_t { kSoftmax, kSigmoid, kRootSoftplus };
// api/ops.py, `Experts` and `Routing`; gate, up and down: [num_experts] matrices each. Mirrored in library.py.
struct MixturePlan {
    const Matrix *const *gate, *const *up, *const *down;
    const float* bias;  // [num_experts], or null
    int32_t num_experts, num_used;
    Gating gating;
    int32_t normalized;
    float scale;
    int32_t num_groups, num_groups_used, best_of_group;
    // api/ops.py, `BoundedExperts`; null and 0 for plain ones
    const float *gate_bias, *up_bias, *down_bias;  // [num_experts][inner, inner, out]
    float slope, limit;  // without biases and above 0: of api/compressed.py, `LimitedExperts`
    const int32_t* routes;  // [num_routes][num_used] experts of each token id, or null
    int32_t num_routes;
    const float* expert_scale;  // api/ops.py, `ScaledExperts`: [num_experts], the gate a gelu; or null
};
// logits: the router's, [tokens][num_experts]; out: [tokens][x.width]
void add_mixture(Program& program, const Kernels& kernels, Buffer x, const float* logits, Activations activations,
                 const MixturePlan& plan, float* out);

}  // namespace pocketllm
