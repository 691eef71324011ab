// 256-bit vectors of x86-64, with FMA and F16C, and with VNNI's byte dot product where the compiler's flags allow it.
#pragma once

#include <immintrin.h>

#define POCKETLLM_UNROLL _Pragma("GCC unroll 16")

namespace pocketllm::POCKETLLM_ISA {

constexpr int kLanes = 8;
constexpr int kDirectTokens = 4;
constexpr int kLargestByte = 255;
#if defined(__AVXVNNI__)
constexpr bool kSignedWide = false;
constexpr int kTileVectors = 2, kTileTokens = 4, kTileTokens16 = 4;
#else
constexpr bool kSignedWide = true;
constexpr int kTileVectors = 1, kTileTokens = 4, kTileTokens16 = 4;
#endif

using Floats = __m256;
using Ints = __m256i;
using Bytes = __m256i;

// -- floats -----------------------------------------------------------------------------------------------------------
inline Floats zero() { return _mm256_setzero_ps(); }
inline Floats all(float x) { return _mm256_set1_ps(x); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }    // a · b + c
inline __m128i load_16_bytes(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline Floats load_half(const uint8_t* p) { return _mm256_cvtph_ps(load_16_bytes(p)); }
inline Floats load_bfloat(const uint8_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16_bytes(p)), 16));
}
inline Floats as_floats(Ints bits) { return _mm256_castsi256_ps(bits); }

// -- 32-bit integers --------------------------------------------------------------------------------------------------
inline Ints zero_ints() { return _mm256_setzero_si256(); }
inline Ints all_ints(int32_t x) { return _mm256_set1_epi32(x); }
inline Ints load_ints(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Ints load_bytes_as_ints(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline Ints load_shorts_as_ints(const uint8_t* p) { return _mm256_cvtepu16_epi32(load_16_bytes(p)); }
inline Ints add_ints(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints sub_ints(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
inline Ints bit_and(Ints a, Ints b) { return _mm256_and_si256(a, b); }
inline Ints bit_or(Ints a, Ints b) { return _mm256_or_si256(a, b); }
inline Ints shift_left(Ints x, int n) { return _mm256_sll_epi32(x, _mm_cvtsi32_si128(n)); }
template <int n>
inline Ints shift_left_by(Ints x) { return _mm256_slli_epi32(x, n); }
inline Ints shift_right(Ints x, int n) { return _mm256_srl_epi32(x, _mm_cvtsi32_si128(n)); }
inline Ints shift_right_signed(Ints x, int n) { return _mm256_sra_epi32(x, _mm_cvtsi32_si128(n)); }
inline Ints where_equal(Ints a, Ints b, Ints x, Ints y) {  // a == b ? x : y
    return _mm256_blendv_epi8(y, x, _mm256_cmpeq_epi32(a, b));
}
inline Floats to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
// halves (float16) in the low 16 bits of each lane
inline Floats half_bits_to_floats(Ints x) {
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0x08);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}

// -- codes ------------------------------------------------------------------------------------------------------------
inline Bytes load_codes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void store_codes(uint8_t* p, Bytes x) { _mm256_store_si256(reinterpret_cast<__m256i*>(p), x); }
inline Bytes all_bytes(uint8_t x) { return _mm256_set1_epi8(static_cast<char>(x)); }
inline Bytes as_bytes(Ints x) { return x; }
inline Bytes sub_bytes(Bytes a, Bytes b) { return _mm256_sub_epi8(a, b); }
inline Bytes add_bytes(Bytes a, Bytes b) { return _mm256_add_epi8(a, b); }
inline Bytes bit_xor(Bytes a, Bytes b) { return _mm256_xor_si256(a, b); }
// (x >> n) & mask in every byte; mask has no bit that a neighbor's bits are shifted into
template <int n>
inline Bytes right_and(Bytes x, Bytes mask) {
    return _mm256_and_si256(n ? _mm256_srli_epi16(x, n) : x, mask);
}
// low | shifted & mask; n > 0 shifts left, n < 0 right
template <int n>
inline Bytes merge(Bytes low, Bytes x, Bytes mask) {
    const Bytes moved = n > 0 ? _mm256_slli_epi16(x, n > 0 ? n : 0) : n < 0 ? _mm256_srli_epi16(x, n < 0 ? -n : 0) : x;
    return _mm256_or_si256(low, _mm256_and_si256(moved, mask));
}
inline Bytes load_table(const uint8_t* p) { return _mm256_broadcastsi128_si256(load_16_bytes(p)); }
inline Bytes look_up(Bytes table, Bytes codes) { return _mm256_shuffle_epi8(table, codes); }

// byte t of each row's four
template <int t>
inline Ints code_at(Bytes w) { return _mm256_and_si256(_mm256_srli_epi32(w, 8 * t), _mm256_set1_epi32(255)); }
template <int t>
inline Ints signed_code_at(Bytes w) { return _mm256_srai_epi32(_mm256_slli_epi32(w, 24 - 8 * t), 24); }

inline Ints broadcast4(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}

#if defined(__AVXVNNI__)
constexpr int run_steps(int) { return 1; }
#else
// How many steps of codes up to `largest` may be added up in 16 bits.
constexpr int run_steps(int largest) {
    const int steps = 32767 / (2 * 127 * largest);
    return steps >= 4 ? 4 : steps >= 2 ? 2 : 1;
}
#endif

// acc + Σ w[i] · x[4i …] over four columns each: w unsigned codes, or wide ones as kSignedWide says
template <bool wide, int steps>
inline Ints add_run(Ints acc, const Bytes (&w)[steps], const int8_t* x) {
#if defined(__AVXVNNI__)
    for (int i = 0; i < steps; i++) acc = _mm256_dpbusd_avx_epi32(acc, w[i], broadcast4(x + 4 * i));
    return acc;
#else
    __m256i pairs = _mm256_setzero_si256();
    for (int i = 0; i < steps; i++) {
        const __m256i four = broadcast4(x + 4 * i);
        pairs = _mm256_add_epi16(pairs, wide ? _mm256_maddubs_epi16(_mm256_abs_epi8(w[i]), _mm256_sign_epi8(four, w[i]))
                                             : _mm256_maddubs_epi16(w[i], four));
    }
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

// acc + Σ of each row's four bytes: unsigned, or signed
template <bool is_signed>
inline Ints add_columns(Ints acc, Bytes w) {
    const Bytes ones = all_bytes(1);
    const __m256i pairs = is_signed ? _mm256_maddubs_epi16(ones, w) : _mm256_maddubs_epi16(w, ones);
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

inline void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }
inline void prefetch_once(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }
inline void prefetch_far(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace pocketllm::POCKETLLM_ISA
