#include "runtime/memory/touch.h"

#ifdef __linux__
#include <sys/resource.h>
#endif

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "runtime/memory/regions.h"
#include "runtime/threads/pool.h"
#include "runtime/threads/thread.h"

namespace pocketllm {

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kWorth = 4 * kHugePage;

void be_of_low_priority() {
#ifdef __linux__
    setpriority(PRIO_PROCESS, 0, 19);  // of this thread alone, there
#endif
}

}  // namespace

// By writes that change nothing: madvise(MADV_POPULATE_WRITE) would hold the lock of the whole address space while the
// pages are cleared, and whoever maps or unmaps memory would wait for it; a fault holds that of this mapping.
void touch(uint8_t* data, size_t bytes) {
    for (size_t at = 0; at < bytes; at += kPage) __atomic_fetch_or(data + at, 0, __ATOMIC_RELAXED);
    if (bytes) __atomic_fetch_or(data + bytes - 1, 0, __ATOMIC_RELAXED);  // `data` may lie within a page
}

int touch_chunks(size_t bytes) { return int(std::min<size_t>(whole_huge_pages(bytes) / kHugePage, kMaxChunks)); }

void touch_chunk(uint8_t* data, size_t bytes, int chunk) {
    const size_t chunks = touch_chunks(bytes), pages = whole_huge_pages(bytes) / kHugePage;
    const size_t first = pages * chunk / chunks * kHugePage, last = pages * (chunk + 1) / chunks * kHugePage;
    touch(data + first, std::min(last, bytes) - first);
}

struct Toucher::State {
    uint8_t* const data;
    const size_t bytes;
    const unsigned generation = fork_generation();
    size_t wanted;  // by the thread that follows; the other one reads it in its turn
    bool stopping = false;
    std::mutex turn;
    std::condition_variable changed;
    std::thread thread;

    State(uint8_t* data, size_t bytes) : data(data), bytes(bytes), wanted(std::min(bytes, kTouchedAhead)) {}

    void work() {
        be_of_low_priority();
        std::unique_lock<std::mutex> lock(turn);
        for (size_t done = 0; done < bytes;) {
            changed.wait(lock, [&] { return stopping || done < wanted; });
            if (stopping) return;
            const size_t next = std::min(wanted, done + kHugePage);
            lock.unlock();
            touch(data + done, next - done);
            done = next;
            lock.lock();
        }
    }
};

Toucher::Toucher(uint8_t* data, size_t bytes) {
    if (bytes < kWorth) return;
    state_ = std::make_unique<State>(data, bytes);
    State* state = state_.get();
    try {
        state->thread = start_thread([state] { state->work(); });
    } catch (const std::system_error&) {
        state_.reset();  // slower, and no less right
    }
}

Toucher::~Toucher() {
    if (!state_) return;
    if (state_->generation != fork_generation()) {
        (void)state_.release();  // its thread is the parent's, and may have held the lock
        return;
    }
    {
        std::lock_guard<std::mutex> lock(state_->turn);
        state_->stopping = true;
    }
    state_->changed.notify_all();
    state_->thread.join();
}

void Toucher::follow(size_t used) {
    if (!state_ || state_->generation != fork_generation()) return;
    // by whole huge pages: most steps stay within the last one, and wake nobody
    const size_t wanted = std::min(state_->bytes, whole_huge_pages(used) + kTouchedAhead);
    if (wanted <= state_->wanted) return;
    {
        std::lock_guard<std::mutex> lock(state_->turn);
        state_->wanted = std::max(state_->wanted, wanted);
    }
    state_->changed.notify_all();
}

}  // namespace pocketllm
