// Formats of layouts/blocks_vector.h.
#pragma once

#include "matmul/weights/weights.h"

namespace pocketllm::POCKETLLM_ISA {

// -- IQ2, IQ3: magnitude and sign look a byte up, value + 64 ----------------------------------------------------------
inline constexpr uint8_t kIQ2Table[16] = {64 + 8, 64 + 25, 64 + 43, 0, 64 - 8, 64 - 25, 64 - 43, 0,
                                          0,      0,       0,       0, 0,      0,       0,       0};
inline constexpr uint8_t kIQ3XXSTable[16] = {64 + 4, 64 + 12, 64 + 20, 64 + 28, 64 + 36, 64 + 44, 64 + 52, 64 + 62,
                                      64 - 4, 64 - 12, 64 - 20, 64 - 28, 64 - 36, 64 - 44, 64 - 52, 64 - 62};
inline constexpr uint8_t kIQ3STable[16] = {64 + 1, 64 + 3, 64 + 5, 64 + 7, 64 + 9, 64 + 11, 64 + 13, 64 + 15,
                                    64 - 1, 64 - 3, 64 - 5, 64 - 7, 64 - 9, 64 - 11, 64 - 13, 64 - 15};

template <int32_t id, const uint8_t* table>
struct SignedPoints : Weights<id> {
    static constexpr int kOffset = 64;
    static constexpr int kLargest = 64 + 62;
    static void codes(const uint8_t*, const uint8_t* p, int, int part, Bytes (&w)[kSteps]) {
        look_up_codes<SignedPoints::kLayout.bits>(p, part, table, w);
    }
    // (d · (scale + 1/2)) · unit, rounded twice as the decoder does (unit is a power of two)
    static Floats scale(const uint8_t* header, int i, float unit, int part) {
        const Floats steps = add(to_floats(SignedPoints::field(header, kHalves, i, 4, part)), all(0.5f));
        return mul(mul(SignedPoints::half_at(header, 0, part), steps), all(unit));
    }
};

struct IQ2_XXS : SignedPoints<kIQ2_XXS, kIQ2Table> {
    static void scales(const uint8_t* header, int block, int part, Scales& out) {
        out.d[0] = scale(header, block, 0.25f, part);
    }
};

template <int32_t id>
struct IQ2Of16 : SignedPoints<id, kIQ2Table> {
    static constexpr int kScaleCols = 16;
    static void scales(const uint8_t* header, int block, int part, Scales& out) {
        for (int i = 0; i < 2; i++) out.d[i] = IQ2Of16::scale(header, 2 * block + i, 0.25f, part);
    }
};
struct IQ2_XS : IQ2Of16<kIQ2_XS> {};
struct IQ2_S : IQ2Of16<kIQ2_S> {};

struct IQ3_XXS : SignedPoints<kIQ3_XXS, kIQ3XXSTable> {
    static void scales(const uint8_t* header, int block, int part, Scales& out) {
        out.d[0] = scale(header, block, 0.5f, part);
    }
};

struct IQ3_S : SignedPoints<kIQ3_S, kIQ3STable> {
    static void scales(const uint8_t* header, int block, int part, Scales& out) {
        out.d[0] = scale(header, block, 2.0f, part);  // 2 · scale + 1
    }
};

// -- IQ1: eighths, digit · 8 ± 1, plus 16 -----------------------------------------------------------------------------
template <int32_t id>
struct Eighths : Weights<id> {
    static constexpr int kOffset = 16;
    static constexpr int kLargest = 16 + 9;
    static constexpr uint8_t kTable[16] = {16 - 8 + 1, 16 + 1, 16 + 8 + 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    // Takes 2 from the four bytes of rows whose bit 0 in `negative` is set.
    static Bytes shifted(Bytes w, Ints negative) {
        const Ints minus_two = sub_ints(zero_ints(), bit_and(negative, all_ints(1)));  // all ones, or zero
        return sub_bytes(w, as_bytes(bit_and(minus_two, all_ints(0x02020202))));
    }
    // d · (2 · scale + 1) / 8
    static Floats scale(const uint8_t* header, int i, int part) {
        const Ints three = bit_and(Eighths::field(header, kHalves, i, 4, part), all_ints(7));
        const Ints odd = add_ints(shift_left(three, 1), all_ints(1));
        return mul(mul(Eighths::half_at(header, 0, part), to_floats(odd)), all(0.125f));
    }
};

struct IQ1_S : Eighths<kIQ1_S> {
    static void scales(const uint8_t* header, int block, int part, Scales& out) {
        out.d[0] = scale(header, block, part);
    }
    static void codes(const uint8_t* header, const uint8_t* p, int block, int part, Bytes (&w)[kSteps]) {
        const Ints negative = shift_right(word_at(header, kHalves, part), 4 * block + 3);
        look_up_codes<2>(p, part, kTable, w);
        for (Bytes& step : w) step = shifted(step, negative);
    }
};

struct IQ1_M : Eighths<kIQ1_M> {
    static constexpr int kScaleCols = 16;
    static void scales(const uint8_t* header, int block, int part, Scales& out) {
        for (int i = 0; i < 2; i++) out.d[i] = scale(header, 2 * block + i, part);
    }
    static void codes(const uint8_t* header, const uint8_t* p, int block, int part, Bytes (&w)[kSteps]) {
        const Ints signs = word_at(header, kHalves + 2 * kWords, part);
        look_up_codes<2>(p, part, kTable, w);
        for (int s = 0; s < kSteps; s++) w[s] = shifted(w[s], shift_right(signs, 4 * block + s / 2));
    }
};

// -- one d for a whole unit -------------------------------------------------------------------------------------------
template <int32_t id>
struct OneScale : Weights<id> {
    static constexpr int kOffset = 1;
    static void scales(const uint8_t* header, int, int part, Scales& out) {
        out.d[0] = OneScale::half_at(header, 0, part);
    }
};
struct TQ1_0 : OneScale<kTQ1_0> {};
struct TQ2_0 : OneScale<kTQ2_0> {};
struct Q2_0 : OneScale<kQ2_0> {};
struct PQ2_0 : OneScale<kPQ2_0> {};

struct PTQ1_0 : OneScale<kPTQ1_0> {
    static Floats value(Floats q, Floats d) { return add(mul(q, d), zero()); }  // its zeros have no sign
};

struct Q1_0 : OneScale<kQ1_0> {
    static constexpr int kLargest = 2;
    static void codes(const uint8_t*, const uint8_t* p, int, int part, Bytes (&w)[kSteps]) {
        unpack<1>(p, part, w);
        for (Bytes& step : w) step = add_bytes(step, step);  // 0 or 2
    }
};

}  // namespace pocketllm::POCKETLLM_ISA
