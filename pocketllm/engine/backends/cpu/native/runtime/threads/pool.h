// Threads that compute phases of work together. A phase is cut into chunks that any thread may take; the next phase
// opens when all chunks are done, not when all threads have arrived: a thread that lost its core delays only the chunk
// it holds.
#pragma once

#include <memory>

namespace pocketllm {

constexpr int kMaxChunks = 65535;

class Phases {
  public:
    virtual ~Phases() = default;
    // Called once before the first phase, by the caller, in its turn. What it throws ends the run.
    virtual void begin() {}
    virtual int num_phases() const = 0;
    // Called once as the phase opens, by one thread, everything before it done. 0: nothing to do; at most kMaxChunks.
    virtual int num_chunks(int phase) = 0;
    // Must not throw. 0 <= worker < threads, and no two calls at once have the same.
    virtual void run_chunk(int phase, int chunk, int worker) = 0;
    // Called once after the last phase, by one thread, before the caller is told.
    virtual void end() {}
};

class Pool {
  public:
    // The caller of `run` counts as one of the threads. Throws std::system_error where a thread cannot be started.
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }

    // Compute all phases, in order; callers in several threads take turns. Works in a forked child too, where the
    // threads are started anew.
    void run(Phases& work);

  private:
    struct State;
    void start();
    void stop();

    const int threads_;
    std::unique_ptr<State> state_;
};

}  // namespace pocketllm
