// The plain C interface of the library; pocketllm/engine/backends/cpu/library.py calls nothing else.
//
// What can fail returns null, or a number that is not 0, and leaves a sentence for `pocketllm_problem` in the same
// thread. Nothing here ends the process. Objects are handed out as pointers and outlive what was made from them:
// programs and matrices their engine. Buffers, vectors and arrays of a step are borrowed, contiguous, and must outlive
// their program.
#pragma once

#include <stdint.h>

#include "runtime/phases/phases.h"

#define POCKETLLM_API extern "C" __attribute__((visibility("default")))

// Raised whenever a function below or `Step` changes its arguments.
constexpr int32_t kAbiVersion = 5;

POCKETLLM_API int32_t pocketllm_abi_version();
POCKETLLM_API const char* pocketllm_problem();
POCKETLLM_API const char* pocketllm_usable_isas();  // best first, separated by a space

// -- an engine: threads, an instruction set, and the matrices kept by it
POCKETLLM_API pocketllm::Engine* pocketllm_engine_new(int32_t threads,
                                                      const char* isa);  // isa: null or empty for the best
POCKETLLM_API void pocketllm_engine_free(pocketllm::Engine* engine);
POCKETLLM_API const char* pocketllm_engine_isa(const pocketllm::Engine* engine);
// Repack a matrix [rows, cols] from its bytes in the file. format: a GGUF type id; grid: of layouts/repack.h, or null.
POCKETLLM_API const pocketllm::Matrix* pocketllm_matrix_new(pocketllm::Engine* engine, int32_t format,
                                                            const uint8_t* file, int64_t file_bytes, int32_t rows,
                                                            int32_t cols, const int8_t* grid);
// The rest of the profile: kinds are numbered from 0; null past the last. figures: calls, seconds, bytes, operations.
POCKETLLM_API void pocketllm_profile_start(pocketllm::Engine* engine);
POCKETLLM_API const char* pocketllm_profile_read(const pocketllm::Engine* engine, int32_t kind, double* figures);

// -- keys and values; in_windows: a step's window_table and window_slots are of its blocks
POCKETLLM_API pocketllm::KvCache* pocketllm_kv_new(int32_t dtype, int32_t num_layers, int32_t kv_heads, int32_t key_dim,
                                                   int32_t value_dim, int32_t num_blocks, int32_t block_size,
                                                   int32_t in_windows);
POCKETLLM_API pocketllm::KvCache* pocketllm_latent_new(int32_t dtype, int32_t num_layers, int32_t dim,
                                                       int32_t num_blocks, int32_t block_size);
POCKETLLM_API void pocketllm_kv_free(pocketllm::KvCache* cache);
// A cache of an entry for every `ratio` tokens.
POCKETLLM_API pocketllm::KvCache* pocketllm_compressed_new(int32_t dtype, int32_t num_layers, int32_t dim,
                                                           int32_t ratio, int32_t num_blocks, int32_t block_size);
// bytes: of all blocks and a little more, then of one block
POCKETLLM_API uint8_t* pocketllm_kv_data(pocketllm::KvCache* cache, int64_t* bytes);

// -- programs
POCKETLLM_API pocketllm::Program* pocketllm_program_new(pocketllm::Engine* engine, int32_t max_tokens);
POCKETLLM_API void pocketllm_program_free(pocketllm::Program* program);
// Touch the room of its steps, and the buffers that its phases work in.
POCKETLLM_API int32_t pocketllm_ready(pocketllm::Program* program, uint8_t* buffers, int64_t bytes);
POCKETLLM_API int32_t pocketllm_run(pocketllm::Program* program, const pocketllm::Step* step);

// Each appends what it is called: runtime/phases/phases.h. rows: 0 tokens, 1 logit rows. activations: kernels.h,
// `Activations`.
POCKETLLM_API int32_t pocketllm_embed(pocketllm::Program* program, const pocketllm::Matrix* table, float scale,
                                      float* out);
POCKETLLM_API int32_t pocketllm_rms_norm(pocketllm::Program* program, int32_t rows, const float* x, int32_t width,
                                         const float* weight, int32_t weight_width, float eps, float* out);
POCKETLLM_API int32_t pocketllm_project(pocketllm::Program* program, pocketllm::Engine* engine, int32_t rows,
                                        const float* x, int32_t width, const float* norm, float eps,
                                        int32_t activations, int32_t count, const pocketllm::ProjectionPlan* projections);
POCKETLLM_API int32_t pocketllm_angles(pocketllm::Program* program, const float* inv_freq, int32_t pairs,
                                       float magnitude, float* out);
POCKETLLM_API int32_t pocketllm_rope(pocketllm::Program* program, const float* x, int32_t width, const float* angles,
                                     const pocketllm::Rotation* how, float* out);
POCKETLLM_API int32_t pocketllm_store_kv(pocketllm::Program* program, pocketllm::KvCache* cache, int32_t layer,
                                         const float* k, const float* v);
POCKETLLM_API int32_t pocketllm_attend(pocketllm::Program* program, pocketllm::KvCache* cache, int32_t layer,
                                       const pocketllm::AttentionPlan* plan, const float* q, const void* selection,
                                      int32_t selection_width, float* out);
// what: 0 add, 1 silu_mul, 2 gelu_mul, 3 sigmoid_mul, 4 mul
POCKETLLM_API int32_t pocketllm_elementwise(pocketllm::Program* program, int32_t what, int32_t rows, const float* x,
                                            int32_t width, const float* y, float* out);
