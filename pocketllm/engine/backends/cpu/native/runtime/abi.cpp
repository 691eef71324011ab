#include "runtime/abi.h"

#include <algorithm>
#include <new>
#include <string>

#include "dispatch.h"
#include "layouts/formats.h"
#include "layouts/repack.h"

using namespace pocketllm;

namespace {

thread_local std::string problem;

// Whatever a function throws becomes `failed` and a sentence: nothing may leave through the C interface.
template <class Result, class Function>
Result guarded(Result failed, Function function) {
    try {
        return function();
    } catch (const std::bad_alloc&) {
        problem = "out of memory";
    } catch (const std::exception& error) {
        problem = error.what();
    } catch (...) {
        problem = "an unknown error";
    }
    return failed;
}

template <class Function>
int32_t attempt(Function function) {
    return guarded<int32_t>(1, [&] {
        function();
        return 0;
    });
}

Buffer buffer(const float* data, int32_t width) { return {const_cast<float*>(data), width}; }

Selection selection_of(const void* rows, int32_t width) { return {static_cast<const int32_t*>(rows), width}; }

Rows rows_of(int32_t rows) { return static_cast<Rows>(rows); }

Activations activations_of(int32_t activations) { return static_cast<Activations>(activations); }

// A matrix's groups, repacked by all threads.
class Repacking : public Phases {
  public:
    Repacking(const Matrix& matrix, const uint8_t* file, const int8_t* grid, uint8_t* groups)
        : matrix_(matrix), file_(file), grid_(grid), groups_(groups) {}

    int num_phases() const override { return 1; }
    int num_chunks(int) override {
        return int(
            std::min<int64_t>(num_groups(), 1 + int64_t(num_groups()) * int64_t(matrix_.group_bytes) / kChunkBytes));
    }
    void run_chunk(int, int chunk, int) override {
        const int chunks = num_chunks(0);
        repack(matrix_.format, file_, matrix_.rows, matrix_.cols, int(begin_of(num_groups(), chunk, chunks)),
               int(begin_of(num_groups(), chunk + 1, chunks)), grid_, groups_);
    }

  private:
    static constexpr int64_t kChunkBytes = 256 << 10;
    int num_groups() const { return (matrix_.rows + kGroupRows - 1) / kGroupRows; }

    const Matrix& matrix_;
    const uint8_t* const file_;
    const int8_t* const grid_;
    uint8_t* const groups_;
};

}  // namespace

int32_t pocketllm_abi_version() { return kAbiVersion; }

const char* pocketllm_problem() { return problem.c_str(); }

const char* pocketllm_usable_isas() { return usable_isas().c_str(); }

Engine* pocketllm_engine_new(int32_t threads, const char* isa) {
    return guarded<Engine*>(nullptr, [&] {
        std::string why;
        const Kernels* kernels = find_kernels(isa, why);
        if (!kernels) throw Refusal(why);
        return new Engine(kernels, threads);
    });
}

void pocketllm_engine_free(Engine* engine) { delete engine; }

const char* pocketllm_engine_isa(const Engine* engine) { return engine->kernels->name; }

const Matrix* pocketllm_matrix_new(Engine* engine, int32_t format, const uint8_t* file, int64_t file_bytes,
                                   int32_t rows, int32_t cols, const int8_t* grid) {
    return guarded<const Matrix*>(nullptr, [&] {
        const Layout layout = layout_of(format);
        if (!layout.block_cols) throw Refusal("no kernels for matrices of GGUF type " + std::to_string(format));
        if (rows < 1 || cols < 1 || cols % layout.block_cols ||
            file_bytes != int64_t(rows) * (cols / layout.block_cols) * layout.block_bytes) {
            throw Refusal("a matrix [" + std::to_string(rows) + ", " + std::to_string(cols) + "] of GGUF type " +
                          std::to_string(format) + " in " + std::to_string(file_bytes) + " bytes");
        }
        Matrix matrix{format, rows, cols, group_bytes(format, cols), nullptr};
        uint8_t* groups = engine->weights.allocate((rows + kGroupRows - 1) / kGroupRows * matrix.group_bytes);
        matrix.data = groups;
        Repacking work(matrix, file, grid, groups);
        engine->pool.run(work);
        engine->matrices.push_back(matrix);
        return const_cast<const Matrix*>(&engine->matrices.back());
    });
}

