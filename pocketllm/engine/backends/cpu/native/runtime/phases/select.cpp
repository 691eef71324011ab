// Which of a sequence's keys each token attends. Index keys are laid out as floats once a step; then every token scores
// those up to it, each key by itself, and takes the best.
#include <cstring>
#include <functional>
#include <string>

#include "runtime/phases/sequences.h"

namespace pocketllm {

namespace {

// What both phases share.
struct Index {
    const KvCache& cache;
    const int layer;
    const IndexPlan plan;
    std::vector<int64_t> first_key;  // [sequences + 1] of the step at hand

    int width() const { return padded_lanes(plan.dim); }
    int64_t count(int64_t tokens) const { return tokens / plan.ratio; }
    void lay_out(const Step& step) {
        first_key.assign(1, 0);
        for (int row = 0; row < step.num_sequences; ++row) {
            first_key.push_back(first_key.back() + count(step.seq_lens[row]));
        }
    }
    size_t bytes() const { return first_key.back() * width() * sizeof(float); }
    float* key(const Run& run, int64_t number) const { return reinterpret_cast<float*>(run.shared) + number * width(); }
};

class IndexKeysPhase : public Phase {
  public:
    explicit IndexKeysPhase(std::shared_ptr<Index> index) : Phase(Kind::kSelect), index_(std::move(index)) {}

    Room prepare(const Step& step, int) override {
        index_->lay_out(step);
        return {index_->bytes(), (index_->plan.dim + 2 * index_->plan.pairs) * sizeof(float)};
    }
    int num_chunks(const Step&, int threads) const override {
        const int64_t keys = index_->first_key.back();
        return row_chunks(int(std::min<int64_t>(keys, INT32_MAX)), index_->plan.dim * index_->plan.ratio, threads);
    }
    void run(const Run& run, int chunk, int num_chunks) const override {
        const std::vector<int64_t>& first = index_->first_key;
        const int64_t last = begin_of(first.back(), chunk + 1, num_chunks);
        for (int64_t key = begin_of(first.back(), chunk, num_chunks); key < last; ++key) {
            const int sequence = int(std::upper_bound(first.begin(), first.end(), key) - first.begin()) - 1;
            lay(run, sequence, key - first[sequence], index_->key(run, key));
        }
    }

  private:
    void load(const Run& run, int sequence, int64_t entry, float* out) const {
        const KvCache& cache = index_->cache;
        const int64_t slot = cache.slot_of(blocks_of(run.step, sequence), entry);
        run.kernels.load_latent(cache.layout, cache.layer(index_->layer), slot, out);
    }
    void lay(const Run& run, int sequence, int64_t number, float* out) const {
        const IndexPlan& plan = index_->plan;
        const int each = plan.ratio / index_->cache.ratio;
        load(run, sequence, number * each, out);
        if (each > 1) mean(run, sequence, number, out);
        std::fill(out + plan.dim, out + index_->width(), 0.0f);
    }
    // The mean of a group's keys, normed and rotated at its first token. out: the first of them
    void mean(const Run& run, int sequence, int64_t group, float* out) const {
        const IndexPlan& plan = index_->plan;
        float* const next = reinterpret_cast<float*>(run.mine);
        for (int i = 1; i < plan.ratio; ++i) {
            load(run, sequence, group * plan.ratio + i, next);
            run.kernels.add(out, next, plan.dim, out);
        }
        for (int i = 0; i < plan.dim; ++i) out[i] /= float(plan.ratio);
        if (!plan.norm) return;
        run.kernels.rms_norm(out, 1, plan.dim, plan.norm, plan.eps, out);
        float* const turn = next + plan.dim;
        angles_at(double(group) * plan.ratio, plan.inv_freq, plan.pairs, 1.0, turn);
        run.kernels.rope(out, 1, {plan.dim, 0, plan.pairs, 1, 0}, turn, turn + plan.pairs, out);
    }

    const std::shared_ptr<Index> index_;
};

class SelectPhase : public Phase {
  public:
    SelectPhase(std::shared_ptr<Index> index, const float* q, const float* weights, float* out)
        : Phase(Kind::kSelect),
          index_(std::move(index)),
          q_(q),
          weights_(weights),
          out_(reinterpret_cast<int32_t*>(out)),
          row_(int64_t(index_->plan.num_best + 1) * index_->plan.expand) {}

