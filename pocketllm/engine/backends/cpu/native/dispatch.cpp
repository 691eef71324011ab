#include "dispatch.h"

#include <algorithm>
#include <iterator>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#endif

namespace pocketllm {

// each instruction set's table, filled in kernels/table.cpp
#define POCKETLLM_DECLARE(isa)          \
    namespace isa {                     \
    extern const Kernels kernels;       \
    }
POCKETLLM_DECLARE(portable)
POCKETLLM_DECLARE(avx2)
POCKETLLM_DECLARE(avxvnni)
POCKETLLM_DECLARE(avx512)
POCKETLLM_DECLARE(avx512vnni)
POCKETLLM_DECLARE(neon)

namespace {

struct Isa {
    const Kernels* kernels;
    bool (*is_usable)();
};

bool always() { return true; }

// __builtin_cpu_supports asks the operating system too whether it keeps the wide registers
#ifdef __x86_64__
[[maybe_unused]] bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
}
[[maybe_unused]] bool has_avxvnni() {  // compilers of some years ago have no name for it
    unsigned eax = 0, ebx, ecx, edx;
    return has_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
}
[[maybe_unused]] bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512cd");
}
[[maybe_unused]] bool has_avx512vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
#endif

#ifdef POCKETLLM_HAS_NEON
bool has_neon() {
#ifdef __linux__
    constexpr unsigned long kHalf = 1ul << 10, kDotProduct = 1ul << 20;  // HWCAP_ASIMDHP, HWCAP_ASIMDDP
    return (getauxval(AT_HWCAP) & (kHalf | kDotProduct)) == (kHalf | kDotProduct);
#else
    return true;  // every Apple processor of this architecture
#endif
}
#endif

// those that were built, best first
const Isa kIsas[] = {
#ifdef POCKETLLM_HAS_AVX512VNNI
    {&avx512vnni::kernels, has_avx512vnni},
#endif
#ifdef POCKETLLM_HAS_AVX512
    {&avx512::kernels, has_avx512},
#endif
#ifdef POCKETLLM_HAS_AVXVNNI
    {&avxvnni::kernels, has_avxvnni},
#endif
#ifdef POCKETLLM_HAS_AVX2
    {&avx2::kernels, has_avx2},
#endif
#ifdef POCKETLLM_HAS_NEON
    {&neon::kernels, has_neon},
#endif
    {&portable::kernels, always},
};

const char* const kNames[] = {"avx512vnni", "avx512", "avxvnni", "avx2", "neon", "portable"};

std::string names(bool usable_only) {
    std::string all;
    for (const Isa& isa : kIsas) {
        if (usable_only && !isa.is_usable()) continue;
        all += (all.empty() ? "" : " ") + std::string(isa.kernels->name);
    }
    return all;
}

}  // namespace

const std::string& usable_isas() {
    static const std::string all = names(true);
    return all;
}

const Kernels* find_kernels(const char* name, std::string& problem) {
    const std::string wanted = name ? name : "";
    for (const Isa& isa : kIsas) {
        if (!wanted.empty() && wanted != isa.kernels->name) continue;
        if (isa.is_usable()) return isa.kernels;
        if (wanted.empty()) continue;
        problem = "this processor cannot run instruction set " + wanted + "; it can run: " + usable_isas();
        return nullptr;
    }
    const bool is_known = std::find(std::begin(kNames), std::end(kNames), wanted) != std::end(kNames);
    problem = (is_known ? "kernels for " + wanted + " were not built" : "no instruction set is called " + wanted) +
              "; this build has: " + names(false);
    return nullptr;
}

}  // namespace pocketllm
