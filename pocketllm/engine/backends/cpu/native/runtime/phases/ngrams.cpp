// Rows of a table by hashes of a token and those before it (api/indexed.py, `NGrams`).
#include <string>

#include "runtime/phases/sequences.h"

namespace pocketllm {

namespace {

// Ids before a step as a state's floats: exact up to 2^24.
int64_t id_at(const Step& step, const Segment& segment, const NGramPlan& plan, int token) {
    if (token >= segment.first) return step.input_ids[token];
    return segment.begins ? plan.end_token : int64_t(segment.state[plan.length - 1 + token - segment.first]);
}

class NGramPhase : public Phase {
  public:
    NGramPhase(const Matrix& table, const NGramPlan& plan, const StatePlan& states, float* out)
        : Phase(Kind::kEmbed), table_(table), plan_(plan), states_(states), out_(out) {}

    int num_chunks(const Step& step, int threads) const override {
        return row_chunks(step.tokens(), int64_t(heads()) * table_.cols, threads);
    }
    void run(const Run& run, int chunk, int num_chunks) const override {
        const int64_t tokens = run.step.tokens(), last = begin_of(tokens, chunk + 1, num_chunks);
        for (int64_t token = begin_of(tokens, chunk, num_chunks); token < last; ++token) look_up(run, int(token));
    }

  private:
    int heads() const { return (plan_.length - 1) * plan_.heads_per_length; }

    // What stands before an end of text counts as end of text, too; the token itself may be one.
    void look_up(const Run& run, int token) const {
        const Segment segment(run.step, sequence_of(run.step, token), states_);
        const int64_t end = plan_.end_token;
        float* to = out_ + int64_t(token) * heads() * table_.cols;
        uint64_t mixed = uint64_t(id_at(run.step, segment, plan_, token)) * uint64_t(plan_.multipliers[0]);
        bool is_open = true;
        for (int back = 1, head = 0; back < plan_.length; ++back) {
            const int64_t id = is_open ? id_at(run.step, segment, plan_, token - back) : end;
            is_open = is_open && id != end;
            mixed ^= uint64_t(id) * uint64_t(plan_.multipliers[back]);
            for (int i = 0; i < plan_.heads_per_length; ++i, ++head, to += table_.cols) {
                const int64_t size = plan_.sizes[head], rest = int64_t(mixed) % size;
                run.kernels.decode_row(table_, int((rest < 0 ? rest + size : rest) + plan_.offsets[head]), to);
            }
        }
    }

    const Matrix& table_;
    const NGramPlan plan_;
    const StatePlan states_;
    float* const out_;
};

// Each sequence's last ids, for its next step.
class KeepIdsPhase : public Phase {
  public:
    KeepIdsPhase(const NGramPlan& plan, const StatePlan& states) : Phase(Kind::kEmbed), plan_(plan), states_(states) {}

    int num_chunks(const Step& step, int) const override { return step.num_sequences ? 1 : 0; }
    void run(const Run& run, int, int) const override {
        for (int row = 0; row < run.step.num_sequences; ++row) {
            const Segment segment(run.step, row, states_);
            const int end = segment.first + segment.tokens, before = plan_.length - 1;
            for (int i = 0; i < before; ++i) {  // an id comes from one that is later, or of this step
                segment.state[i] = float(id_at(run.step, segment, plan_, end - before + i));
            }
        }
    }

  private:
    const NGramPlan plan_;
    const StatePlan states_;
};

}  // namespace

void add_ngram_embed(Program& program, const Matrix& table, const NGramPlan& plan, const StatePlan& states,
                     float* out) {
    if (plan.length < 2 || plan.heads_per_length < 1 || states.slot_floats < plan.length - 1) {
        throw Refusal("n-grams of " + std::to_string(plan.length) + " tokens do not fit their states");
    }
    for (int head = 0; head < (plan.length - 1) * plan.heads_per_length; ++head) {
        if (plan.sizes[head] < 1 || plan.offsets[head] < 0 || plan.sizes[head] > table.rows - plan.offsets[head]) {
            throw Refusal("n-grams of head " + std::to_string(head) + " are outside a table of " +
                          std::to_string(table.rows) + " rows");
        }
    }
    limit_states(program, states);
    program.add(std::make_unique<NGramPhase>(table, plan, states, out));
    program.add(std::make_unique<KeepIdsPhase>(plan, states));
}

}  // namespace pocketllm
