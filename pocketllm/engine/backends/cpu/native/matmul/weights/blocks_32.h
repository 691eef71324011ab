// Formats of layouts/blocks_32.h.
#pragma once

#include "matmul/weights/weights.h"

namespace pocketllm::POCKETLLM_ISA {

// d of 32 columns, two blocks in a unit.
template <int32_t id>
struct HalfScaled : Weights<id> {
    static void scales(const uint8_t* header, int block, int part, Scales& out) {
        out.d[0] = HalfScaled::half_at(header, kHalves * block, part);
    }
};

// d and m of 32 columns.
template <int32_t id>
struct HalfScaledMin : Weights<id> {
    static constexpr bool kMin = true;
    static void scales(const uint8_t* header, int, int part, Scales& out) {
        out.d[0] = HalfScaledMin::half_at(header, 0, part);
        out.m[0] = HalfScaledMin::half_at(header, kHalves, part);
    }
};

struct Q4_0 : HalfScaled<kQ4_0> {
    static constexpr int kOffset = 8;
};
struct Q5_0 : HalfScaled<kQ5_0> {
    static constexpr int kOffset = 16;
};
struct Q4_1 : HalfScaledMin<kQ4_1> {};
struct Q5_1 : HalfScaledMin<kQ5_1> {};

struct Q8_0 : HalfScaled<kQ8_0> {
    static constexpr bool kWide = true;
    static constexpr int kOffset = kSignedWide ? 0 : 128;
    static constexpr int kLargest = 128;
    static void codes(const uint8_t*, const uint8_t* p, int, int part, Bytes (&w)[kSteps]) {
        unpack<8>(p, part, w);
        if (kSignedWide) {
            for (Bytes& step : w) step = bit_xor(step, all_bytes(0x80));
        }
    }
};

// The 16 values of IQ4_NL and IQ4_XS.
template <typename Base>
struct Codebook16 : Base {
    static constexpr bool kWide = true;
    static constexpr int kOffset = kSignedWide ? 0 : 128;
    static constexpr int kLargest = 128;
    static constexpr uint8_t entry(int value) { return static_cast<uint8_t>(value + kOffset); }
    static constexpr uint8_t kTable[16] = {entry(-127), entry(-104), entry(-83), entry(-65), entry(-49), entry(-35),
                                           entry(-22),  entry(-10),  entry(1),   entry(13),  entry(25),  entry(38),
                                           entry(53),   entry(69),   entry(89),  entry(113)};
    static void codes(const uint8_t*, const uint8_t* p, int, int part, Bytes (&w)[kSteps]) {
        look_up_codes<4>(p, part, kTable, w);
    }
};

struct IQ4_NL : Codebook16<HalfScaled<kIQ4_NL>> {};

// Twice a 4-bit float E2M1, plus 16; a negative zero is a plain one.
inline constexpr uint8_t kE2M1[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

template <int32_t id>
struct FourBitFloat : Weights<id> {
    static constexpr int kOffset = 16;
    static constexpr int kLargest = 28;
    static void codes(const uint8_t*, const uint8_t* p, int, int part, Bytes (&w)[kSteps]) {
        look_up_codes<4>(p, part, kE2M1, w);
    }
};

struct MXFP4 : FourBitFloat<kMXFP4> {
    // 2^(e - 128); the first two are subnormal, below the exponent's own range
    static void scales(const uint8_t* header, int block, int part, Scales& out) {
        const Ints e = load_bytes_as_ints(header + 16 * block + kLanes * part);
        const Ints normal = shift_left(add_ints(e, all_ints(-1)), 23);
        const Ints first = where_equal(e, all_ints(0), all_ints(0x00200000), normal);
        out.d[0] = as_floats(where_equal(e, all_ints(1), all_ints(0x00400000), first));
    }
};

struct NVFP4 : FourBitFloat<kNVFP4> {
    static constexpr int kScaleCols = 16;
    // Half an E4M3 without its sign: as the float16 with the same bits, times 2^8 for its other bias; 0x7f is zero
    static Floats scale(const uint8_t* header, int i, int part) {
        const Ints bits = field(header, 0, i, 7 + 1, part);
        const Ints magnitude = bit_and(bits, all_ints(0x7f));
        const Ints number = where_equal(bits, all_ints(0x7f), all_ints(0), magnitude);
        return mul(half_bits_to_floats(shift_left(number, 7)), all(128.0f));
    }
    static void scales(const uint8_t* header, int block, int part, Scales& out) {
        out.d[0] = scale(header, 2 * block, part);
        out.d[1] = scale(header, 2 * block + 1, part);
    }
};

// An E4M3 with its sign over 2^8: as the float16 with the same bits, whose bias is another; 0x7f is no number.
inline Floats e4m3_over_256(Ints bits) {
    const Ints magnitude = bit_and(bits, all_ints(0x7f));
    const Ints number = add_ints(shift_left(magnitude, 7), shift_left(bit_and(bits, all_ints(0x80)), 8));
    return half_bits_to_floats(where_equal(magnitude, all_ints(0x7f), all_ints(0x7e00), number));
}

struct NVFP4_SCALED : FourBitFloat<kNVFP4_SCALED> {
    static constexpr int kScaleCols = 16;
    // Half an E4M3, times the scale of scales
    static void scales(const uint8_t* header, int block, int part, Scales& out) {
        const Floats shared = as_floats(word_at(header, kWords, part));
        for (int i = 0; i < 2; i++) {
            const Ints bits = field(header, 0, 2 * block + i, 8, part);
            out.d[i] = mul(mul(e4m3_over_256(bits), all(128.0f)), shared);
        }
    }
};

// A float format: its codes are looked at one by one, and never multiplied as integers.
struct FP8 : Weights<kFP8> {
    static void scales(const uint8_t* header, int, int part, Scales& out) {
        out.d[0] = as_floats(word_at(header, 0, part));
    }
    static Floats number(Ints code) { return mul(e4m3_over_256(code), all(256.0f)); }
};

}  // namespace pocketllm::POCKETLLM_ISA
