// Recurrent layers: states in slots, one sequence's tokens after another, columns and heads side by side.
#include <cmath>
#include <string>

#include "runtime/phases/sequences.h"

namespace pocketllm {

namespace {

// A phase over all sequences, each cut into the same number of shares.
class SequencesPhase : public Phase {
  public:
    explicit SequencesPhase(int shares) : Phase(Kind::kRecurrent), shares_(shares) {}

    int num_chunks(const Step& step, int) const override {
        return int(std::min<int64_t>(int64_t(step.num_sequences) * shares_, kMaxChunks));
    }
    void run(const Run& run, int chunk, int num_chunks) const override {
        const int64_t items = int64_t(run.step.num_sequences) * shares_;
        for (int64_t item = begin_of(items, chunk, num_chunks); item < begin_of(items, chunk + 1, num_chunks); ++item) {
            run_share(run, int(item / shares_), int(item % shares_));
        }
    }

  private:
    virtual void run_share(const Run& run, int sequence, int share) const = 0;
    const int shares_;
};

class ConvPhase : public SequencesPhase {
  public:
    ConvPhase(Buffer x, const float* kernel, int taps, int dilation, bool silu, const StatePlan& states, float* out)
        : SequencesPhase((x.width + kChannels - 1) / kChannels),
          x_(x),
          kernel_(kernel),
          taps_(taps),
          dilation_(dilation),
          silu_(silu),
          states_(states),
          out_(out) {}

  private:
    static constexpr int kChannels = 256;  // of a share

    void run_share(const Run& run, int sequence, int share) const override {
        const Segment segment(run.step, sequence, states_);
        ConvRows rows{};
        rows.x = x_.data + int64_t(segment.first) * x_.width;
        rows.kernel = kernel_;
        rows.state = segment.state;
        rows.out = out_ + int64_t(segment.first) * x_.width;
        rows.channels = x_.width;
        rows.first = share * kChannels;
        rows.last = std::min(rows.first + kChannels, x_.width);
        rows.taps = taps_;
        rows.dilation = dilation_;
        rows.tokens = segment.tokens;
        rows.begins = segment.begins;
        rows.silu = silu_;
        run.kernels.causal_conv(rows);
    }

    const Buffer x_;
    const float* const kernel_;
    const int taps_, dilation_;
    const bool silu_;
    const StatePlan states_;
    float* const out_;
};

// How much of a state is kept, and how much of what is new is written: a pair for each token and head.
class GatesPhase : public Phase {
  public:
    GatesPhase(const float* step, const float* share, const DeltaPlan& plan)
        : Phase(Kind::kRecurrent), step_(step), share_(share), plan_(plan) {}

    Room prepare(const Step& step, int) override {
        return {size_t(step.tokens()) * plan_.num_value_heads * 2 * sizeof(float),
                delta_scratch_floats(plan_.key_dim) * sizeof(float)};
    }
    int num_chunks(const Step& step, int threads) const override {
        constexpr int kWorkOfOne = 128;  // three functions in float64, in floats that are merely copied
        return row_chunks(step.tokens(), int64_t(kWorkOfOne) * plan_.num_value_heads, threads);
    }
    void run(const Run& run, int chunk, int num_chunks) const override {
        const int64_t heads = plan_.num_value_heads, tokens = run.step.tokens();
        float* const gates = reinterpret_cast<float*>(run.shared);
        const int64_t last = begin_of(tokens, chunk + 1, num_chunks) * heads;
        for (int64_t at = begin_of(tokens, chunk, num_chunks) * heads; at < last; ++at) {
            const double time = double(step_[at]) + plan_.time_bias[at % heads];
            const double softplus = time > 20 ? time : std::log1p(std::exp(time));
            gates[2 * at] = float(std::exp(plan_.rate[at % heads] * softplus));
            gates[2 * at + 1] = float(1.0 / (1.0 + std::exp(-double(share_[at]))));
        }
    }

