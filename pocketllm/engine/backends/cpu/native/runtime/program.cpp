#include "runtime/program.h"

#include <algorithm>
#include <string>

#include "runtime/memory/touch.h"

namespace pocketllm {

namespace {

std::string outside(const char* what, int64_t value, int64_t limit) {
    return std::string(what) + " " + std::to_string(value) + " is outside 0 to " + std::to_string(limit - 1);
}

template <class Number>
void check_each(const char* what, const Number* values, int64_t count, int64_t limit) {
    for (int64_t i = 0; i < count; ++i) {
        if (values[i] < 0 || values[i] >= limit) throw Refusal(outside(what, values[i], limit));
    }
}

}  // namespace

const char* name_of(Kind kind) {
    static const char* const names[] = {"embed", "norm",     "quantize", "multiply",    "angles",
                                        "rope",  "store_kv", "attend",   "elementwise", "take",
                                        "mixture", "recurrent", "streams", "select", "compress"};
    return names[static_cast<int>(kind)];
}

// Everything that is used as an index below, once for all phases.
void Program::check(const Step& step) const {
    const int tokens = step.tokens(), logit_rows = step.rows(Rows::kLogitRows);
    if (tokens < 0 || tokens > limits.tokens) {
        throw Refusal("a step of " + std::to_string(tokens) + " tokens in a program for " +
                      std::to_string(limits.tokens));
    }
    if (step.logit_rows) check_each("row", step.logit_rows, logit_rows, tokens);
    if (limits.input_ids != INT32_MAX) check_each("token id", step.input_ids, tokens, limits.input_ids);
    if (limits.slots != INT64_MAX) check_each("cache slot", step.slot_mapping, tokens, limits.slots);
    const bool has_windows = limits.window_slots != INT64_MAX || limits.window_blocks != INT32_MAX;
    if (has_windows && !(step.window_table && step.window_slots)) throw Refusal("a step without its windows' blocks");
    if (limits.window_slots != INT64_MAX) check_each("window slot", step.window_slots, tokens, limits.window_slots);
    if (limits.state_slots != INT32_MAX) {
        if (step.num_state_slots != step.num_sequences) throw Refusal("a step of sequences without their state slots");
        check_each("state slot", step.state_slots, step.num_state_slots, limits.state_slots);
    } else if (!limits.block_size) {
        return;
    }
    for (int row = 0; row < step.num_sequences; ++row) {
        const int first = step.query_start_loc[row], last = step.query_start_loc[row + 1], length = step.seq_lens[row];
        if (first < 0 || last < first || last > tokens) throw Refusal(outside("query start", last, tokens + 1));
        if (!limits.block_size) continue;
        const int64_t blocks = (length + limits.block_size - 1) / limits.block_size;
        if (length < last - first || blocks > step.table_width) {
            throw Refusal("a sequence of " + std::to_string(length) + " tokens, " + std::to_string(last - first) +
                          " of them new, has " + std::to_string(step.table_width) + " blocks");
        }
        const int64_t begin = int64_t(row) * step.table_width;
        if (limits.blocks != INT32_MAX) check_each("cache block", step.block_table + begin, blocks, limits.blocks);
        if (limits.window_blocks != INT32_MAX) {
            check_each("window block", step.window_table + begin, blocks, limits.window_blocks);
        }
    }
}

void Scratch::make(const Room& room, int threads) {
    // whole huge pages, however little is wanted: small pages lie in the caches as luck has it, and two programs of one
    // forward then differ in speed
    if (room.shared > shared.bytes()) shared = Region(whole_huge_pages(room.shared));
    if (room.each > each_bytes) {
        // whole pages, so that no two threads write to one line
        const size_t bytes = (room.each + 4095) / 4096 * 4096;
        each = Region(whole_huge_pages(bytes * threads));
        each_bytes = bytes;
    }
}

void Program::add_written(KvCache& cache) {
    if (std::find(written_.begin(), written_.end(), &cache) == written_.end()) written_.push_back(&cache);
}

void Program::run(const Step& step) {
    check(step);
    follow(step);
    step_ = &step;
    open_phase_ = -1;
    engine_.pool.run(*this);
}

void Program::follow(const Step& step) const {
    if (step.tokens() == 0) return;
    for (KvCache* cache : written_) {
        const int64_t* slots = step.slots_of(cache->in_windows);
        cache->follow(*std::max_element(slots, slots + step.tokens()) / cache->block_tokens);
    }
}

void Program::make_room(const Step& step) {
    Room room;
    for (const auto& phase : phases_) {
        const Room wanted = phase->prepare(step, engine_.pool.threads());
        room.shared = std::max(room.shared, wanted.shared);
        room.each = std::max(room.each, wanted.each);
    }
    engine_.scratch.make(room, engine_.pool.threads());
}

class Program::Readying : public Phases {
  public:
    Readying(Program& program, const Step& step, uint8_t* buffers, size_t bytes)
        : program_(program), step_(step), buffers_{buffers, bytes} {}

    void begin() override { program_.make_room(step_); }
    int num_phases() const override { return 3; }
    int num_chunks(int phase) override { return touch_chunks(piece(phase).bytes); }
    void run_chunk(int phase, int chunk, int) override {
        const Piece touched = piece(phase);
        touch_chunk(touched.data, touched.bytes, chunk);
    }

  private:
    struct Piece {
        uint8_t* data;
        size_t bytes;
    };
    Piece piece(int phase) const {
        if (phase == 0) return buffers_;
        const Scratch& scratch = program_.engine_.scratch;
        const Region& region = phase == 1 ? scratch.shared : scratch.each;
        return {region.data(), region.bytes()};
    }

    Program& program_;
    const Step& step_;
    const Piece buffers_;
};

void Program::ready(uint8_t* buffers, size_t bytes) {
    const int32_t tokens = int32_t(limits.tokens), starts[] = {0, tokens};
    Step step{};
    step.num_rows[static_cast<int>(Rows::kTokens)] = tokens;
    step.num_rows[static_cast<int>(Rows::kLogitRows)] = 1;
    step.num_sequences = 1;
    step.query_start_loc = starts;
    step.seq_lens = &tokens;
    Readying work(*this, step, buffers, bytes);
    engine_.pool.run(work);
}

int Program::num_chunks(int phase) {
    if (engine_.profile.enabled) note_time(phase);
    open_chunks_ = phases_[phase]->num_chunks(*step_, engine_.pool.threads());
    return open_chunks_;
}

void Program::run_chunk(int phase, int chunk, int worker) {
    const Run run{*engine_.kernels, *step_, engine_.pool.threads(), engine_.scratch.shared.data(),
                  engine_.scratch.each.data() + worker * engine_.scratch.each_bytes};
    phases_[phase]->run(run, chunk, open_chunks_);
}

void Program::end() {
    if (engine_.profile.enabled) note_time(-1);
}

// The open phase has ended, and `next` opens.
void Program::note_time(int next) {
    const auto now = std::chrono::steady_clock::now();
    if (open_phase_ >= 0) {
        const Phase& phase = *phases_[open_phase_];
        Profile::Entry& entry = engine_.profile.entries[static_cast<int>(phase.kind)];
        entry.calls += 1;
        entry.seconds += std::chrono::duration<double>(now - opened_).count();
        entry.bytes += phase.bytes(*step_);
        entry.operations += phase.operations(*step_);
    }
    open_phase_ = next;
    opened_ = now;
}

}  // namespace pocketllm
