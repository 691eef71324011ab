// Writing keys and values, and attention over them.
#include <algorithm>
#include <atomic>
#include <string>

#include "runtime/phases/sequences.h"

namespace pocketllm {

namespace {

class StoreKvPhase : public Phase {
  public:
    StoreKvPhase(KvCache& cache, int layer, const float* k, const float* v)
        : Phase(Kind::kStoreKv), cache_(cache), layer_(layer), k_(k), v_(v) {}

    int num_chunks(const Step& step, int threads) const override {
        constexpr int kMisses = 16;  // a key's values each go to another line of memory
        return row_chunks(step.tokens(), kMisses * (key_width() + value_width()), threads);
    }

    void run(const Run& run, int chunk, int num_chunks) const override {
        const int64_t tokens = run.step.tokens(), last = begin_of(tokens, chunk + 1, num_chunks);
        for (int64_t token = begin_of(tokens, chunk, num_chunks); token < last; ++token) {
            run.kernels.store_kv(cache_.layout, cache_.layer(layer_), run.step.slots_of(cache_.in_windows)[token],
                                 k_ + token * key_width(), v_ + token * value_width());
        }
    }

  private:
    int64_t key_width() const { return int64_t(cache_.layout.kv_heads) * cache_.layout.key_dim; }
    int64_t value_width() const { return int64_t(cache_.layout.kv_heads) * cache_.layout.value_dim; }

    KvCache& cache_;
    const int layer_;
    const float* const k_;
    const float* const v_;
};

// Rows [latent | key] of a cache of latents.
class StoreLatentPhase : public Phase {
  public:
    StoreLatentPhase(KvCache& cache, int layer, Buffer latent, const float* key)
        : Phase(Kind::kStoreKv), cache_(cache), layer_(layer), latent_(latent), key_(key) {}

    Room prepare(const Step&, int) override { return {0, cache_.layout.key_dim * sizeof(float)}; }

    int num_chunks(const Step& step, int threads) const override {
        return row_chunks(step.tokens(), 2 * int64_t(cache_.layout.key_dim), threads);
    }

    void run(const Run& run, int chunk, int num_chunks) const override {
        float* const row = reinterpret_cast<float*>(run.mine);
        const int64_t tokens = run.step.tokens(), last = begin_of(tokens, chunk + 1, num_chunks);
        const int rank = latent_.width, rest = cache_.layout.key_dim - rank;
        for (int64_t token = begin_of(tokens, chunk, num_chunks); token < last; ++token) {
            std::copy_n(latent_.data + token * rank, rank, row);
            std::copy_n(key_ + token * rest, rest, row + rank);
            run.kernels.store_kv(cache_.layout, cache_.layer(layer_), run.step.slot_mapping[token], nullptr, row);
        }
    }

  private:
    KvCache& cache_;
    const int layer_;
    const Buffer latent_;
    const float* const key_;
};

// Query rows of one sequence that are computed together, for each key head.
struct Part {
    int sequence, first_row, last_row;
    int first_tile, num_tiles;
    int first_item, num_items;  // tiles are spread over so many items of work
    int64_t partials_at;        // floats, of key head 0; where num_items > 1
};

class AttendPhase : public Phase {
  public:
    // layout: as attention sees the cache. q_rest: dimensions from q_dim on, where they lie apart
    AttendPhase(KvCache& cache, const KvLayout& layout, int layer, const AttentionPlan& plan, const float* q, int q_dim,
                const float* q_rest, Selection selection, float* out)
        : Phase(Kind::kAttend),
          cache_(cache),
          layout_(layout),
          layer_(layer),
          plan_(plan),
          q_(q),
          q_dim_(q_dim),
          q_rest_(q_rest),
          selection_(selection),
          out_(out) {}

    Room prepare(const Step& step, int threads) override {
        cut_rows(step);
        share_tiles(threads);
        const size_t counters = parts_.size() * kv_heads();
        if (counters > left_capacity_) {
            left_ = std::make_unique<std::atomic<int>[]>(counters);
            left_capacity_ = counters;
        }
        for (size_t i = 0; i < counters; ++i)
            left_[i].store(parts_[i % parts_.size()].num_items, std::memory_order_relaxed);
        const size_t each = attention_scratch_floats(layout_.key_dim, layout_.value_dim);
        return {partials_ * kv_heads() * sizeof(float), each * sizeof(float)};
    }

    int num_chunks(const Step&, int) const override {
        const int64_t items = int64_t(items_) * kv_heads();
        return int(std::min<int64_t>(items, kMaxChunks));
    }

    void run(const Run& run, int chunk, int num_chunks) const override {
        const int64_t items = int64_t(items_) * kv_heads(), last = begin_of(items, chunk + 1, num_chunks);
        for (int64_t item = begin_of(items, chunk, num_chunks); item < last; ++item) {
            run_item(run, int(item / items_), int(item % items_));
        }
    }

    double bytes(const Step& step) const override {
        return seen_keys(step) * kv_heads() * element_bytes() * kept_dims();
    }
    double operations(const Step&) const override {
        double pairs = 0;
        for (const Part& part : parts_)
            pairs += double(part.num_tiles) * kAttentionTile * (part.last_row - part.first_row);
        return 2 * pairs * kv_heads() * dims();
    }

