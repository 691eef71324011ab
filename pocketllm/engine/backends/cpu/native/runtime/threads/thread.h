// What the library's own threads have in common: signals are for the threads of the program that uses us, and a forked
// child has none of them.
#pragma once

#include <functional>
#include <thread>

namespace pocketllm {

// Forks between the process that loaded the library and this one, once a thread was started.
unsigned fork_generation();

// Throws std::system_error where a thread cannot be started.
std::thread start_thread(std::function<void()> work);

}  // namespace pocketllm
