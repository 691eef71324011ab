// A list of phases over buffers at fixed places: built once, then run for each step with any number of rows.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <vector>

#include "runtime/memory.h"
#include "runtime/phase.h"
#include "runtime/pool.h"

namespace pocketllm {

// Time of all programs of an engine by kind of phase, kept when asked for.
struct Profile {
    struct Entry {
        int64_t calls = 0;
        double seconds = 0, bytes = 0, operations = 0;
    };
    bool enabled = false;
    Entry entries[static_cast<int>(Kind::kCount)];
};

// What all programs of one engine share.
struct Engine {
    const Kernels* kernels;
    Pool pool;
    Arena weights;
    std::deque<Matrix> matrices;
    Profile profile;

    Engine(const Kernels* kernels, int threads) : kernels(kernels), pool(threads) {}
};

class Program : private Phases {
  public:
    Program(Engine& engine, int max_tokens) : engine_(engine) { limits.tokens = max_tokens; }

    void add(std::unique_ptr<Phase> phase) { phases_.push_back(std::move(phase)); }

    // Throws Refusal for a step that names what is not there, std::bad_alloc.
    void run(const Step& step);

    Limits limits;

  private:
    int num_phases() const override { return static_cast<int>(phases_.size()); }
    int num_chunks(int phase) override;
    void run_chunk(int phase, int chunk, int worker) override;
    void end() override;
    void check(const Step& step) const;
    void note_time(int phase);

    Engine& engine_;
    std::vector<std::unique_ptr<Phase>> phases_;
    Region shared_, each_;
    size_t each_bytes_ = 0;
    const Step* step_ = nullptr;
    int open_chunks_ = 0, open_phase_ = -1;
    std::chrono::steady_clock::time_point opened_;
};

}  // namespace pocketllm