  private:
    int kv_heads() const { return layout_.kv_heads; }
    int group() const { return plan_.num_heads / kv_heads(); }
    double dims() const { return double(layout_.key_dim) + layout_.value_dim; }
    double kept_dims() const { return layout_.is_latent ? layout_.key_dim : dims(); }
    double element_bytes() const {
        return layout_.dtype == KvDtype::kFloat32 ? 4 : layout_.dtype == KvDtype::kInt8 ? 1 : 2;
    }
    static double seen_keys(const Step& step) {
        double keys = 0;
        for (int row = 0; row < step.num_sequences; ++row) keys += step.seq_lens[row];
        return keys;
    }

    void cut_rows(const Step& step) {
        parts_.clear();
        for (int sequence = 0; sequence < step.num_sequences; ++sequence) {
            const int tokens = step.query_start_loc[sequence + 1] - step.query_start_loc[sequence];
            const int start = step.seq_lens[sequence] - tokens, rows = tokens * group();
            for (int first = 0, last; first < rows; first = last) {
                last = std::min(first + kAttentionRows, rows);
                if (selection_.rows) last = std::min(last, (first / group() + 1) * group());  // of one token
                const int first_seen = plan_.window ? std::max(0, start + first / group() - plan_.window + 1) : 0;
                const int first_tile = first_seen / kAttentionTile, end = end_of(start + (last - 1) / group() + 1);
                const int last_tile = (end + kAttentionTile - 1) / kAttentionTile;
                parts_.push_back({sequence, first, last, first_tile, last_tile - first_tile, 0, 1, 0});
            }
        }
    }

    // Keys that the last of some rows sees at most, of `before` that there are up to its token.
    int end_of(int before) const { return selection_.rows ? std::min(before, selection_.width - 1) : before; }

    // Few parts with many keys are cut further, between tiles, so that every thread has some.
    void share_tiles(int threads) {
        const int64_t wanted = int64_t(threads) * kChunksPerThread;
        int64_t tiles = 0;
        for (const Part& part : parts_) tiles += part.num_tiles;
        const bool cut = threads > 1 && int64_t(parts_.size()) * kv_heads() < wanted;
        const int at_once = cut ? int(std::max<int64_t>(1, (tiles * kv_heads() + wanted - 1) / wanted)) : INT32_MAX;
        items_ = 0;
        partials_ = 0;
        for (Part& part : parts_) {
            part.first_item = items_;
            part.num_items = cut ? (part.num_tiles + at_once - 1) / at_once : 1;
            part.partials_at = partials_;
            items_ += part.num_items;
            if (part.num_items > 1) {
                partials_ += int64_t(part.num_tiles) * (part.last_row - part.first_row) *
                             partial_floats(layout_.value_dim);
            }
        }
    }

    AttentionRows rows_of(const Run& run, const Part& part, int head) const {
        const Step& step = run.step;
        const KvLayout& layout = layout_;
        const int first = step.query_start_loc[part.sequence],
                  num_tokens = step.query_start_loc[part.sequence + 1] - first;
        const int rest_dim = layout.key_dim - q_dim_;
        const int64_t ld_q = int64_t(plan_.num_heads) * q_dim_, ld_rest = int64_t(plan_.num_heads) * rest_dim,
                      ld_out = int64_t(plan_.num_heads) * layout.value_dim;
        AttentionRows rows{};
        rows.cache = &layout;
        rows.layer = cache_.layer(layer_);
        rows.blocks = step.table_of(cache_.in_windows) + int64_t(part.sequence) * step.table_width;
        rows.kv_head = head;
        rows.group = group();
        rows.first_row = part.first_row;
        rows.last_row = part.last_row;
        rows.num_tokens = num_tokens;
        rows.seq_len = step.seq_lens[part.sequence];
        rows.window = plan_.window;
        rows.scale = plan_.scale;
        rows.softcap = plan_.softcap;
        if (plan_.sinks) rows.sinks = plan_.sinks + head * group();
        rows.q = q_ + first * ld_q + int64_t(head) * group() * q_dim_;
        rows.ld_q = ld_q;
        rows.q_dim = q_dim_;
        if (rest_dim) rows.q_rest = q_rest_ + first * ld_rest + int64_t(head) * group() * rest_dim;
        rows.ld_q_rest = ld_rest;
        rows.out = out_ + first * ld_out + int64_t(head) * group() * layout.value_dim;
        rows.ld_out = ld_out;
        if (selection_.rows) pick(rows, part, first);
        return rows;
    }

    // The part's rows as those of a sequence of one token and of the keys that it picked.
    void pick(AttentionRows& rows, const Part& part, int first_token) const {
        const int token = part.first_row / group();
        const int32_t* picked = selection_.rows + int64_t(first_token + token) * selection_.width;
        rows.picked = picked + 1;
        rows.seq_len = picked[0];
        rows.num_tokens = 1;
        rows.first_row -= token * group();
        rows.last_row -= token * group();
        rows.q += token * rows.ld_q;
        if (rows.q_rest) rows.q_rest += token * rows.ld_q_rest;
        rows.out += token * rows.ld_out;
    }