void pocketllm_profile_start(Engine* engine) { engine->profile.enabled = true; }

const char* pocketllm_profile_read(const Engine* engine, int32_t kind, double* figures) {
    if (kind < 0 || kind >= static_cast<int32_t>(Kind::kCount)) return nullptr;
    const Profile::Entry& entry = engine->profile.entries[kind];
    figures[0] = double(entry.calls);
    figures[1] = entry.seconds;
    figures[2] = entry.bytes;
    figures[3] = entry.operations;
    return name_of(static_cast<Kind>(kind));
}

KvCache* pocketllm_kv_new(int32_t dtype, int32_t num_layers, int32_t kv_heads, int32_t key_dim, int32_t value_dim,
                          int32_t num_blocks, int32_t block_size, int32_t in_windows) {
    return guarded<KvCache*>(nullptr, [&] {
        return new KvCache(
            kv_layout(static_cast<KvDtype>(dtype), num_layers, kv_heads, key_dim, value_dim, num_blocks, block_size),
            in_windows != 0);
    });
}

KvCache* pocketllm_latent_new(int32_t dtype, int32_t num_layers, int32_t dim, int32_t num_blocks, int32_t block_size) {
    return guarded<KvCache*>(nullptr, [&] {
        return new KvCache(latent_layout(static_cast<KvDtype>(dtype), num_layers, dim, num_blocks, block_size));
    });
}

void pocketllm_kv_free(KvCache* cache) { delete cache; }

KvCache* pocketllm_compressed_new(int32_t dtype, int32_t num_layers, int32_t dim, int32_t ratio, int32_t num_blocks,
                                  int32_t block_size) {
    return guarded<KvCache*>(nullptr, [&] {
        if (ratio < 1 || block_size < 1) throw Refusal("entries of " + std::to_string(ratio) + " tokens");
        const int32_t entries = (block_size + ratio - 1) / ratio;
        const KvLayout layout = latent_layout(static_cast<KvDtype>(dtype), num_layers, dim, num_blocks, entries);
        return new KvCache(layout, ratio, block_size);
    });
}

uint8_t* pocketllm_kv_data(KvCache* cache, int64_t* bytes) {
    bytes[0] = int64_t(cache->region.bytes());
    bytes[1] = cache->layout.block_bytes;
    return cache->region.data();
}

Program* pocketllm_program_new(Engine* engine, int32_t max_tokens) {
    return guarded<Program*>(nullptr, [&] { return new Program(*engine, max_tokens); });
}

void pocketllm_program_free(Program* program) { delete program; }

int32_t pocketllm_ready(Program* program, uint8_t* buffers, int64_t bytes) {
    return attempt([&] { program->ready(buffers, size_t(bytes)); });
}

int32_t pocketllm_run(Program* program, const Step* step) {
    return attempt([&] { program->run(*step); });
}

int32_t pocketllm_embed(Program* program, const Matrix* table, float scale, float* out) {
    return attempt([&] { add_embed(*program, *table, scale, buffer(out, table->cols)); });
}

int32_t pocketllm_rms_norm(Program* program, int32_t rows, const float* x, int32_t width, const float* weight,
                           int32_t weight_width, float eps, float* out) {
    return attempt([&] { add_rms_norm(*program, rows_of(rows), buffer(x, width), weight, weight_width, eps, out); });
}

int32_t pocketllm_project(Program* program, Engine* engine, int32_t rows, const float* x, int32_t width,
                          const float* norm, float eps, int32_t activations, int32_t count,
                          const ProjectionPlan* projections) {
    return attempt([&] {
        add_project(*program, *engine->kernels, rows_of(rows), buffer(x, width), norm, eps,
                    activations_of(activations), {projections, projections + count});
    });
}

int32_t pocketllm_angles(Program* program, const float* inv_freq, int32_t pairs, float magnitude, float* out) {
    return attempt([&] { add_angles(*program, inv_freq, pairs, magnitude, out); });
}

