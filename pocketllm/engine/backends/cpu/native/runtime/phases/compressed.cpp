// Groups of tokens that become one entry of a cache, and attention over the latest tokens and over entries.
// (api/compressed.py: DeepSeek-AI 2026, V4.) What a sequence's next step looks back on is its state.
#include <cmath>
#include <cstring>
#include <string>

#include "runtime/phases/sequences.h"

namespace pocketllm {

namespace {

// Each sequence's last rows into its state: [rows before][width of all parts together].
class KeepRowsPhase : public Phase {
  public:
    KeepRowsPhase(std::vector<Buffer> parts, const StatePlan& states)
        : Phase(Kind::kCompress), parts_(std::move(parts)), states_(states) {}

    int num_chunks(const Step& step, int) const override { return std::min(step.num_sequences, kMaxChunks); }
    void run(const Run& run, int chunk, int num_chunks) const override {
        const int64_t last = begin_of(run.step.num_sequences, chunk + 1, num_chunks);
        for (int64_t row = begin_of(run.step.num_sequences, chunk, num_chunks); row < last; ++row) {
            keep(Segment(run.step, int(row), states_));
        }
    }

  private:
    void keep(const Segment& segment) const {
        int64_t width = 0;
        for (const Buffer& part : parts_) width += part.width;
        const int64_t before = states_.slot_floats / width;
        for (int64_t i = 0; i < before; ++i) {  // a row comes from one that is later, or of this step
            float* to = segment.state + i * width;
            const int64_t from = segment.tokens - before + i;
            if (from < 0 && segment.begins) {
                std::fill(to, to + width, 0.0f);
            } else if (from < 0) {
                std::copy_n(segment.state + (before + from) * width, width, to);
            }
            for (size_t p = 0; p < parts_.size() && from >= 0; to += parts_[p++].width) {
                std::copy_n(parts_[p].data + (segment.first + from) * parts_[p].width, parts_[p].width, to);
            }
        }
    }

    const std::vector<Buffer> parts_;
    const StatePlan states_;
};

class CompressPhase : public Phase {
  public:
    CompressPhase(KvCache& cache, int layer, const CompressPlan& plan, Buffer values, const float* gates,
                  const StatePlan& states)
        : Phase(Kind::kCompress),
          cache_(cache),
          layer_(layer),
          plan_(plan),
          values_(values),
          gates_(gates),
          states_(states) {}

    Room prepare(const Step&, int) override { return {0, size_t(plan_.dim + 2 * plan_.pairs) * sizeof(float)}; }
    int num_chunks(const Step& step, int threads) const override {
        constexpr int kWorkOfExp = 16;  // in floats that are merely copied
        return row_chunks(step.tokens(), int64_t(kWorkOfExp) * plan_.dim, threads);
    }
    void run(const Run& run, int chunk, int num_chunks) const override {
        const int64_t tokens = run.step.tokens(), last = begin_of(tokens, chunk + 1, num_chunks);
        for (int64_t token = begin_of(tokens, chunk, num_chunks); token < last; ++token) {
            const int sequence = sequence_of(run.step, int(token));
            const int position = position_of(run.step, sequence, int(token));
            if ((position + 1) % plan_.ratio == 0) close(run, sequence, int(token), position / plan_.ratio);
        }
    }

  private:
    // A token's values and gates: of this step, or as the state keeps them side by side.
    struct Row {
        const float *values, *gates;
    };
    Row row_at(const Segment& segment, int token) const {
        const int64_t width = values_.width, at = token - segment.first;
        if (at >= 0) return {values_.data + token * width, gates_ + token * width};
        const float* kept = segment.state + (states_.slot_floats / (2 * width) + at) * 2 * width;
        return {kept, kept + width};
    }