  private:
    const float* const step_;
    const float* const share_;
    const DeltaPlan plan_;
};

class DeltaPhase : public SequencesPhase {
  public:
    DeltaPhase(Buffer mixed, const DeltaPlan& plan, const StatePlan& states, float* out)
        : SequencesPhase(plan.num_value_heads * parts_of(plan)),
          mixed_(mixed),
          plan_(plan),
          states_(states),
          out_(out) {}

  private:
    static constexpr int kColumns = 64;  // of a head's state, which stay in a core's first-level cache meanwhile

    static int parts_of(const DeltaPlan& plan) { return (plan.value_dim + kColumns - 1) / kColumns; }

    void run_share(const Run& run, int sequence, int share) const override {
        const Segment segment(run.step, sequence, states_);
        const int head = share / parts_of(plan_), part = share % parts_of(plan_), heads = plan_.num_value_heads;
        const int key_head =
            plan_.is_tiled ? head % plan_.num_key_heads : head / (plan_.num_value_heads / plan_.num_key_heads);
        const float* row = mixed_.data + int64_t(segment.first) * mixed_.width;
        DeltaRows rows{};
        rows.q = row + key_head * plan_.key_dim;
        rows.k = rows.q + plan_.num_key_heads * plan_.key_dim;
        rows.v = row + 2 * plan_.num_key_heads * plan_.key_dim + head * plan_.value_dim;
        rows.ld = mixed_.width;
        rows.gates = reinterpret_cast<const float*>(run.shared) + 2 * (int64_t(segment.first) * heads + head);
        rows.ld_gates = heads;
        rows.state = segment.state + int64_t(head) * plan_.key_dim * plan_.value_dim;
        rows.out = out_ + (int64_t(segment.first) * heads + head) * plan_.value_dim;
        rows.ld_out = int64_t(heads) * plan_.value_dim;
        rows.first = part * kColumns;
        rows.last = std::min(rows.first + kColumns, plan_.value_dim);
        rows.key_dim = plan_.key_dim;
        rows.value_dim = plan_.value_dim;
        rows.tokens = segment.tokens;
        rows.eps = plan_.eps;
        rows.begins = segment.begins;
        run.kernels.gated_delta(rows, reinterpret_cast<float*>(run.mine));
    }

    const Buffer mixed_;
    const DeltaPlan plan_;
    const StatePlan states_;
    float* const out_;
};

// Gates as `GatesPhase` has them, without a decay, and behind them decays [tokens][num_heads * dim].
class KimiGatesPhase : public Phase {
  public:
    KimiGatesPhase(const float* step, const float* share, const KimiPlan& plan)
        : Phase(Kind::kRecurrent), step_(step), share_(share), plan_(plan) {}

    Room prepare(const Step& step, int) override {
        return {size_t(step.tokens()) * plan_.num_heads * (2 + plan_.dim) * sizeof(float),
                delta_scratch_floats(plan_.dim) * sizeof(float)};
    }
    int num_chunks(const Step& step, int threads) const override {
        constexpr int kWorkOfOne = 64;  // two functions in float64, in floats that are merely copied
        return row_chunks(step.tokens(), int64_t(kWorkOfOne) * plan_.num_heads * plan_.dim, threads);
    }
    void run(const Run& run, int chunk, int num_chunks) const override {
        const int64_t heads = plan_.num_heads, tokens = run.step.tokens();
        float* const gates = reinterpret_cast<float*>(run.shared);
        float* const decays = gates + 2 * tokens * heads;
        const int64_t last = begin_of(tokens, chunk + 1, num_chunks) * heads;
        for (int64_t at = begin_of(tokens, chunk, num_chunks) * heads; at < last; ++at) {
            gates[2 * at + 1] = float(1.0 / (1.0 + std::exp(-double(share_[at]))));
            const int64_t head = at % heads;
            for (int64_t i = 0; i < plan_.dim; ++i) {
                const double z = double(step_[at * plan_.dim + i]) + plan_.time_bias[head * plan_.dim + i];
                decays[at * plan_.dim + i] = float(std::exp(log_decay(plan_.rate[head], z)));
            }
        }
    }