int32_t pocketllm_rope(Program* program, const float* x, int32_t width, const float* angles, const Rotation* how,
                       float* out) {
    return attempt([&] { add_rope(*program, buffer(x, width), angles, *how, out); });
}

int32_t pocketllm_store_kv(Program* program, KvCache* cache, int32_t layer, const float* k, const float* v) {
    return attempt([&] { add_store_kv(*program, *cache, layer, k, v); });
}

int32_t pocketllm_attend(Program* program, KvCache* cache, int32_t layer, const AttentionPlan* plan, const float* q,
                         const void* selection, int32_t selection_width, float* out) {
    return attempt(
        [&] { add_attend(*program, *cache, layer, *plan, q, selection_of(selection, selection_width), out); });
}

int32_t pocketllm_elementwise(Program* program, int32_t what, int32_t rows, const float* x, int32_t width,
                              const float* y, float* out) {
    return attempt(
        [&] { add_elementwise(*program, static_cast<Elementwise>(what), rows_of(rows), buffer(x, width), y, out); });
}

int32_t pocketllm_take(Program* program, const float* x, int32_t width, float* out) {
    return attempt([&] { add_take(*program, buffer(x, width), out); });
}

int32_t pocketllm_mixture(Program* program, Engine* engine, const float* x, int32_t width, const float* logits,
                          int32_t activations, const MixturePlan* plan, float* out) {
    return attempt([&] {
        add_mixture(*program, *engine->kernels, buffer(x, width), logits, activations_of(activations), *plan, out);
    });
}

int32_t pocketllm_gate_rows(Program* program, const float* x, int32_t width, const float* gate, float* out) {
    return attempt([&] { add_gate_rows(*program, buffer(x, width), gate, out); });
}

int32_t pocketllm_hadamard(Program* program, int32_t rows, const float* x, int32_t width, const float* signs,
                           int32_t block, int32_t inverse, float* out) {
    return attempt([&] { add_hadamard(*program, rows_of(rows), buffer(x, width), signs, block, inverse != 0, out); });
}

int32_t pocketllm_causal_conv(Program* program, const float* x, int32_t width, const float* kernel, int32_t taps,
                              int32_t dilation, int32_t silu, const StatePlan* states, float* out) {
    return attempt(
        [&] { add_causal_conv(*program, buffer(x, width), kernel, taps, dilation, silu != 0, *states, out); });
}

int32_t pocketllm_gated_delta(Program* program, const float* mixed, int32_t width, const float* step,
                              const float* share, const DeltaPlan* plan, const StatePlan* states, float* out) {
    return attempt([&] { add_gated_delta(*program, buffer(mixed, width), step, share, *plan, *states, out); });
}

int32_t pocketllm_kimi_delta(Program* program, const float* q, const float* k, const float* v, const float* step,
                             const float* share, const KimiPlan* plan, const StatePlan* states, float* out) {
    return attempt([&] { add_kimi_delta(*program, {q, k, v, step, share}, *plan, *states, out); });
}

int32_t pocketllm_open_streams(Program* program, const float* x, int32_t width, int32_t num_streams, float* out) {
    return attempt([&] { add_open_streams(*program, buffer(x, width), num_streams, out); });
}

int32_t pocketllm_read_streams(Program* program, int32_t rows, const float* streams, int32_t width,
                               const float* logits, const StreamsPlan* plan, float* out, float* shares) {
    return attempt(
        [&] { add_read_streams(*program, rows_of(rows), buffer(streams, width), logits, *plan, out, shares); });
}

int32_t pocketllm_write_streams(Program* program, const float* streams, int32_t width, const float* shares,
                                const float* y, int32_t y_width, float* out) {
    return attempt([&] { add_write_streams(*program, buffer(streams, width), shares, buffer(y, y_width), out); });
}

int32_t pocketllm_mean_streams(Program* program, int32_t rows, const float* streams, int32_t width,
                               int32_t num_streams, float* out) {
    return attempt([&] { add_mean_streams(*program, rows_of(rows), buffer(streams, width), num_streams, out); });
}