    // The entry of a group that ends with `token`.
    void close(const Run& run, int sequence, int token, int entry) const {
        const Segment segment(run.step, sequence, states_);
        float* const out = reinterpret_cast<float*>(run.mine);
        mix(segment, token + 1 - plan_.ratio, plan_.overlaps && entry, out);
        if (plan_.norm) run.kernels.rms_norm(out, 1, plan_.dim, plan_.norm, plan_.eps, out);
        float* const turn = out + plan_.dim;
        angles_at(double(entry) * plan_.ratio, plan_.inv_freq, plan_.pairs, 1.0, turn);
        const Rotation how{plan_.dim, plan_.dim - 2 * plan_.pairs, plan_.pairs, 0, 0};
        run.kernels.rope(out, 1, how, turn, turn + plan_.pairs, out);
        const int64_t slot = cache_.slot_of(blocks_of(run.step, sequence), entry);
        run.kernels.store_kv(cache_.layout, cache_.layer(layer_), slot, nullptr, out);
    }

    // Each place's values of a group from token `first` on, and of the one before where it has a share, weighed by a
    // softmax over the tokens.
    void mix(const Segment& segment, int first, bool with_earlier, float* out) const {
        const int width = values_.width, own = width - plan_.dim, ratio = plan_.ratio;
        for (int place = 0; place < plan_.dim; ++place) {
            float most = -INFINITY;
            const auto each = [&](auto use) {
                for (int i = with_earlier ? -ratio : 0; i < ratio; ++i) {
                    const int at = i < 0 ? place : own + place;
                    const Row row = row_at(segment, first + i);
                    use(row.values[at], row.gates[at] + plan_.position[(i < 0 ? i + ratio : i) * width + at]);
                }
            };
            each([&](float, float gate) { most = std::max(most, gate); });
            double total = 0, sum = 0;
            each([&](float value, float gate) {
                const double power = std::exp(double(gate - most));
                total += power;
                sum += power * value;
            });
            out[place] = float(sum / total);
        }
    }

    KvCache& cache_;
    const int layer_;
    const CompressPlan plan_;
    const Buffer values_;
    const float* const gates_;
    const StatePlan states_;
};

class WindowPhase : public Phase {
  public:
    WindowPhase(KvCache* cache, int layer, const WindowPlan& plan, const float* q, const float* rows,
                const StatePlan& states, Selection selection, float* out)
        : Phase(Kind::kAttend),
          cache_(cache),
          layer_(layer),
          plan_(plan),
          q_(q),
          rows_(rows),
          states_(states),
          selection_(selection),
          out_(out) {}

    Room prepare(const Step& step, int) override {
        int most = 0;
        for (int row = 0; row < step.num_sequences; ++row) most = std::max(most, num_entries(step.seq_lens[row]));
        if (selection_.rows) most = std::min(most, selection_.width - 1);
        keys_ = padded_lanes(plan_.window + most);
        const size_t floats = key_floats() + attention_scratch_floats(plan_.dim, plan_.dim);
        return {0, floats * sizeof(float)};
    }
    int num_chunks(const Step& step, int) const override { return int(std::min<int64_t>(items(step), kMaxChunks)); }
    void run(const Run& run, int chunk, int num_chunks) const override {
        const int64_t last = begin_of(items(run.step), chunk + 1, num_chunks);
        for (int64_t item = begin_of(items(run.step), chunk, num_chunks); item < last; ++item) {
            const int first = int(item % parts()) * kAttentionRows;
            attend(run, int(item / parts()), first, std::min(first + kAttentionRows, plan_.num_heads));
        }
    }

  private:
    int parts() const { return (plan_.num_heads + kAttentionRows - 1) / kAttentionRows; }
    int64_t items(const Step& step) const { return int64_t(step.tokens()) * parts(); }
    int num_entries(int tokens) const { return cache_ ? tokens / cache_->ratio : 0; }
    int64_t key_floats() const { return int64_t(keys_) * plan_.dim + 16; }  // a vector may be read past the last

    // What a token sees, row after row: the window's, then entries. Returns how many.
    int gather(const Run& run, int token, float* to) const {
        const int sequence = sequence_of(run.step, token), dim = plan_.dim;
        const Segment segment(run.step, sequence, states_);
        const int position = position_of(run.step, sequence, token), near = std::min(plan_.window, position + 1);
        const float* const before = segment.state + int64_t(plan_.window - 1 - segment.first) * dim;
        for (int other = token + 1 - near; other <= token; ++other, to += dim) {
            std::copy_n((other < segment.first ? before : rows_) + int64_t(other) * dim, dim, to);
        }
        const int32_t* picked = selection_.rows ? selection_.rows + int64_t(token) * selection_.width : nullptr;
        const int count = picked ? picked[0] : num_entries(position + 1);
        for (int i = 0; i < count; ++i, to += dim) {
            const int64_t slot = cache_->slot_of(blocks_of(run.step, sequence), picked ? picked[1 + i] : i);
            run.kernels.load_latent(cache_->layout, cache_->layer(layer_), slot, to);
        }
        return near + count;
    }

