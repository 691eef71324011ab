// A mixture of experts: tokens are routed, and their rows grouped by expert, so that each expert that is used is read
// once a step. A row is computed by itself and summed in the order of its ranks: others' routes do not change its bits.
#include "runtime/phases/mixture/mixture.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace pocketllm {

namespace {

constexpr int kWorkOfExp = 16;  // in floats that are merely copied

class GroupPhase : public Phase {
  public:
    explicit GroupPhase(Shared mixture) : Phase(Kind::kMixture), mixture_(std::move(mixture)) {}

    int num_chunks(const Step& step, int) const override { return step.tokens() ? 1 : 0; }
    void run(const Run& run, int, int) const override { group(*mixture_, run, mixture_->places(run)); }

  private:
    const Shared mixture_;
};

// -- rows -------------------------------------------------------------------------------------------------------------
// A token's row into the slots of its entries.
void gather(const Mixture& mixture, const Run&, const Mixture::Places& places, int token) {
    const int used = mixture.plan.num_used, width = mixture.x.width;
    const int32_t* slots = places.slot + token * used;
    const float* row = mixture.x.data + int64_t(token) * width;
    if (mixture.opens_quantized()) {
        const size_t bytes = mixture.quantized->bytes(width);
        uint8_t* first = places.quantized + slots[0] * bytes;
        mixture.quantized->quantize(row, width, width, 0, 1, nullptr, 0.0f, first);
        for (int i = 1; i < used; ++i) std::memcpy(places.quantized + slots[i] * bytes, first, bytes);
    }
    if (!mixture.opens_floats()) return;
    for (int i = 0; i < used; ++i) std::memcpy(places.rows + int64_t(slots[i]) * width, row, width * sizeof(float));
}

void gate(const Mixture& mixture, const Run& run, const Mixture::Places& places, int slot) {
    const int inner = mixture.inner();
    float* row = places.gate + int64_t(slot) * inner;
    const float* up = places.up + int64_t(slot) * inner;
    if (mixture.plan.gate_bias) {
        run.kernels.bounded_mul(row, up, inner, mixture.plan.slope, mixture.plan.limit, row);
    } else if (mixture.plan.limit > 0) {
        run.kernels.limited_mul(row, up, inner, mixture.plan.limit, row);
    } else if (mixture.plan.expert_scale) {
        run.kernels.gelu_mul(row, up, inner, row);
    } else {
        run.kernels.silu_mul(row, up, inner, row);
    }
    if (!mixture.closes_quantized()) return;
    mixture.quantized->quantize(row, inner, inner, 0, 1, nullptr, 0.0f,
                                places.gated + slot * mixture.quantized->bytes(inner));
}

void sum(const Mixture& mixture, const Run&, const Mixture::Places& places, int token) {
    const int used = mixture.plan.num_used, width = mixture.x.width;
    float* out = mixture.out + int64_t(token) * width;
    for (int i = 0; i < used; ++i) {
        const float weight = places.weights[token * used + i];
        const float* made = places.made + int64_t(places.slot[token * used + i]) * width;
        for (int col = 0; col < width; ++col) out[col] = i == 0 ? made[col] * weight : out[col] + made[col] * weight;
    }
}

// -- products ---------------------------------------------------------------------------------------------------------
// Every expert that has rows, one or two matrices of each; chunks are cut by cost, between any two groups of rows.
class ExpertsPhase : public Phase {
  public:
    ExpertsPhase(Shared mixture, bool opens) : Phase(Kind::kMultiply), mixture_(std::move(mixture)), opens_(opens) {}

    int num_chunks(const Step& step, int threads) const override {
        if (!step.tokens()) return 0;
        return threads == 1 ? 1 : int(std::min<int64_t>(threads * kChunks, groups() * mixture_->plan.num_used));
    }

    void run(const Run& run, int chunk, int num_chunks) const override {
        const Mixture::Places places = mixture_->places(run);
        int64_t total = 0;
        each_product(places, [&](const Product& product) { total += product.cost(); });
        const int64_t first = begin_of(total, chunk, num_chunks), last = begin_of(total, chunk + 1, num_chunks);
        int64_t before = 0;
        each_product(places, [&](const Product& product) {
            const int64_t groups = product.cost() / product.group_cost();
            const auto group_at = [&](int64_t cost) {
                const int64_t group = (cost - before + product.group_cost() - 1) / product.group_cost();
                return int(std::clamp<int64_t>(group, 0, groups));
            };
            const int begin = group_at(first), end = group_at(last);
            if (begin < end) multiply(run, places, product, begin, end);
            before += product.cost();
        });
    }

    // of as many experts as one token uses: which ones they are is not kept
    double bytes(const Step& step) const override {
        return step.tokens() ? mixture_->plan.num_used * weights_of_one(true) : 0;
    }
    double operations(const Step& step) const override { return 2.0 * mixture_->entries(step) * weights_of_one(false); }

  private:
    static constexpr int kChunks = 8;      // for each thread
    static constexpr int kRowsAtOnce = 96;  // of activations: what stays in a core's L2 cache
    static constexpr int64_t kStream = 4;  // reading a weight costs as much as multiplying it so often

