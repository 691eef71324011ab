// 128-bit vectors of 64-bit Arm, with its byte dot product (Armv8.2 DotProd).
#pragma once

#include <arm_neon.h>

#define POCKETLLM_UNROLL _Pragma("GCC unroll 16")

namespace pocketllm::POCKETLLM_ISA {

constexpr int kLanes = 4;
constexpr bool kSignedWide = true;
constexpr int kDirectTokens = 4;
constexpr int kLargestByte = 127;
constexpr int kTileVectors = 2, kTileTokens = 4, kTileTokens16 = 4;

using Floats = float32x4_t;
using Ints = int32x4_t;
using Bytes = uint8x16_t;

// -- floats -----------------------------------------------------------------------------------------------------------
inline Floats zero() { return vdupq_n_f32(0); }
inline Floats all(float x) { return vdupq_n_f32(x); }
inline Floats load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, Floats x) { vst1q_f32(p, x); }
inline Floats add(Floats a, Floats b) { return vaddq_f32(a, b); }
inline Floats sub(Floats a, Floats b) { return vsubq_f32(a, b); }
inline Floats mul(Floats a, Floats b) { return vmulq_f32(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }   // a · b + c
inline uint16x4_t load_shorts(const uint8_t* p) { return vreinterpret_u16_u8(vld1_u8(p)); }
inline Floats load_half(const uint8_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(load_shorts(p))); }
inline Floats load_bfloat(const uint8_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(load_shorts(p), 16)); }
inline Floats as_floats(Ints bits) { return vreinterpretq_f32_s32(bits); }

// -- 32-bit integers --------------------------------------------------------------------------------------------------
inline Ints zero_ints() { return vdupq_n_s32(0); }
inline Ints all_ints(int32_t x) { return vdupq_n_s32(x); }
inline Ints load_ints(const uint8_t* p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
inline Ints load_shorts_as_ints(const uint8_t* p) { return vreinterpretq_s32_u32(vmovl_u16(load_shorts(p))); }
inline Ints load_bytes_as_ints(const uint8_t* p) {
    const uint32_t four = p[0] | uint32_t(p[1]) << 8 | uint32_t(p[2]) << 16 | uint32_t(p[3]) << 24;
    return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))));
}
inline Ints add_ints(Ints a, Ints b) { return vaddq_s32(a, b); }
inline Ints sub_ints(Ints a, Ints b) { return vsubq_s32(a, b); }
inline Ints bit_and(Ints a, Ints b) { return vandq_s32(a, b); }
inline Ints bit_or(Ints a, Ints b) { return vorrq_s32(a, b); }
inline Ints shift_left(Ints x, int n) { return vshlq_s32(x, vdupq_n_s32(n)); }
template <int n>
inline Ints shift_left_by(Ints x) { return vshlq_n_s32(x, n); }
inline Ints shift_right(Ints x, int n) {
    return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(x), vdupq_n_s32(-n)));
}
inline Ints shift_right_signed(Ints x, int n) { return vshlq_s32(x, vdupq_n_s32(-n)); }
inline Ints where_equal(Ints a, Ints b, Ints x, Ints y) { return vbslq_s32(vceqq_s32(a, b), x, y); }  // a == b ? x : y
inline Floats to_floats(Ints x) { return vcvtq_f32_s32(x); }
// halves (float16) in the low 16 bits of each lane
inline Floats half_bits_to_floats(Ints x) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(vreinterpretq_u32_s32(x))));
}

// -- codes ------------------------------------------------------------------------------------------------------------
inline Bytes load_codes(const uint8_t* p) { return vld1q_u8(p); }
inline void store_codes(uint8_t* p, Bytes x) { vst1q_u8(p, x); }
inline Bytes all_bytes(uint8_t x) { return vdupq_n_u8(x); }
inline Bytes as_bytes(Ints x) { return vreinterpretq_u8_s32(x); }
inline Bytes add_bytes(Bytes a, Bytes b) { return vaddq_u8(a, b); }
inline Bytes sub_bytes(Bytes a, Bytes b) { return vsubq_u8(a, b); }
inline Bytes bit_xor(Bytes a, Bytes b) { return veorq_u8(a, b); }
// x shifted in every byte; n > 0 left, n < 0 right
template <int n>
inline Bytes moved(Bytes x) {
    return vshlq_u8(x, vdupq_n_s8(n));
}
// (x >> n) & mask in every byte
template <int n>
inline Bytes right_and(Bytes x, Bytes mask) { return vandq_u8(moved<-n>(x), mask); }
// low | shifted & mask; n > 0 shifts left, n < 0 right
template <int n>
inline Bytes merge(Bytes low, Bytes x, Bytes mask) { return vorrq_u8(low, vandq_u8(moved<n>(x), mask)); }
inline Bytes load_table(const uint8_t* p) { return vld1q_u8(p); }
inline Bytes look_up(Bytes table, Bytes codes) { return vqtbl1q_u8(table, codes); }

// byte t of each row's four
template <int t>
inline Ints code_at(Bytes w) {
    return vandq_s32(shift_right(vreinterpretq_s32_u8(w), 8 * t), vdupq_n_s32(255));
}
template <int t>
inline Ints signed_code_at(Bytes w) { return vshrq_n_s32(shift_left(vreinterpretq_s32_u8(w), 24 - 8 * t), 24); }

constexpr int run_steps(int) { return 4; }

// acc + Σ w[i] · x[4i …] over four columns each, i below 4: w codes of at most 7 bits, or signed bytes (wide)
template <bool wide>
inline Ints add_run(Ints acc, const Bytes (&w)[4], const int8_t* x) {
    const int8x16_t q = vld1q_s8(x);
    acc = vdotq_laneq_s32(acc, vreinterpretq_s8_u8(w[0]), q, 0);
    acc = vdotq_laneq_s32(acc, vreinterpretq_s8_u8(w[1]), q, 1);
    acc = vdotq_laneq_s32(acc, vreinterpretq_s8_u8(w[2]), q, 2);
    return vdotq_laneq_s32(acc, vreinterpretq_s8_u8(w[3]), q, 3);
}

// acc + Σ of each row's four bytes: codes of at most 7 bits, or signed
template <bool>
inline Ints add_columns(Ints acc, Bytes w) { return vdotq_s32(acc, vreinterpretq_s8_u8(w), vdupq_n_s8(1)); }

inline void prefetch(const uint8_t* p) { __builtin_prefetch(p); }
inline void prefetch_once(const uint8_t* p) { __builtin_prefetch(p); }
inline void prefetch_far(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace pocketllm::POCKETLLM_ISA
