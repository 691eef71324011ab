// Plain C++: correct everywhere, and left to the compiler to make vectors of.
#pragma once

#define POCKETLLM_UNROLL  // vectors are arrays here: nothing stays in registers

namespace pocketllm::POCKETLLM_ISA {

constexpr int kLanes = 16;
constexpr int kDirectTokens = 4;
constexpr int kLargestByte = 127;
constexpr int kTileVectors = 1, kTileTokens = 4, kTileTokens16 = 4;
constexpr bool kSignedWide = true;

struct Floats { float at[kLanes]; };
struct Ints { int32_t at[kLanes]; };
struct Bytes { uint8_t at[4 * kLanes]; };

// result.at[i] = expression, for each i
#define POCKETLLM_EACH(Vector, expression)                                      \
    Vector result;                                                              \
    for (int i = 0; i < int(sizeof(result.at) / sizeof(result.at[0])); i++) {   \
        result.at[i] = (expression);                                            \
    }                                                                           \
    return result

template <typename To, typename From>
inline To same_bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// -- floats -----------------------------------------------------------------------------------------------------------
inline Floats zero() { return {}; }
inline Floats all(float x) { POCKETLLM_EACH(Floats, x); }
inline Floats load(const float* p) { POCKETLLM_EACH(Floats, p[i]); }
inline void store(float* p, const Floats& x) { std::memcpy(p, x.at, sizeof x.at); }
inline Floats add(const Floats& a, const Floats& b) { POCKETLLM_EACH(Floats, a.at[i] + b.at[i]); }
inline Floats sub(const Floats& a, const Floats& b) { POCKETLLM_EACH(Floats, a.at[i] - b.at[i]); }
inline Floats mul(const Floats& a, const Floats& b) { POCKETLLM_EACH(Floats, a.at[i] * b.at[i]); }
// rounded twice: std::fma is a slow call where the processor has none
inline Floats fma(const Floats& a, const Floats& b, const Floats& c) {
    POCKETLLM_EACH(Floats, a.at[i] * b.at[i] + c.at[i]);
}

// A float16 as float32: shifted into place, the exponent's bias corrected by a product that is exact, subnormals too.
inline float half_value(uint16_t half) {
    const uint32_t magnitude = uint32_t(half & 0x7fff) << 13;
    float value = same_bits<float>(magnitude) * 0x1p112f;
    if ((half & 0x7c00) == 0x7c00) value = same_bits<float>(magnitude | 0x7f800000u);  // infinite or not a number
    return same_bits<float>(same_bits<uint32_t>(value) | uint32_t(half & 0x8000) << 16);
}
inline uint16_t short_at(const uint8_t* p, int i) {
    uint16_t word;
    std::memcpy(&word, p + 2 * i, 2);
    return word;
}
inline Floats load_half(const uint8_t* p) { POCKETLLM_EACH(Floats, half_value(short_at(p, i))); }
inline Floats load_bfloat(const uint8_t* p) {
    POCKETLLM_EACH(Floats, same_bits<float>(uint32_t(short_at(p, i)) << 16));
}
inline Floats as_floats(const Ints& bits) { return same_bits<Floats>(bits); }

// -- 32-bit integers --------------------------------------------------------------------------------------------------
inline Ints zero_ints() { return {}; }
inline Ints all_ints(int32_t x) { POCKETLLM_EACH(Ints, x); }
inline Ints load_ints(const uint8_t* p) {
    Ints x;
    std::memcpy(x.at, p, sizeof x.at);
    return x;
}
inline Ints load_bytes_as_ints(const uint8_t* p) { POCKETLLM_EACH(Ints, p[i]); }
inline Ints load_shorts_as_ints(const uint8_t* p) { POCKETLLM_EACH(Ints, short_at(p, i)); }
inline Ints add_ints(const Ints& a, const Ints& b) { POCKETLLM_EACH(Ints, a.at[i] + b.at[i]); }
inline Ints sub_ints(const Ints& a, const Ints& b) { POCKETLLM_EACH(Ints, a.at[i] - b.at[i]); }
inline Ints bit_and(const Ints& a, const Ints& b) { POCKETLLM_EACH(Ints, a.at[i] & b.at[i]); }
inline Ints bit_or(const Ints& a, const Ints& b) { POCKETLLM_EACH(Ints, a.at[i] | b.at[i]); }
inline Ints shift_left(const Ints& x, int n) { POCKETLLM_EACH(Ints, int32_t(uint32_t(x.at[i]) << n)); }
template <int n>
inline Ints shift_left_by(const Ints& x) { return shift_left(x, n); }
inline Ints shift_right(const Ints& x, int n) { POCKETLLM_EACH(Ints, int32_t(uint32_t(x.at[i]) >> n)); }
inline Ints shift_right_signed(const Ints& x, int n) { POCKETLLM_EACH(Ints, x.at[i] >> n); }
inline Ints where_equal(const Ints& a, const Ints& b, const Ints& x, const Ints& y) {  // a == b ? x : y
    POCKETLLM_EACH(Ints, a.at[i] == b.at[i] ? x.at[i] : y.at[i]);
}
inline Floats to_floats(const Ints& x) { POCKETLLM_EACH(Floats, float(x.at[i])); }
// halves (float16) in the low 16 bits of each lane
inline Floats half_bits_to_floats(const Ints& x) { POCKETLLM_EACH(Floats, half_value(uint16_t(x.at[i]))); }

// -- codes ------------------------------------------------------------------------------------------------------------
inline Bytes load_codes(const uint8_t* p) {
    Bytes x;
    std::memcpy(x.at, p, sizeof x.at);
    return x;
}
inline void store_codes(uint8_t* p, const Bytes& x) { std::memcpy(p, x.at, sizeof x.at); }
inline Bytes all_bytes(uint8_t x) { POCKETLLM_EACH(Bytes, x); }
inline Bytes as_bytes(const Ints& x) { return same_bits<Bytes>(x); }
inline Bytes add_bytes(const Bytes& a, const Bytes& b) { POCKETLLM_EACH(Bytes, uint8_t(a.at[i] + b.at[i])); }
inline Bytes sub_bytes(const Bytes& a, const Bytes& b) { POCKETLLM_EACH(Bytes, uint8_t(a.at[i] - b.at[i])); }
inline Bytes bit_xor(const Bytes& a, const Bytes& b) { POCKETLLM_EACH(Bytes, uint8_t(a.at[i] ^ b.at[i])); }
// (x >> n) & mask in every byte
template <int n>
inline Bytes right_and(const Bytes& x, const Bytes& mask) { POCKETLLM_EACH(Bytes, uint8_t(x.at[i] >> n & mask.at[i])); }
// low | shifted & mask; n > 0 shifts left, n < 0 right
template <int n>
inline Bytes merge(const Bytes& low, const Bytes& x, const Bytes& mask) {
    POCKETLLM_EACH(
        Bytes, uint8_t(low.at[i] | ((n > 0 ? x.at[i] << (n > 0 ? n : 0) : x.at[i] >> (n < 0 ? -n : 0)) & mask.at[i])));
}
inline Bytes load_table(const uint8_t* p) { POCKETLLM_EACH(Bytes, p[i % 16]); }
inline Bytes look_up(const Bytes& table, const Bytes& codes) { POCKETLLM_EACH(Bytes, table.at[codes.at[i] & 15]); }

// byte t of each row's four
template <int t>
inline Ints code_at(const Bytes& w) { POCKETLLM_EACH(Ints, w.at[4 * i + t]); }
template <int t>
inline Ints signed_code_at(const Bytes& w) { POCKETLLM_EACH(Ints, int8_t(w.at[4 * i + t])); }

constexpr int run_steps(int) { return 1; }

// acc + Σ w[i] · x[4i …] over four columns each: w codes of at most 7 bits, or signed bytes (wide)
template <bool wide, int steps>
inline Ints add_run(Ints acc, const Bytes (&w)[steps], const int8_t* x) {
    for (int s = 0; s < steps; s++, x += 4) {
        for (int i = 0; i < kLanes; i++) {
            for (int t = 0; t < 4; t++) acc.at[i] += int8_t(w[s].at[4 * i + t]) * x[t];
        }
    }
    return acc;
}

// acc + Σ of each row's four bytes: codes of at most 7 bits, or signed
template <bool>
inline Ints add_columns(Ints acc, const Bytes& w) {
    for (int i = 0; i < kLanes; i++) {
        for (int t = 0; t < 4; t++) acc.at[i] += int8_t(w.at[4 * i + t]);
    }
    return acc;
}

inline void prefetch(const uint8_t* p) { __builtin_prefetch(p); }
inline void prefetch_once(const uint8_t* p) { __builtin_prefetch(p); }
inline void prefetch_far(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }

#undef POCKETLLM_EACH

}  // namespace pocketllm::POCKETLLM_ISA