    // Heads [first, last) of one token: as rows over a cache of one block, which is what it sees.
    void attend(const Run& run, int token, int first, int last) const {
        static constexpr int32_t kOnlyBlock = 0;
        float* const keys = reinterpret_cast<float*>(run.mine);
        KvLayout layout{};
        layout.is_latent = true;
        layout.kv_heads = 1;
        layout.key_dim = layout.value_dim = layout.value_stride = plan_.dim;
        layout.block_size = keys_;
        AttentionRows rows{};
        rows.cache = &layout;
        rows.layer = run.mine;
        rows.blocks = &kOnlyBlock;
        rows.group = plan_.num_heads;
        rows.first_row = first;
        rows.last_row = last;
        rows.num_tokens = 1;
        rows.seq_len = gather(run, token, keys);
        rows.scale = plan_.scale;
        rows.sinks = plan_.sinks;
        rows.q = q_ + int64_t(token) * plan_.num_heads * plan_.dim;
        rows.q_dim = plan_.dim;
        rows.out = out_ + int64_t(token) * plan_.num_heads * plan_.dim;
        run.kernels.attend(rows, 0, (rows.seq_len + kAttentionTile - 1) / kAttentionTile, nullptr,
                           keys + key_floats());
    }

    KvCache* const cache_;
    const int layer_;
    const WindowPlan plan_;
    const float *const q_, *const rows_;
    const StatePlan states_;
    const Selection selection_;
    float* const out_;
    int keys_ = 0;  // most that a token of the step at hand sees
};

}  // namespace

void add_compress(Program& program, KvCache& cache, int layer, const CompressPlan& plan, Buffer values,
                  const float* gates, const StatePlan& states) {
    check_layer(cache, layer);
    const int before = (plan.overlaps ? 2 : 1) * plan.ratio - 1;
    if (!cache.layout.is_latent || cache.ratio != plan.ratio || cache.layout.key_dim != plan.dim ||
        values.width != plan.dim * (plan.overlaps ? 2 : 1) || 2 * plan.pairs > plan.dim ||
        states.slot_floats != int64_t(before) * 2 * values.width) {
        throw Refusal("groups of " + std::to_string(plan.ratio) + " tokens of " + std::to_string(values.width) +
                      " values do not fit their cache and states");
    }
    limit_blocks(program, cache);
    limit_states(program, states);
    program.add_written(cache);
    program.add(std::make_unique<CompressPhase>(cache, layer, plan, values, gates, states));
    const std::vector<Buffer> parts{values, {const_cast<float*>(gates), values.width}};
    program.add(std::make_unique<KeepRowsPhase>(parts, states));
}

void add_window_attend(Program& program, KvCache* cache, int layer, const WindowPlan& plan, const float* q,
                       const float* rows, const StatePlan& states, Selection selection, float* out) {
    if (plan.num_heads < 1 || plan.window < 1 || states.slot_floats != int64_t(plan.window - 1) * plan.dim ||
        (cache && (!cache->layout.is_latent || cache->layout.key_dim != plan.dim))) {
        throw Refusal("a window of " + std::to_string(plan.window) + " rows of " + std::to_string(plan.dim) +
                      " does not fit its states and cache");
    }
    if (cache) {
        check_layer(*cache, layer);
        limit_blocks(program, *cache);
    }
    limit_states(program, states);
    program.add(std::make_unique<WindowPhase>(cache, layer, plan, q, rows, states, selection, out));
    const std::vector<Buffer> parts{{const_cast<float*>(rows), plan.dim}};
    program.add(std::make_unique<KeepRowsPhase>(parts, states));
}

}  // namespace pocketllm