  private:
    double log_decay(double rate, double z) const {
        if (plan_.is_bounded) return plan_.lower_bound / (1.0 + std::exp(rate * z));
        return rate * (z > 20 ? z : std::log1p(std::exp(z)));
    }

    const float *const step_, *const share_;
    const KimiPlan plan_;
};

class KimiPhase : public SequencesPhase {
  public:
    KimiPhase(const KimiInputs& inputs, const KimiPlan& plan, const StatePlan& states, float* out)
        : SequencesPhase(plan.num_heads), inputs_(inputs), plan_(plan), states_(states), out_(out) {}

  private:
    void run_share(const Run& run, int sequence, int head) const override {
        const Segment segment(run.step, sequence, states_);
        const int64_t heads = plan_.num_heads, dim = plan_.dim, ld = heads * dim;
        const int64_t at = segment.first * ld + head * dim;
        DeltaRows rows{};
        rows.q = inputs_.q + at;
        rows.k = inputs_.k + at;
        rows.v = inputs_.v + at;
        rows.ld = rows.ld_out = ld;
        rows.gates = reinterpret_cast<const float*>(run.shared) + 2 * (segment.first * heads + head);
        rows.ld_gates = heads;
        rows.decays = reinterpret_cast<const float*>(run.shared) + 2 * run.step.tokens() * heads + at;
        rows.state = segment.state + head * dim * dim;
        rows.out = out_ + at;
        rows.last = rows.key_dim = rows.value_dim = plan_.dim;
        rows.tokens = segment.tokens;
        rows.eps = plan_.eps;
        rows.begins = segment.begins;
        run.kernels.gated_delta(rows, reinterpret_cast<float*>(run.mine));
    }

    const KimiInputs inputs_;
    const KimiPlan plan_;
    const StatePlan states_;
    float* const out_;
};

}  // namespace

void add_causal_conv(Program& program, Buffer x, const float* kernel, int taps, int dilation, bool silu,
                     const StatePlan& states, float* out) {
    if (taps < 1 || dilation < 1 || states.slot_floats < int64_t(taps - 1) * dilation * x.width) {
        throw Refusal("a convolution of " + std::to_string(taps) + " taps over " + std::to_string(x.width) +
                      " channels does not fit its states");
    }
    limit_states(program, states);
    program.add(std::make_unique<ConvPhase>(x, kernel, taps, dilation, silu, states, out));
}

void add_gated_delta(Program& program, Buffer mixed, const float* step, const float* share, const DeltaPlan& plan,
                     const StatePlan& states, float* out) {
    const int64_t keys = int64_t(plan.num_key_heads) * plan.key_dim;
    const int64_t width = 2 * keys + int64_t(plan.num_value_heads) * plan.value_dim;
    if (plan.num_key_heads < 1 || plan.num_value_heads % plan.num_key_heads || width != mixed.width ||
        states.slot_floats < int64_t(plan.num_value_heads) * plan.key_dim * plan.value_dim) {
        throw Refusal("a delta rule of " + std::to_string(plan.num_value_heads) + " heads does not fit rows of " +
                      std::to_string(mixed.width) + " and its states");
    }
    limit_states(program, states);
    program.add(std::make_unique<GatesPhase>(step, share, plan));
    program.add(std::make_unique<DeltaPhase>(mixed, plan, states, out));
}

void add_kimi_delta(Program& program, const KimiInputs& inputs, const KimiPlan& plan, const StatePlan& states,
                    float* out) {
    if (plan.num_heads < 1 || plan.dim < 1 || states.slot_floats < int64_t(plan.num_heads) * plan.dim * plan.dim) {
        throw Refusal("a delta rule of " + std::to_string(plan.num_heads) + " heads of " + std::to_string(plan.dim) +
                      " values does not fit its states");
    }
    limit_states(program, states);
    program.add(std::make_unique<KimiGatesPhase>(inputs.step, inputs.share, plan));
    program.add(std::make_unique<KimiPhase>(inputs, plan, states, out));
}

}  // namespace pocketllm