    void run_item(const Run& run, int head, int item) const {
        const auto after = std::upper_bound(parts_.begin(), parts_.end(), item,
                                            [](int item, const Part& part) { return item < part.first_item; });
        const Part& part = *(after - 1);
        const AttentionRows rows = rows_of(run, part, head);
        float* scratch = reinterpret_cast<float*>(run.mine);
        const int end = part.first_tile + part.num_tiles;
        if (part.num_items == 1) return run.kernels.attend(rows, part.first_tile, end, nullptr, scratch);
        const int share = item - part.first_item;
        const int first = int(begin_of(part.num_tiles, share, part.num_items));
        const int last = int(begin_of(part.num_tiles, share + 1, part.num_items));
        const int64_t tile_floats = int64_t(part.last_row - part.first_row) * partial_floats(layout_.value_dim);
        float* partials = reinterpret_cast<float*>(run.shared) + head * partials_ + part.partials_at;
        run.kernels.attend(rows, part.first_tile + first, part.first_tile + last, partials + first * tile_floats,
                           scratch);
        std::atomic<int>& left = left_[head * parts_.size() + (&part - parts_.data())];
        if (left.fetch_sub(1, std::memory_order_acq_rel) == 1)
            run.kernels.merge(rows, part.num_tiles, partials, scratch);
    }

    KvCache& cache_;
    const KvLayout layout_;
    const int layer_;
    const AttentionPlan plan_;
    const float* const q_;
    const int q_dim_;
    const float* const q_rest_;
    const Selection selection_;
    float* const out_;
    // of the step at hand
    std::vector<Part> parts_;
    int items_ = 0;
    int64_t partials_ = 0;  // floats of one key head
    std::unique_ptr<std::atomic<int>[]> left_;
    size_t left_capacity_ = 0;
};

void limit_slots(Program& program, const KvCache& cache) {
    int64_t& slots = cache.in_windows ? program.limits.window_slots : program.limits.slots;
    slots = std::min(slots, int64_t(cache.layout.num_blocks) * cache.layout.block_size);
}

}  // namespace

void check_layer(const KvCache& cache, int layer) {
    if (layer < 0 || layer >= cache.layout.num_layers) {
        throw Refusal("layer " + std::to_string(layer) + " of a cache of " + std::to_string(cache.layout.num_layers));
    }
}

void limit_blocks(Program& program, const KvCache& cache) {
    Limits& limits = program.limits;
    if (limits.block_size && limits.block_size != cache.block_tokens) throw Refusal("caches of two block sizes");
    int64_t& blocks = cache.in_windows ? limits.window_blocks : limits.blocks;
    blocks = std::min<int64_t>(blocks, cache.layout.num_blocks);
    limits.block_size = cache.block_tokens;
}

void add_store_kv(Program& program, KvCache& cache, int layer, const float* k, const float* v) {
    check_layer(cache, layer);
    limit_slots(program, cache);
    program.add_written(cache);
    program.add(std::make_unique<StoreKvPhase>(cache, layer, k, v));
}

void add_store_latent(Program& program, KvCache& cache, int layer, Buffer latent, const float* key) {
    check_layer(cache, layer);
    if (!cache.layout.is_latent || latent.width > cache.layout.key_dim) {
        throw Refusal("latents of " + std::to_string(latent.width) + " values do not fit rows of " +
                      std::to_string(cache.layout.key_dim));
    }
    limit_slots(program, cache);
    program.add_written(cache);
    program.add(std::make_unique<StoreLatentPhase>(cache, layer, latent, key));
}

void add_attend(Program& program, KvCache& cache, int layer, const AttentionPlan& plan, const float* q,
                Selection selection, float* out) {
    check_layer(cache, layer);
    if (plan.num_heads < 1 || plan.num_heads % cache.layout.kv_heads) {
        throw Refusal(std::to_string(plan.num_heads) + " query heads cannot share " +
                      std::to_string(cache.layout.kv_heads) + " key heads");
    }
    limit_blocks(program, cache);
    const KvLayout& layout = cache.layout;
    program.add(
        std::make_unique<AttendPhase>(cache, layout, layer, plan, q, layout.key_dim, nullptr, selection, out));
}

void add_attend_latent(Program& program, KvCache& cache, int layer, const AttentionPlan& plan, Buffer q_latent,
                       const float* q_rope, Selection selection, float* out) {
    check_layer(cache, layer);
    const int rank = plan.num_heads < 1 ? 0 : q_latent.width / plan.num_heads;
    if (!cache.layout.is_latent || rank < 1 || rank > cache.layout.key_dim) {
        throw Refusal("queries of " + std::to_string(rank) + " values do not fit latents of " +
                      std::to_string(cache.layout.key_dim));
    }
    limit_blocks(program, cache);
    KvLayout layout = cache.layout;
    layout.value_dim = rank;
    program.add(
        std::make_unique<AttendPhase>(cache, layout, layer, plan, q_latent.data, rank, q_rope, selection, out));
}

}  // namespace pocketllm
