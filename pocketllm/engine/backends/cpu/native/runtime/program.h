// A list of phases over buffers at fixed places: built once, then run for each step with any number of rows.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <vector>

#include "runtime/cache.h"
#include "runtime/memory/regions.h"
#include "runtime/phase.h"
#include "runtime/threads/pool.h"

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

// Room that phases compute in, of whichever program runs: a program that is run once does not pay for pages of its own.
struct Scratch {
    Region shared, each;
    size_t each_bytes = 0;  // of each thread

    // Throws std::bad_alloc.
    void make(const Room& room, int threads);
};

// What all programs of one engine share.
struct Engine {
    const Kernels* kernels;
    Pool pool;
    Arena weights;
    std::deque<Matrix> matrices;
    Profile profile;
    Scratch scratch;  // of who has the pool's turn

    Engine(const Kernels* kernels, int threads) : kernels(kernels), pool(threads) {}
};

class Program : private Phases {
  public:
    Program(Engine& engine, int max_tokens) : engine_(engine) { limits.tokens = max_tokens; }

    void add(std::unique_ptr<Phase> phase) { phases_.push_back(std::move(phase)); }
    // A phase writes to this cache.
    void add_written(KvCache& cache);

    // Throws Refusal for a step that names what is not there, std::bad_alloc.
    void run(const Step& step);
    // Make the room that one sequence of as many tokens as a step may have needs, and touch it and `buffers`, by all
    // threads. Throws std::bad_alloc.
    void ready(uint8_t* buffers, size_t bytes);

    Limits limits;

  private:
    class Readying;
    void begin() override { make_room(*step_); }
    int num_phases() const override { return static_cast<int>(phases_.size()); }
    int num_chunks(int phase) override;
    void run_chunk(int phase, int chunk, int worker) override;
    void end() override;
    void check(const Step& step) const;
    void follow(const Step& step) const;
    void make_room(const Step& step);
    void note_time(int phase);

    Engine& engine_;
    std::vector<std::unique_ptr<Phase>> phases_;
    std::vector<KvCache*> written_;
    const Step* step_ = nullptr;
    int open_chunks_ = 0, open_phase_ = -1;
    std::chrono::steady_clock::time_point opened_;
};

}  // namespace pocketllm
