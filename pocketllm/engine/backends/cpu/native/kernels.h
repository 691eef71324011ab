// The seam inside the native library: what the runtime (program, threads) asks of the kernels, once per set.
//
// Each instruction set compiles the same kernel sources with its own flags and fills one `Kernels` table; dispatch.cpp
// picks one table at start-up by CPUID. Every kernel computes a row the same way whatever other rows stand beside it,
// so that a row's bits do not depend on the batch; none allocates, locks or starts a thread: the runtime hands each
// call a range of the work and the scratch it needs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pocketllm {

constexpr int kGroupRows = 16;  // rows of a matrix that are interleaved, so that one vector serves 16 outputs

// A weight [rows, cols] as the backend keeps it: groups of 16 rows, interleaved; layouts/ says how for each format.
struct Matrix {
    int32_t format;       // layouts/formats.h
    int32_t rows, cols;   // as in the file; the last group is filled up with zero rows
    size_t group_bytes;   // bytes of one group of 16 rows
    const uint8_t* data;  // 64-byte aligned
};

// Where a projection's outputs go: y[token * ld + row] = x·w (+ bias[row]) (+ residual[token * ld_residual + row]).
struct Output {
    float* y;
    int64_t ld;
    const float* bias;      // [rows] or null
    const float* residual;  // or null; may be y itself
    int64_t ld_residual;
};

// -- keys and values --------------------------------------------------------------------------------------------------
enum class KvDtype : int32_t { kFloat32, kFloat16, kBFloat16, kInt8 };

// How a cache of `num_blocks` blocks lies in memory: [block][layer], and of each layer, one after another,
//   keys          [kv_heads][key_dim][block_size]
//   values        [kv_heads][block_size][value_dim]
//   key scales    [kv_heads][block_size] floats, with int8 only: a key is int8 · scale
//   value scales  the same
// so that what a sequence has not reached yet takes no memory, and one vector holds one dimension of 16 keys.
//
// A cache of latents has one row a token, [block][layer][block_size][key_dim], with a scale of its own in int8: all of it
// is the key, and its first value_dim values are the values.
struct KvLayout {
    KvDtype dtype;
    bool is_latent;
    int32_t num_layers, kv_heads, key_dim, value_dim, num_blocks, block_size;
    int32_t value_stride;  // elements from one token's values to the next one's
    int64_t values_at, key_scales_at, value_scales_at;  // bytes from a layer's beginning
    int64_t layer_bytes, block_bytes;
};

constexpr int kAttentionTile = 128;  // keys that are summed together, at fixed places; part of the numerics version
constexpr int kAttentionRows = 12;   // most query rows of one call

// Rows [first_row, last_row) of one sequence's queries: row = token * group + head, tokens of this step, heads that
// share the key head. Query t stands at position seq_len - num_tokens + t and sees `window` positions up to its own.
struct AttentionRows {
    const KvLayout* cache;
    const uint8_t* layer;  // of block 0
    const int32_t* blocks;
    int32_t kv_head, group, first_row, last_row, num_tokens, seq_len, window;  // window 0: all
    float scale, softcap;                                                   // softcap 0: none
    const float* sinks;  // a score more for each head of the group, without a value; or null
    // [seq_len] which of the cache's keys are meant, ascending, for the rows of one token, that sees all; or null
    const int32_t* picked;
    const float* q;  // of token 0 and the group's first head: the first q_dim dimensions
    int64_t ld_q;
    const float* q_rest;  // the others, or null
    int64_t ld_q_rest;
    int32_t q_dim;
    float* out;
    int64_t ld_out;
};

constexpr int padded_lanes(int n) { return (n + 15) / 16 * 16; }

// Floats of one tile's partial result for one row: the weighted sum of values, then largest score and sum of weights.
constexpr int partial_floats(int value_dim) { return padded_lanes(value_dim) + 16; }

// Floats of scratch for `attend` and `merge`.
constexpr int64_t attention_scratch_floats(int key_dim, int value_dim) {
    return kAttentionRows * (padded_lanes(key_dim) + kAttentionTile + 2 * partial_floats(value_dim)) +
           int64_t(kAttentionTile) * (key_dim + value_dim + 2);
}

// How values of a head turn: 2 · pairs of them from `first` on, neighbors together or half with half.
struct Rotation {
    int32_t head_dim, first, pairs, half_split, inverse;
};

// One token's index queries [heads][padded_lanes(dim)] and keys [count][padded_lanes(dim)], zeros behind each.
struct IndexRows {
    const float* q;
    const float* weights;  // [heads]; null: one each
    const float* keys;
    int heads, dim, count;
};

// -- recurrent layers -------------------------------------------------------------------------------------------------
// Channels [first, last) of one sequence's tokens, rows of `channels` floats: out = Σ kernel[tap] · x[token - (taps - 1 -
// tap) · dilation]. The (taps - 1) · dilation rows before are the state's, or zeros where the sequence begins; they are
// left updated.
struct ConvRows {
    const float *x, *kernel;  // kernel: [taps][channels]
    float *state, *out;       // state: [(taps - 1) · dilation][channels]
    int64_t channels;
    int first, last, taps, dilation, tokens;
    bool begins, silu;
};

