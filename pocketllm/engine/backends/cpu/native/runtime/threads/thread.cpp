#include "runtime/threads/thread.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <utility>

namespace pocketllm {

namespace {

std::atomic<unsigned> generation{0};

void note_fork() { generation.fetch_add(1); }

struct SignalsBlocked {
    sigset_t before;
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
};

}  // namespace

unsigned fork_generation() { return generation.load(); }

std::thread start_thread(std::function<void()> work) {
    static const int registered = pthread_atfork(nullptr, nullptr, note_fork);
    (void)registered;
    const SignalsBlocked blocked;
    return std::thread(std::move(work));
}

}  // namespace pocketllm