int32_t pocketllm_gated_streams(Program* program, const float* streams, int32_t width, const float* gates,
                                const float* y, int32_t y_width, float* out) {
    return attempt([&] { add_gated_streams(*program, buffer(streams, width), gates, buffer(y, y_width), out); });
}

int32_t pocketllm_gate_streams(Program* program, const float* keys, int32_t width, const float* queries,
                               const float* value, int32_t value_width, float* out) {
    return attempt([&] { add_gate_streams(*program, buffer(keys, width), queries, buffer(value, value_width), out); });
}

int32_t pocketllm_limited_mul(Program* program, int32_t rows, const float* gate, int32_t width, const float* up,
                              float limit, float* out) {
    return attempt([&] { add_limited_mul(*program, rows_of(rows), buffer(gate, width), up, limit, out); });
}

int32_t pocketllm_mul_each(Program* program, int32_t rows, const float* x, int32_t width, const float* by,
                           float* out) {
    return attempt([&] { add_mul_each(*program, rows_of(rows), buffer(x, width), by, out); });
}

int32_t pocketllm_select(Program* program, KvCache* cache, int32_t layer, const IndexPlan* plan, const float* q,
                         const float* weights, float* out) {
    return attempt([&] { add_select(*program, *cache, layer, *plan, q, weights, out); });
}

int32_t pocketllm_compress(Program* program, KvCache* cache, int32_t layer, const CompressPlan* plan,
                           const float* values, int32_t width, const float* gates, const StatePlan* states) {
    return attempt([&] { add_compress(*program, *cache, layer, *plan, buffer(values, width), gates, *states); });
}

int32_t pocketllm_window_attend(Program* program, KvCache* cache, int32_t layer, const WindowPlan* plan,
                                const float* q, const float* rows, const StatePlan* states, const void* selection,
                                int32_t selection_width, float* out) {
    return attempt([&] {
        add_window_attend(*program, cache, layer, *plan, q, rows, *states, selection_of(selection, selection_width),
                          out);
    });
}

int32_t pocketllm_ngram_embed(Program* program, const Matrix* table, const NGramPlan* plan, const StatePlan* states,
                              float* out) {
    return attempt([&] { add_ngram_embed(*program, *table, *plan, *states, out); });
}

int32_t pocketllm_project_heads(Program* program, Engine* engine, const float* x, int32_t width, int32_t activations,
                                const Matrix* const* heads, int32_t num_heads, float* out) {
    return attempt([&] {
        add_project_heads(*program, *engine->kernels, buffer(x, width), activations_of(activations), heads, num_heads,
                          out);
    });
}

int32_t pocketllm_store_latent(Program* program, KvCache* cache, int32_t layer, const float* latent, int32_t width,
                               const float* key) {
    return attempt([&] { add_store_latent(*program, *cache, layer, buffer(latent, width), key); });
}

int32_t pocketllm_attend_latent(Program* program, KvCache* cache, int32_t layer, const AttentionPlan* plan,
                                const float* q_latent, int32_t width, const float* q_rope, const void* selection,
                                int32_t selection_width, float* out) {
    return attempt([&] {
        add_attend_latent(*program, *cache, layer, *plan, buffer(q_latent, width), q_rope,
                          selection_of(selection, selection_width), out);
    });
}

int32_t pocketllm_layer_norm(Program* program, int32_t rows, const float* x, int32_t width, const float* weight,
                             const float* bias, float eps, float* out) {
    return attempt([&] { add_layer_norm(*program, rows_of(rows), buffer(x, width), weight, bias, eps, out); });
}

int32_t pocketllm_scale(Program* program, int32_t rows, const float* x, int32_t width, float by, float* out) {
    return attempt([&] { add_scale(*program, rows_of(rows), buffer(x, width), by, out); });
}

int32_t pocketllm_columns(Program* program, int32_t rows, const float* x, int32_t width, int32_t first, int32_t count,
                          float* out) {
    return attempt([&] { add_columns(*program, rows_of(rows), buffer(x, width), first, count, out); });
}