    Room prepare(const Step& step, int) override {
        int64_t most = 0;
        for (int row = 0; row < step.num_sequences; ++row) most = std::max<int64_t>(most, step.seq_lens[row]);
        const size_t queries = size_t(index_->plan.num_heads) * index_->width();
        return {index_->bytes(), (queries + index_->count(most)) * sizeof(float) + 64 +
                                     index_->count(most) * sizeof(uint64_t)};
    }
    int num_chunks(const Step& step, int) const override { return std::min(step.tokens(), kMaxChunks); }
    void run(const Run& run, int chunk, int num_chunks) const override {
        const int64_t tokens = run.step.tokens(), last = begin_of(tokens, chunk + 1, num_chunks);
        for (int64_t token = begin_of(tokens, chunk, num_chunks); token < last; ++token) select(run, int(token));
    }

  private:
    void select(const Run& run, int token) const {
        const IndexPlan& plan = index_->plan;
        const int sequence = sequence_of(run.step, token), seen = position_of(run.step, sequence, token) + 1;
        const int count = int(index_->count(seen)), expand = plan.expand;
        int32_t* const row = out_ + token * row_;
        int32_t* to = row + 1;
        const auto take = [&](int key) {
            for (int i = 0; i < expand; ++i) *to++ = key * expand + i;
        };
        if (count <= plan.num_best) {
            for (int key = 0; key < count; ++key) take(key);
        } else {
            uint64_t* const order = rank(run, token, sequence, count);
            for (int i = 0; i < plan.num_best; ++i) take(key_of(order[i]));
        }
        for (int key = count * expand; key < seen && expand == plan.ratio; ++key) *to++ = key;
        row[0] = int32_t(to - row - 1);
    }

    // A score in the order of floats, then the earlier key first: as whole numbers, larger is better.
    static uint64_t ranked(float score, int key) {
        uint32_t bits;
        std::memcpy(&bits, &score, sizeof bits);
        bits = bits >> 31 ? ~bits : bits | 0x80000000u;
        return uint64_t(bits) << 32 | uint32_t(~key);
    }
    static int key_of(uint64_t rank) { return int(~uint32_t(rank)); }

    // The best keys of the first `count`, ascending, first.
    uint64_t* rank(const Run& run, int token, int sequence, int count) const {
        const IndexPlan& plan = index_->plan;
        const int width = index_->width();
        float* const q = reinterpret_cast<float*>(run.mine);
        for (int head = 0; head < plan.num_heads; ++head) {
            float* const to = q + int64_t(head) * width;
            std::copy_n(q_ + (int64_t(token) * plan.num_heads + head) * plan.dim, plan.dim, to);
            std::fill(to + plan.dim, to + width, 0.0f);
        }
        float* const scores = q + int64_t(plan.num_heads) * width;
        const float* weights = weights_ ? weights_ + int64_t(token) * plan.num_heads : nullptr;
        const float* keys = index_->key(run, index_->first_key[sequence]);
        run.kernels.index_scores({q, weights, keys, plan.num_heads, plan.dim, count}, scores);
        const uintptr_t behind = reinterpret_cast<uintptr_t>(scores + count);
        auto* const order = reinterpret_cast<uint64_t*>((behind + 63) / 64 * 64);
        for (int key = 0; key < count; ++key) order[key] = ranked(scores[key], key);
        std::nth_element(order, order + plan.num_best, order + count, std::greater<>());
        std::sort(order, order + plan.num_best, [](uint64_t a, uint64_t b) { return key_of(a) < key_of(b); });
        return order;
    }

    const std::shared_ptr<Index> index_;
    const float *const q_, *const weights_;
    int32_t* const out_;
    const int64_t row_;
};

}  // namespace

void add_select(Program& program, KvCache& cache, int layer, const IndexPlan& plan, const float* q,
                const float* weights, float* out) {
    check_layer(cache, layer);
    const bool fits = plan.num_heads > 0 && plan.num_best > 0 && plan.ratio > 0 && plan.pairs >= 0 &&
                      cache.layout.is_latent && cache.layout.key_dim == plan.dim && 2 * plan.pairs <= plan.dim;
    const bool is_known = (cache.ratio == 1 || cache.ratio == plan.ratio) &&
                          (plan.expand == plan.ratio || (plan.expand == 1 && cache.ratio == plan.ratio));
    if (!fits || !is_known) {
        throw Refusal("an index of keys of " + std::to_string(plan.dim) + " values and groups of " +
                      std::to_string(plan.ratio) + " does not fit its cache");
    }
    limit_blocks(program, cache);
    const auto index = std::make_shared<Index>(Index{cache, layer, plan, {}});
    program.add(std::make_unique<IndexKeysPhase>(index));
    program.add(std::make_unique<SelectPhase>(index, q, weights, out));
}

}  // namespace pocketllm
