// 512-bit vectors of x86-64, with VNNI's byte dot product where the compiler's flags allow it.
#pragma once

// GCC 12 takes the headers' own undefined vectors for a mistake of ours
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#define POCKETLLM_UNROLL _Pragma("GCC unroll 16")

namespace pocketllm::POCKETLLM_ISA {

constexpr int kLanes = 16;
constexpr int kDirectTokens = 8;
constexpr int kLargestByte = 255;
#if defined(__AVX512VNNI__)
constexpr bool kSignedWide = false;
constexpr int kTileVectors = 2, kTileTokens = 6, kTileTokens16 = 4;
#else
constexpr bool kSignedWide = true;
constexpr int kTileVectors = 2, kTileTokens = 4, kTileTokens16 = 4;
#endif

using Floats = __m512;
using Ints = __m512i;
using Bytes = __m512i;

// -- floats -----------------------------------------------------------------------------------------------------------
inline Floats zero() { return _mm512_setzero_ps(); }
inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }    // a · b + c
inline Floats load_half(const uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Floats load_bfloat(const uint8_t* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline Floats as_floats(Ints bits) { return _mm512_castsi512_ps(bits); }

// -- 32-bit integers --------------------------------------------------------------------------------------------------
inline Ints zero_ints() { return _mm512_setzero_si512(); }
inline Ints all_ints(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints load_ints(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Ints load_bytes_as_ints(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Ints load_shorts_as_ints(const uint8_t* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints sub_ints(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
inline Ints bit_and(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline Ints bit_or(Ints a, Ints b) { return _mm512_or_si512(a, b); }
inline Ints shift_left(Ints x, int n) { return _mm512_sll_epi32(x, _mm_cvtsi32_si128(n)); }
template <int n>
inline Ints shift_left_by(Ints x) { return _mm512_slli_epi32(x, n); }
inline Ints shift_right(Ints x, int n) { return _mm512_srl_epi32(x, _mm_cvtsi32_si128(n)); }
inline Ints shift_right_signed(Ints x, int n) { return _mm512_sra_epi32(x, _mm_cvtsi32_si128(n)); }
inline Ints where_equal(Ints a, Ints b, Ints x, Ints y) {  // a == b ? x : y
    return _mm512_mask_blend_epi32(_mm512_cmpeq_epi32_mask(a, b), y, x);
}
inline Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
// halves (float16) in the low 16 bits of each lane
inline Floats half_bits_to_floats(Ints x) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x)); }

// -- codes ------------------------------------------------------------------------------------------------------------
inline Bytes load_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void store_codes(uint8_t* p, Bytes x) { _mm512_store_si512(p, x); }
inline Bytes all_bytes(uint8_t x) { return _mm512_set1_epi8(static_cast<char>(x)); }
inline Bytes as_bytes(Ints x) { return x; }
inline Ints as_ints(Bytes x) { return x; }
inline Bytes sub_bytes(Bytes a, Bytes b) { return _mm512_sub_epi8(a, b); }
inline Bytes add_bytes(Bytes a, Bytes b) { return _mm512_add_epi8(a, b); }
inline Bytes bit_xor(Bytes a, Bytes b) { return _mm512_xor_si512(a, b); }
// (x >> n) & mask, (x << n) & mask in every byte; mask has no bit that a neighbor's bits are shifted into
template <int n>
inline Bytes right_and(Bytes x, Bytes mask) {
    return _mm512_and_si512(n ? _mm512_srli_epi16(x, n) : x, mask);
}
// low | shifted & mask; n > 0 shifts left, n < 0 right
template <int n>
inline Bytes merge(Bytes low, Bytes x, Bytes mask) {
    const Bytes moved = n > 0 ? _mm512_slli_epi16(x, n > 0 ? n : 0) : n < 0 ? _mm512_srli_epi16(x, n < 0 ? -n : 0) : x;
    return _mm512_ternarylogic_epi32(low, moved, mask, 0xF8);
}
inline Bytes load_table(const uint8_t* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Bytes look_up(Bytes table, Bytes codes) { return _mm512_shuffle_epi8(table, codes); }

inline Ints broadcast4(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    return _mm512_set1_epi32(four);
}

#if defined(__AVX512VNNI__)
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
#if defined(__AVX512VNNI__)
    for (int i = 0; i < steps; i++) acc = _mm512_dpbusd_epi32(acc, w[i], broadcast4(x + 4 * i));
    return acc;
#else
    __m512i pairs = _mm512_setzero_si512();
    for (int i = 0; i < steps; i++) {
        Ints four = broadcast4(x + 4 * i);
        // |w| · (x with w's sign): the 16-bit sums of two products do not saturate
        if (wide) four = _mm512_mask_sub_epi8(four, _mm512_movepi8_mask(w[i]), _mm512_setzero_si512(), four);
        pairs = _mm512_add_epi16(pairs, _mm512_maddubs_epi16(wide ? _mm512_abs_epi8(w[i]) : w[i], four));
    }
    return _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#endif
}

// acc + Σ of each row's four bytes: unsigned, or signed
template <bool is_signed>
inline Ints add_columns(Ints acc, Bytes w) {
    const Bytes ones = all_bytes(1);
#if defined(__AVX512VNNI__)
    return is_signed ? _mm512_dpbusd_epi32(acc, ones, w) : _mm512_dpbusd_epi32(acc, w, ones);
#else
    const __m512i pairs = is_signed ? _mm512_maddubs_epi16(ones, w) : _mm512_maddubs_epi16(w, ones);
    return _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#endif
}

// byte t of each row's four
template <int t>
inline Ints code_at(Bytes w) { return _mm512_and_si512(t ? _mm512_srli_epi32(w, 8 * t) : w, _mm512_set1_epi32(255)); }
template <int t>
inline Ints signed_code_at(Bytes w) { return _mm512_srai_epi32(t < 3 ? _mm512_slli_epi32(w, 24 - 8 * t) : w, 24); }

inline void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }
inline void prefetch_once(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_NTA); }
inline void prefetch_far(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace pocketllm::POCKETLLM_ISA
