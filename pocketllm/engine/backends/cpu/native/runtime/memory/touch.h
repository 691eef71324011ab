// First touches. What the operating system hands out is cleared when it is first written, a huge page at once: in a
// virtual machine that takes longer than a whole step of a small model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace pocketllm {

// Have all of it there, its contents as they are. Others may write to it meanwhile.
void touch(uint8_t* data, size_t bytes);
// The same by all threads: so many chunks, and one of them.
int touch_chunks(size_t bytes);
void touch_chunk(uint8_t* data, size_t bytes, int chunk);

constexpr size_t kTouchedAhead = size_t(32) << 20;  // several huge pages, so that a prompt of some hundred tokens fits

// Memory that is used from its beginning on, touched ahead of its use by a thread of low priority: `kTouchedAhead` beyond
// what has been used and not more, for what nobody comes to use must stay with the operating system. Memory of a few
// huge pages gets no thread, and a forked child none either: there, the first use touches.
class Toucher {
  public:
    Toucher(uint8_t* data, size_t bytes);
    ~Toucher();
    Toucher(const Toucher&) = delete;
    Toucher& operator=(const Toucher&) = delete;

    // All before `bytes` is about to be used.
    void follow(size_t bytes);

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace pocketllm