    struct Product {
        const Matrix& w;
        const float* bias;
        float* out;  // of slot 0
        int first, last;
        int64_t group_cost() const { return int64_t(w.group_bytes) * (kStream + last - first); }
        int64_t cost() const { return (w.rows + kGroupRows - 1) / kGroupRows * group_cost(); }
    };

    int64_t groups() const { return (weights()[0]->rows + kGroupRows - 1) / kGroupRows; }
    const Matrix* const* weights() const { return opens_ ? mixture_->plan.gate : mixture_->plan.down; }
    double weights_of_one(bool in_bytes) const {
        const Matrix& w = *weights()[0];
        const double each = in_bytes ? double(w.group_bytes) * groups() : double(w.rows) * w.cols;
        return opens_ ? 2 * each : each;
    }

    template <class Use>
    void each_product(const Mixture::Places& places, Use use) const {
        const MixturePlan& plan = mixture_->plan;
        for (int expert = 0; expert < plan.num_experts; ++expert) {
            const int first = places.begin[expert], last = places.begin[expert + 1];
            if (first == last) continue;
            const auto add = [&](const Matrix& w, const float* biases, float* out) {
                use(Product{w, biases ? biases + int64_t(expert) * w.rows : nullptr, out, first, last});
            };
            if (opens_) {
                add(*plan.gate[expert], plan.gate_bias, places.gate);
                add(*plan.up[expert], plan.up_bias, places.up);
            } else {
                add(*plan.down[expert], plan.down_bias, places.made);
            }
        }
    }

    void multiply(const Run& run, const Mixture::Places& places, const Product& product, int begin, int end) const {
        const Matrix& w = product.w;
        for (int slot = product.first; slot < product.last; slot += kRowsAtOnce) {
            const int count = std::min(kRowsAtOnce, product.last - slot);
            const Output out{product.out + int64_t(slot) * w.rows, w.rows, product.bias, nullptr, 0};
            if (mixture_->takes_floats(w)) {
                const float* x = opens_ ? places.rows : places.gate;
                run.kernels.matmul_f32(w, x + int64_t(slot) * w.cols, w.cols, count, begin, end, out);
            } else {
                const uint8_t* x = opens_ ? places.quantized : places.gated;
                const QuantizedRows& rows = *mixture_->quantized;
                rows.matmul(w, x + slot * rows.bytes(w.cols), count, begin, end, out);
            }
        }
    }

    const Shared mixture_;
    const bool opens_;  // gate and up; otherwise down
};

void check(const MixturePlan& plan, const Buffer& x) {
    if (plan.num_used < 1 || plan.num_used > plan.num_experts) {
        throw Refusal(std::to_string(plan.num_used) + " of " + std::to_string(plan.num_experts) + " experts");
    }
    const int size = plan.num_groups < 1 ? 0 : plan.num_experts / plan.num_groups;
    if (size * plan.num_groups != plan.num_experts || plan.num_groups_used < 1 || plan.best_of_group < 1 ||
        plan.num_groups_used > plan.num_groups || plan.best_of_group > size ||
        plan.num_used > plan.num_groups_used * size) {
        throw Refusal(std::to_string(plan.num_experts) + " experts cannot be routed by " +
                      std::to_string(plan.num_groups_used) + " of " + std::to_string(plan.num_groups) + " groups");
    }
    const int inner = plan.gate[0]->rows;
    for (int i = 0; i < plan.num_experts; ++i) {
        const Matrix &gate = *plan.gate[i], &up = *plan.up[i], &down = *plan.down[i];
        const bool fits = gate.cols == x.width && up.cols == x.width && gate.rows == inner && up.rows == inner &&
                          down.cols == inner && down.rows == x.width;
        if (!fits) throw Refusal("an expert's matrices do not fit rows of " + std::to_string(x.width));
    }
}

}  // namespace

void add_mixture(Program& program, const Kernels& kernels, Buffer x, const float* logits, Activations activations,
                 const MixturePlan& plan, float* out) {
    check(plan, x);
    if (plan.routes) program.limits.input_ids = std::min<int64_t>(program.limits.input_ids, plan.num_routes);
    const auto mixture = std::make_shared<Mixture>(Mixture{plan, x, logits, out, kernels.rows_of(activations)});
    const auto add_rows = [&](bool of_slots, int64_t work, OnRow on_row) {
        program.add(std::make_unique<MixtureRows>(mixture, of_slots, work, on_row));
    };
    add_rows(false, int64_t(plan.num_experts) * (plan.num_used + kWorkOfExp), route);
    program.add(std::make_unique<GroupPhase>(mixture));
    add_rows(false, 4 * int64_t(x.width), gather);
    program.add(std::make_unique<ExpertsPhase>(mixture, true));
    add_rows(true, 8 * int64_t(mixture->inner()), gate);
    program.add(std::make_unique<ExpertsPhase>(mixture, false));
    add_rows(false, int64_t(x.width) * plan.num_used, sum);
}

}  // namespace pocketllm
