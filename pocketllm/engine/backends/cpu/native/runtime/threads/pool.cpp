#include "runtime/threads/pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/threads/thread.h"

namespace pocketllm {

namespace {

// Long enough for the gap between two phases; a thread that spins longer keeps a core from whoever has work for it.
constexpr auto kSpin = std::chrono::microseconds(100);

void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// What is open, in one word, so that a chunk can only be taken from the phase that is open now:
// sequence number of the phase (32 bits), its chunks (16), the next chunk to take (16). No chunks: at rest.
using Ticket = uint64_t;
Ticket make_ticket(uint32_t sequence, int total) { return Ticket(sequence) << 32 | Ticket(total) << 16; }
uint32_t sequence_of(Ticket ticket) { return uint32_t(ticket >> 32); }
int total_of(Ticket ticket) { return int(ticket >> 16 & 0xffff); }
int next_of(Ticket ticket) { return int(ticket & 0xffff); }

}  // namespace

struct Pool::State {
    alignas(64) std::atomic<Ticket> ticket{0};
    alignas(64) std::atomic<int> done{0};
    // the open phase: written before its ticket, read only by holders of one of its chunks
    alignas(64) Phases* phases = nullptr;
    int phase = 0;

    alignas(64) std::atomic<bool> parked{false};
    std::atomic<bool> stopping{false};
    std::mutex parking;
    std::condition_variable changed;

    std::mutex turn;
    std::vector<std::thread> threads;
    const unsigned generation = fork_generation();

    void work(int worker);
    void advance(int worker);
    void publish(int total);
    void wait(Ticket seen);
};

// Take chunks until the program is done (the caller's thread, worker 0) or the pool is stopped (the others).
void Pool::State::work(int worker) {
    for (;;) {
        Ticket seen = ticket.load(std::memory_order_acquire);
        const int chunk = next_of(seen), total = total_of(seen);
        if (chunk < total) {
            if (!ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
            phases->run_chunk(phase, chunk, worker);
            if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == total) advance(worker);
        } else if (worker == 0 ? total == 0 : stopping.load()) {
            return;
        } else {
            wait(seen);
        }
    }
}

// Open the next phase; called by whoever did the last chunk of the one before, so by one thread at a time.
void Pool::State::advance(int worker) {
    const int end = phases->num_phases();
    while (++phase < end) {
        const int total = phases->num_chunks(phase);
        if (total > 1) return publish(total);
        if (total == 1) phases->run_chunk(phase, 0, worker);  // not worth a handshake
    }
    phases->end();
    publish(0);
}

void Pool::State::publish(int total) {
    done.store(0, std::memory_order_relaxed);
    ticket.store(make_ticket(sequence_of(ticket.load(std::memory_order_relaxed)) + 1, total));
    if (parked.load()) {
        std::lock_guard<std::mutex> lock(parking);
        parked.store(false);
        changed.notify_all();
    }
}

// Return when the ticket is no longer `seen` (or now and then): spin a little, then sleep.
void Pool::State::wait(Ticket seen) {
    const auto start = std::chrono::steady_clock::now();
    do {
        for (int turn = 0; turn < 64; ++turn) {
            if (ticket.load(std::memory_order_acquire) != seen) return;
            relax();
        }
    } while (std::chrono::steady_clock::now() - start < kSpin);
    std::unique_lock<std::mutex> lock(parking);
    // both sides store first and then look at the other's word, all sequentially consistent: one of them sees
    parked.store(true);
    while (ticket.load() == seen && !stopping.load()) {
        changed.wait(lock);
        parked.store(true);
    }
}

Pool::Pool(int threads) : threads_(threads < 1 ? 1 : threads) {
    start();
}

Pool::~Pool() { stop(); }

void Pool::start() {
    state_ = std::make_unique<State>();
    State* state = state_.get();
    try {
        for (int worker = 1; worker < threads_; ++worker) {
            state->threads.push_back(start_thread([state, worker] { state->work(worker); }));
        }
    } catch (...) {
        stop();
        throw;
    }
}

void Pool::stop() {
    if (state_->generation != fork_generation()) {
        (void)state_.release();  // a forked child has none of those threads, and they may have held the locks
        return;
    }
    {
        std::lock_guard<std::mutex> lock(state_->parking);
        state_->stopping.store(true);
    }
    state_->changed.notify_all();
    for (std::thread& thread : state_->threads) thread.join();
    state_->threads.clear();
}

void Pool::run(Phases& work) {
    if (state_->generation != fork_generation()) {
        stop();
        start();
    }
    State& state = *state_;
    std::lock_guard<std::mutex> lock(state.turn);
    work.begin();
    state.phases = &work;
    state.phase = -1;
    state.advance(0);
    state.work(0);
}

}  // namespace pocketllm
