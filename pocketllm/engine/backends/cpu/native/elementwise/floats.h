// Sixteen floats, in as many registers as the instruction set at hand needs for them, and the few operations that
// kernels are written in. Each is exact or rounds each lane by itself, so a lane's bits do not depend on its neighbors.
//
// Included by sources that are compiled once for each instruction set; everything here is local to the one at hand.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace pocketllm::POCKETLLM_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kNative = 16;
#elif defined(__AVX2__)
constexpr int kNative = 8;
#else
constexpr int kNative = 4;
#endif
constexpr int kLanes = 16;
constexpr int kParts = kLanes / kNative;

using NativeFloats = float __attribute__((vector_size(4 * kNative)));
using NativeInts = int32_t __attribute__((vector_size(4 * kNative)));

template <int N>
using Int = std::integral_constant<int, N>;

struct Floats {
    NativeFloats part[kParts];
};

// before a loop over registers: unrolled whole, or they would live in memory
#define POCKETLLM_WHOLE _Pragma("GCC unroll 16")

#define POCKETLLM_LANEWISE(expression)                                           \
    Floats out;                                                                  \
    POCKETLLM_WHOLE for (int i = 0; i < kParts; ++i) out.part[i] = (expression); \
    return out

inline Floats operator+(const Floats& a, const Floats& b) { POCKETLLM_LANEWISE(a.part[i] + b.part[i]); }
inline Floats operator-(const Floats& a, const Floats& b) { POCKETLLM_LANEWISE(a.part[i] - b.part[i]); }
inline Floats operator*(const Floats& a, const Floats& b) { POCKETLLM_LANEWISE(a.part[i] * b.part[i]); }
inline Floats operator/(const Floats& a, const Floats& b) { POCKETLLM_LANEWISE(a.part[i] / b.part[i]); }
// a where it is not a number
inline Floats larger(const Floats& a, const Floats& b) {
    POCKETLLM_LANEWISE(b.part[i] > a.part[i] ? b.part[i] : a.part[i]);
}
inline Floats smaller(const Floats& a, const Floats& b) {
    POCKETLLM_LANEWISE(b.part[i] < a.part[i] ? b.part[i] : a.part[i]);
}
inline Floats all(float value) { POCKETLLM_LANEWISE(value - NativeFloats{}); }

inline Floats load(const float* from) {
    Floats out;
    std::memcpy(&out, from, sizeof out);
    return out;
}
inline void store(float* to, const Floats& value) { std::memcpy(to, &value, sizeof value); }