// Columns [first, last) of one head's state [key_dim][value_dim] over one sequence's tokens. api/ops.py, `gated_delta`,
// says what is computed.
struct DeltaRows {
    const float *q, *k, *v;  // of token 0 and the head; the next token's lie ld further
    int64_t ld;
    const float* gates;  // of token 0 and the head: what the state is multiplied by, and the weight of what is new
    int64_t ld_gates;    // in pairs
    const float* decays;  // of token 0 and the head [key_dim], and of the next ld further: instead of one; or null
    float* state;
    float* out;
    int64_t ld_out;
    int first, last, key_dim, value_dim, tokens;
    float eps;  // beside the sum of squares of a query or key
    bool begins;
};

constexpr int delta_scratch_floats(int key_dim) { return 3 * padded_lanes(key_dim); }

// -- rows of activations ----------------------------------------------------------------------------------------------
// What they become before they meet a quantized matrix. In the order of cpu/operations/recorder.py, `ACTIVATIONS`.
enum class Activations : int32_t { kInt8, kInt16, kFloat32 };

// The way into a matrix and through it, of rows that become integers (matmul/).
struct QuantizedRows {
    // Bytes of one row of `cols` activations as `quantize` keeps it: for each 32 the integers, scale, middle and sums.
    size_t (*bytes)(int cols);
    // rows [first, last) of x (leading dimension ld, floats) → out (bytes(cols) each, row 0 at out).
    // norm: RMS-norm each row with this weight [cols] and eps on the way; null: as they are.
    void (*quantize)(const float* x, int64_t ld, int cols, int first, int last, const float* norm, float eps,
                     uint8_t* out);
    // Output rows of groups [first_group, last_group) for all `tokens` quantized rows.
    void (*matmul)(const Matrix& w, const uint8_t* x, int tokens, int first_group, int last_group, const Output& out);
};

struct Kernels {
    const char* name;  // avx512vnni, avx512, avxvnni, avx2, portable, neon

    // -- matrix products (matmul/) ------------------------------------------------------------------------------------
    QuantizedRows int8, int16;
    // null: rows meet matrices as they are
    const QuantizedRows* rows_of(Activations kind) const {
        return kind == Activations::kInt8 ? &int8 : kind == Activations::kInt16 ? &int16 : nullptr;
    }
    // The same with float activations, exactly decoded weights (`--activation-dtype float32`, and float formats).
    void (*matmul_f32)(const Matrix& w, const float* x, int64_t ld, int tokens, int first_group, int last_group,
                       const Output& out);
    // Decode one row of a matrix to floats [cols]: embeddings, tests.
    void (*decode_row)(const Matrix& w, int row, float* out);

    // -- rows between matrices (elementwise/) -------------------------------------------------------------------------
    // Each run of `width` values by itself: x / sqrt(mean(x²) + eps) · weight; out may be x.
    void (*rms_norm)(const float* x, int64_t runs, int width, const float* weight, float eps, float* out);
    // (x - mean) / sqrt(variance + eps) · weight + bias of each run of `width` values; out may be x.
    void (*layer_norm)(const float* x, int64_t runs, int width, const float* weight, const float* bias, float eps,
                       float* out);
    // n values each; out may be one of the others.
    void (*add)(const float* x, const float* y, int64_t n, float* out);
    void (*scale)(const float* x, float by, int64_t n, float* out);
    void (*silu_mul)(const float* gate, const float* up, int64_t n, float* out);
    void (*gelu_mul)(const float* gate, const float* up, int64_t n, float* out);
    // g · sigmoid(slope · g) · (u + 1), g = min(gate, limit), u = up within ±limit
    void (*bounded_mul)(const float* gate, const float* up, int64_t n, float slope, float limit, float* out);
    // silu(min(gate, limit)) · up within ±limit
    void (*limited_mul)(const float* gate, const float* up, int64_t n, float limit, float* out);
    void (*sigmoid_mul)(const float* gate, const float* x, int64_t n, float* out);
    void (*mul)(const float* x, const float* y, int64_t n, float* out);
    // Sums and differences of halves of each run of `block` (a power of two) values, log2(block) times, / sqrt(block);
    // by signs [n] before, or after where `inverse`. out may not be x.
    void (*hadamard)(const float* x, const float* signs, int64_t n, int block, bool inverse, float* out);
    // One token: turn some values of each head. cos, sin: [pairs]; out may be x.
    void (*rope)(const float* x, int heads, const Rotation& how, const float* cos, const float* sin, float* out);

    // -- attention (attention/) ---------------------------------------------------------------------------------------
    // One token's keys and values [kv_heads * dim] of one layer into the cache's slot; of latents the row as v.
    void (*store_kv)(const KvLayout& cache, uint8_t* layer, int64_t slot, const float* k, const float* v);
    // A row of a cache of latents as floats [key_dim].
    void (*load_latent)(const KvLayout& cache, const uint8_t* layer, int64_t slot, float* out);
    // Σ over heads of weight · max(q · key, 0), for each key: [count].
    void (*index_scores)(const IndexRows& rows, float* out);
    // Some query rows of one key head over tiles [first_tile, last_tile) of its keys, to `out` or to `partials`.
    void (*attend)(const AttentionRows& rows, int first_tile, int last_tile, float* partials, float* scratch);
    // The partials of tiles, in order, to `out`.
    void (*merge)(const AttentionRows& rows, int num_tiles, const float* partials, float* scratch);

    // -- recurrent layers (elementwise/recurrent.*) -------------------------------------------------------------------
    void (*causal_conv)(const ConvRows& rows);
    void (*gated_delta)(const DeltaRows& rows, float* scratch);
};

}  // namespace pocketllm
