// Formats of layouts/blocks_k.h: a block of 32 columns is number `block` of its unit of 256.
#pragma once

#include "matmul/weights/blocks_32.h"

namespace pocketllm::POCKETLLM_ISA {

// (d · scale) · code - dmin · minimum, of 32 columns each
template <int32_t id>
struct SixBitPairs : Weights<id> {
    static constexpr bool kMin = true;
    static void scales(const uint8_t* header, int block, int part, Scales& out) {
        constexpr int kLow = 2 * kHalves, kLowMin = kLow + kWords, kUpper = kLowMin + kWords;
        using Self = SixBitPairs;
        const Ints scale = bit_or(Self::field(header, kLow, block, 4, part),
                                  shift_left(Self::field(header, kUpper, block, 2, part), 4));
        const Ints minimum = bit_or(Self::field(header, kLowMin, block, 4, part),
                                    shift_left(Self::field(header, kUpper, 8 + block, 2, part), 4));
        out.d[0] = mul(Self::half_at(header, 0, part), to_floats(scale));
        out.m[0] = mul(mul(Self::half_at(header, kHalves, part), to_floats(minimum)), all(-1.0f));
    }
};
struct Q4_K : SixBitPairs<kQ4_K> {};
struct Q5_K : SixBitPairs<kQ5_K> {};

struct Q2_K : Weights<kQ2_K> {
    static constexpr bool kMin = true;
    static constexpr int kScaleCols = 16;
    static void scales(const uint8_t* header, int block, int part, Scales& out) {
        constexpr int kScale = 2 * kHalves, kMinimum = kScale + 2 * kWords;
        const Floats d = half_at(header, 0, part), dmin = half_at(header, kHalves, part);
        for (int i = 0; i < 2; i++) {
            out.d[i] = mul(d, to_floats(field(header, kScale, 2 * block + i, 4, part)));
            out.m[i] = mul(mul(dmin, to_floats(field(header, kMinimum, 2 * block + i, 4, part))), all(-1.0f));
        }
    }
};

struct Q3_K : Weights<kQ3_K> {
    static constexpr int kScaleCols = 16;
    static constexpr int kOffset = 4;
    static void scales(const uint8_t* header, int block, int part, Scales& out) {
        constexpr int kLow = kHalves, kUpper = kLow + 2 * kWords;
        const Floats d = half_at(header, 0, part);
        for (int i = 0; i < 2; i++) {
            const Ints scale = bit_or(field(header, kLow, 2 * block + i, 4, part),
                                      shift_left(field(header, kUpper, 2 * block + i, 2, part), 4));
            out.d[i] = mul(d, to_floats(add_ints(scale, all_ints(-32))));
        }
    }
};

struct Q6_K : Weights<kQ6_K> {
    static constexpr int kScaleCols = 16;
    static constexpr int kOffset = 32;
    static void scales(const uint8_t* header, int block, int part, Scales& out) {
        const Floats d = half_at(header, 0, part);
        for (int i = 0; i < 2; i++) {
            const Ints byte = shift_left(field(header, kHalves, 2 * block + i, 8, part), 24);
            out.d[i] = mul(d, to_floats(shift_right_signed(byte, 24)));
        }
    }
};

struct IQ4_XS : Codebook16<Weights<kIQ4_XS>> {
    static void scales(const uint8_t* header, int block, int part, Scales& out) {
        const Ints upper = load_shorts_as_ints(header + kHalves + 2 * kLanes * part);
        const Ints two = bit_and(shift_right(upper, 2 * block), all_ints(3));
        const Ints scale = bit_or(field(header, 2 * kHalves, block, 4, part), shift_left(two, 4));
        out.d[0] = mul(half_at(header, 0, part), to_floats(add_ints(scale, all_ints(-32))));
    }
};

}  // namespace pocketllm::POCKETLLM_ISA