// a · b + c, rounded once where the processor can.
inline NativeFloats fma(NativeFloats a, NativeFloats b, NativeFloats c) {
#if defined(__AVX512F__)
    return (NativeFloats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (NativeFloats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (NativeFloats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}
inline Floats fma(const Floats& a, const Floats& b, const Floats& c) {
    POCKETLLM_LANEWISE(fma(a.part[i], b.part[i], c.part[i]));
}
// acc = fma(a, b, acc) in place: of a tile of sums that are assigned whole the compiler keeps only some in registers.
inline void accumulate(Floats& acc, const Floats& a, const Floats& b) {
    POCKETLLM_WHOLE for (int i = 0; i < kParts; ++i) acc.part[i] = fma(a.part[i], b.part[i], acc.part[i]);
}

// Lanes `apart` from each other change places.
template <int apart>
inline NativeFloats swapped(NativeFloats v) {
    NativeInts places;
    for (int i = 0; i < kNative; ++i) places[i] = i ^ apart;
#if defined(__clang__)
    NativeFloats out;
    for (int i = 0; i < kNative; ++i) out[i] = v[places[i]];
    return out;
#else
    return __builtin_shuffle(v, places);
#endif
}

// All lanes in one, by pairs 8 apart, then 4, 2, 1.
template <class Function>
inline float fold(const Floats& a, Function function) {
    NativeFloats v = a.part[0];
    if constexpr (kParts == 2) v = function(v, a.part[1]);
    if constexpr (kParts == 4) v = function(function(v, a.part[2]), function(a.part[1], a.part[3]));
    if constexpr (kNative > 8) v = function(v, swapped<8>(v));
    if constexpr (kNative > 4) v = function(v, swapped<4>(v));
    v = function(v, swapped<2>(v));
    return function(v, swapped<1>(v))[0];
}
inline float sum(const Floats& a) {
    return fold(a, [](NativeFloats x, NativeFloats y) { return x + y; });
}
inline float largest(const Floats& a) {
    return fold(a, [](NativeFloats x, NativeFloats y) { return x > y ? x : y; });
}

// Lanes [first, last) of a, and `other` elsewhere.
inline Floats keep(const Floats& a, int first, int last, float other) {
    Floats out;
    for (int i = 0; i < kParts; ++i) {
        NativeInts lane;
        for (int j = 0; j < kNative; ++j) lane[j] = i * kNative + j;
        out.part[i] = (lane >= first) & (lane < last) ? a.part[i] : other - NativeFloats{};
    }
    return out;
}

// -- narrow numbers
// -------------------------------------------------------------------------------------------------------
struct Half {
    uint16_t bits;
};
struct BFloat {
    uint16_t bits;
};

inline float bits_as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline uint32_t float_as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float widen(Half h) {
    const uint32_t sign = uint32_t(h.bits & 0x8000) << 16, rest = h.bits & 0x7fff;
    // the exponents differ by 112; multiplying instead of adding makes subnormals right
    const uint32_t bits =
        rest >= 0x7c00 ? rest << 13 | 0x7f800000 : float_as_bits(bits_as_float(rest << 13) * 0x1p112f);
    return bits_as_float(sign | bits);
}
inline float widen(BFloat b) { return bits_as_float(uint32_t(b.bits) << 16); }
inline float widen(float value) { return value; }
inline float widen(int8_t value) { return value; }

// To the nearest, ties to even; what is too large becomes infinite.
inline void narrow(float value, Half& to) {
    const uint32_t bits = float_as_bits(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) {
        to.bits = uint16_t(sign | 0x7e00);
    } else if (rest >= 0x477ff000) {
        to.bits = uint16_t(sign | 0x7c00);
    } else if (rest < 0x38800000) {  // subnormal: the addition rounds to multiples of 2^-24
        to.bits = uint16_t(sign | (float_as_bits(bits_as_float(rest) + 0.5f) - 0x3f000000));
    } else {
        to.bits = uint16_t(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
    }
}
inline void narrow(float value, BFloat& to) {
    const uint32_t bits = float_as_bits(value);
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    to.bits = uint16_t(is_nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void narrow(float value, float& to) { to = value; }

inline Floats load(const Half* from) {
#if defined(__AVX512F__)
    Floats out;
    out.part[0] = (NativeFloats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
    return out;
#elif defined(__F16C__)
    POCKETLLM_LANEWISE((NativeFloats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + 8 * i))));
#elif defined(__aarch64__)
    POCKETLLM_LANEWISE((NativeFloats)vcvt_f32_f16(vld1_f16((const __fp16*)(from + 4 * i))));
#else
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = widen(from[i]);
    return load(lanes);
#endif
}

template <class Narrow>
inline Floats load_and_widen(const Narrow* from) {
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = widen(from[i]);
    return load(lanes);
}
inline Floats load(const BFloat* from) {
#if defined(__AVX512F__)
    Floats out;
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
    out.part[0] = (NativeFloats)_mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    return out;
#elif defined(__AVX2__)
    POCKETLLM_LANEWISE((NativeFloats)_mm256_slli_epi32(
        _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(from + 8 * i))), 16));
#else
    return load_and_widen(from);
#endif
}
inline Floats load(const int8_t* from) {
#if defined(__AVX512F__)
    Floats out;
    out.part[0] = (NativeFloats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
    return out;
#elif defined(__AVX2__)
    POCKETLLM_LANEWISE((NativeFloats)_mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8 * i)))));
#else
    return load_and_widen(from);
#endif
}

// -- functions
// ----------------------------------------------------------------------------------------------------------- e^x
// within 2 units in the last place (Cody & Waite's reduction, a polynomial of degree 6); at the ends it stays at e^±87.
inline Floats exp(Floats x) {
    x = smaller(larger(x, all(-87.0f)), all(87.0f));
    constexpr float kRound = 12582912.0f;  // 1.5 · 2^23: adding it leaves the nearest whole number in the low bits
    const Floats shifted = fma(x, all(1.44269504f), all(kRound));
    const Floats n = shifted - all(kRound);
    Floats r = fma(n, all(-0.693359375f), x);
    r = fma(n, all(2.12194440e-4f), r);
    Floats p = all(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
        p = fma(p, r, all(c));
    }
    p = fma(p, r * r, r + all(1.0f));
    for (int i = 0; i < kParts; ++i) {
        const NativeInts power = ((NativeInts)shifted.part[i] << 23) + (127 << 23);
        p.part[i] *= (NativeFloats)power;
    }
    return p;
}

// 1 - 2 / (e^2x + 1)
inline Floats tanh(const Floats& x) { return all(1.0f) - all(2.0f) / (exp(x + x) + all(1.0f)); }

inline Floats silu(const Floats& x) { return x / (all(1.0f) + exp(all(0.0f) - x)); }

// The tanh form.
inline Floats gelu(const Floats& x) {
    const Floats inner = (x + all(0.044715f) * x * x * x) * all(0.79788456f);
    return x * (all(1.0f) - all(1.0f) / (exp(inner + inner) + all(1.0f)));
}

}  // namespace
}  // namespace pocketllm::POCKETLLM_ISA