POCKETLLM_API int32_t pocketllm_take(pocketllm::Program* program, const float* x, int32_t width, float* out);
POCKETLLM_API int32_t pocketllm_mixture(pocketllm::Program* program, pocketllm::Engine* engine, const float* x,
                                        int32_t width, const float* logits, int32_t activations,
                                        const pocketllm::MixturePlan* plan, float* out);
POCKETLLM_API int32_t pocketllm_gate_rows(pocketllm::Program* program, const float* x, int32_t width, const float* gate,
                                          float* out);
POCKETLLM_API int32_t pocketllm_hadamard(pocketllm::Program* program, int32_t rows, const float* x, int32_t width,
                                         const float* signs, int32_t block, int32_t inverse, float* out);
POCKETLLM_API int32_t pocketllm_causal_conv(pocketllm::Program* program, const float* x, int32_t width,
                                            const float* kernel, int32_t taps, int32_t dilation, int32_t silu,
                                            const pocketllm::StatePlan* states, float* out);
POCKETLLM_API int32_t pocketllm_gated_delta(pocketllm::Program* program, const float* mixed, int32_t width,
                                            const float* step, const float* share, const pocketllm::DeltaPlan* plan,
                                            const pocketllm::StatePlan* states, float* out);
POCKETLLM_API int32_t pocketllm_kimi_delta(pocketllm::Program* program, const float* q, const float* k, const float* v,
                                           const float* step, const float* share, const pocketllm::KimiPlan* plan,
                                           const pocketllm::StatePlan* states, float* out);
POCKETLLM_API int32_t pocketllm_open_streams(pocketllm::Program* program, const float* x, int32_t width,
                                             int32_t num_streams, float* out);
POCKETLLM_API int32_t pocketllm_read_streams(pocketllm::Program* program, int32_t rows, const float* streams,
                                             int32_t width, const float* logits, const pocketllm::StreamsPlan* plan,
                                             float* out, float* shares);
POCKETLLM_API int32_t pocketllm_write_streams(pocketllm::Program* program, const float* streams, int32_t width,
                                              const float* shares, const float* y, int32_t y_width, float* out);
POCKETLLM_API int32_t pocketllm_mean_streams(pocketllm::Program* program, int32_t rows, const float* streams,
                                             int32_t width, int32_t num_streams, float* out);
POCKETLLM_API int32_t pocketllm_gated_streams(pocketllm::Program* program, const float* streams, int32_t width,
                                              const float* gates, const float* y, int32_t y_width, float* out);
POCKETLLM_API int32_t pocketllm_gate_streams(pocketllm::Program* program, const float* keys, int32_t width,
                                             const float* queries, const float* value, int32_t value_width, float* out);
POCKETLLM_API int32_t pocketllm_limited_mul(pocketllm::Program* program, int32_t rows, const float* gate, int32_t width,
                                            const float* up, float limit, float* out);
POCKETLLM_API int32_t pocketllm_mul_each(pocketllm::Program* program, int32_t rows, const float* x, int32_t width,
                                         const float* by, float* out);
POCKETLLM_API int32_t pocketllm_select(pocketllm::Program* program, pocketllm::KvCache* cache, int32_t layer,
                                       const pocketllm::IndexPlan* plan, const float* q, const float* weights,
                                       float* out);
POCKETLLM_API int32_t pocketllm_compress(pocketllm::Program* program, pocketllm::KvCache* cache, int32_t layer,
                                         const pocketllm::CompressPlan* plan, const float* values, int32_t width,
                                         const float* gates, const pocketllm::StatePlan* states);
POCKETLLM_API int32_t pocketllm_window_attend(pocketllm::Program* program, pocketllm::KvCache* cache, int32_t layer,
                                              const pocketllm::WindowPlan* plan, const float* q, const float* rows,
                                              const pocketllm::StatePlan* states, const void* selection,
                                              int32_t selection_width, float* out);
POCKETLLM_API int32_t pocketllm_ngram_embed(pocketllm::Program* program, const pocketllm::Matrix* table,
                                            const pocketllm::NGramPlan* plan, const pocketllm::StatePlan* states,
                                            float* out);
POCKETLLM_API int32_t pocketllm_project_heads(pocketllm::Program* program, pocketllm::Engine* engine, const float* x,
                                              int32_t width, int32_t activations, const pocketllm::Matrix* const* heads,
                                              int32_t num_heads, float* out);
POCKETLLM_API int32_t pocketllm_store_latent(pocketllm::Program* program, pocketllm::KvCache* cache, int32_t layer,
                                             const float* latent, int32_t width, const float* key);
POCKETLLM_API int32_t pocketllm_attend_latent(pocketllm::Program* program, pocketllm::KvCache* cache, int32_t layer,
                                              const pocketllm::AttentionPlan* plan, const float* q_latent,
                                              int32_t width, const float* q_rope, const void* selection,
                                              int32_t selection_width, float* out);
POCKETLLM_API int32_t pocketllm_layer_norm(pocketllm::Program* program, int32_t rows, const float* x, int32_t width,
                                           const float* weight, const float* bias, float eps, float* out);
POCKETLLM_API int32_t pocketllm_scale(pocketllm::Program* program, int32_t rows, const float* x, int32_t width,
                                      float by, float* out);
POCKETLLM_API int32_t pocketllm_columns(pocketllm::Program* program, int32_t rows, const float* x, int32_t width,
                                        int32_t first, int32_t count, float* out);
