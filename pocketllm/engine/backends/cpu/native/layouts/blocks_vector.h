// Formats whose values are points of a grid, or digits in base 3: taken apart into plain small codes, which costs some
// memory and no bit of any value. Headers, 16 rows side by side in each part; nibbles lie in words, the first lowest:
//
//   IQ2_XXS IQ3_XXS IQ3_S  d | 8 scales                        code = magnitude, then the sign above it
//   IQ2_XS IQ2_S           d | scales 0-7 | scales 8-15        code = magnitude, then the sign above it
//   IQ1_S                  d | 8 scales, the sign of 1/8 in a nibble's top bit
//   IQ1_M                  d | scales 0-7 | scales 8-15 | signs of 1/8 of each eight columns
//   TQ1_0 TQ2_0 Q2_0 PQ2_0 PTQ1_0 Q1_0  d
#pragma once

#include "layouts/blocks.h"

namespace pocketllm {

// -- IQ2, IQ3 ---------------------------------------------------------------------------------------------------------
// Which magnitude a grid's value is; the kernels' tables are in the same order.
inline uint8_t magnitude_2(int8_t value) { return value < 16 ? 0 : value < 32 ? 1 : 2; }  // 8, 25, 43
inline uint8_t magnitude_3_xxs(int8_t value) { return value / 8; }                        // 4, 12, 20, … 52, 62
inline uint8_t magnitude_3_s(int8_t value) { return value / 2; }                          // 1, 3, … 15

// The eighth sign makes the number of negative ones even.
inline uint32_t even_signs(uint32_t seven) { return seven | (__builtin_popcount(seven) & 1) << 7; }

// Eight codes: of two points of four values each, or of one of eight whose halves the two are.
inline void put_points(uint8_t (*magnitude)(int8_t), int sign_at, const int8_t* first, const int8_t* second,
                       uint32_t signs, uint8_t* codes) {
    for (int i = 0; i < 8; i++) {
        codes[i] = magnitude(i < 4 ? first[i] : second[i - 4]) | (signs >> i & 1) << sign_at;
    }
}

inline void read_iq2_xxs(const uint8_t* block, int, int row, uint8_t* header, uint8_t* codes, const int8_t* grid) {
    put_half(header, row, block);
    uint8_t scales[8];
    for (int j = 0; j < 8; j++) {
        const uint8_t* packed = block + 2 + 8 * j;
        const uint32_t word = word32(packed + 4);
        scales[j] = word >> 28;
        for (int i = 0; i < 4; i++) {
            const int8_t* point = grid + 8 * packed[i];
            put_points(magnitude_2, 2, point, point + 4, even_signs(word >> (7 * i) & 127), codes + 32 * j + 8 * i);
        }
    }
    put_word(header + kHalves, row, pack_fields(scales, 8, 4));
}

inline void read_iq2_xs(const uint8_t* block, int, int row, uint8_t* header, uint8_t* codes, const int8_t* grid) {
    put_half(header, row, block);
    put_word(header + kHalves, row, word32(block + 66));
    put_word(header + kHalves + kWords, row, word32(block + 70));
    for (int i = 0; i < 32; i++) {
        const uint16_t word = word16(block + 2 + 2 * i);
        const int8_t* point = grid + 8 * (word & 511);
        put_points(magnitude_2, 2, point, point + 4, even_signs(word >> 9), codes + 8 * i);
    }
}

inline void read_iq2_s(const uint8_t* block, int, int row, uint8_t* header, uint8_t* codes, const int8_t* grid) {
    put_half(header, row, block);
    put_word(header + kHalves, row, word32(block + 74));
    put_word(header + kHalves + kWords, row, word32(block + 78));
    for (int i = 0; i < 32; i++) {
        const int8_t* point = grid + 8 * (block[2 + i] | (block[66 + i / 4] >> (i % 4 * 2) & 3) << 8);
        put_points(magnitude_2, 2, point, point + 4, block[34 + i], codes + 8 * i);
    }
}

inline void read_iq3_xxs(const uint8_t* block, int, int row, uint8_t* header, uint8_t* codes, const int8_t* grid) {
    put_half(header, row, block);
    uint8_t scales[8];
    for (int j = 0; j < 8; j++) {
        const uint32_t word = word32(block + 66 + 4 * j);
        scales[j] = word >> 28;
        for (int i = 0; i < 4; i++) {
            const uint8_t* picks = block + 2 + 8 * j + 2 * i;
            put_points(magnitude_3_xxs, 3, grid + 4 * picks[0], grid + 4 * picks[1], even_signs(word >> (7 * i) & 127),
                       codes + 32 * j + 8 * i);
        }
    }
    put_word(header + kHalves, row, pack_fields(scales, 8, 4));
}

inline void read_iq3_s(const uint8_t* block, int, int row, uint8_t* header, uint8_t* codes, const int8_t* grid) {
    put_half(header, row, block);
    put_word(header + kHalves, row, word32(block + 106));
    for (int i = 0; i < 32; i++) {
        const int ninth = block[66 + i / 4] >> (i % 4 * 2);
        const int first = block[2 + 2 * i] | (ninth & 1) << 8, second = block[3 + 2 * i] | (ninth >> 1 & 1) << 8;
        put_points(magnitude_3_s, 3, grid + 4 * first, grid + 4 * second, block[74 + i], codes + 8 * i);
    }
}

// -- IQ1: digits -1, 0, 1, kept as 0, 1, 2 ----------------------------------------------------------------------------
inline void put_digits(const int8_t* point, uint8_t* codes) {
    for (int i = 0; i < 8; i++) codes[i] = point[i] + 1;
}

inline void read_iq1_s(const uint8_t* block, int, int row, uint8_t* header, uint8_t* codes, const int8_t* grid) {
    put_half(header, row, block);
    uint8_t scales[8];
    for (int j = 0; j < 8; j++) {
        const uint16_t word = word16(block + 34 + 2 * j);
        scales[j] = word >> 12;
        for (int i = 0; i < 4; i++) {
            put_digits(grid + 8 * (block[2 + 4 * j + i] | (word >> (3 * i) & 7) << 8), codes + 32 * j + 8 * i);
        }
    }
    put_word(header + kHalves, row, pack_fields(scales, 8, 4));
}

inline void read_iq1_m(const uint8_t* block, int, int row, uint8_t* header, uint8_t* codes, const int8_t* grid) {
    uint16_t d = 0;
    uint8_t scales[16];
    for (int i = 0; i < 16; i++) {
        const uint16_t word = word16(block + 48 + 2 * (i / 4));
        scales[i] = word >> (i % 4 * 3) & 7;
        if (i % 4 == 0) d |= word >> 12 << i;
    }
    uint32_t negative = 0;
    for (int i = 0; i < 32; i++) {
        const int nibble = block[32 + i / 2] >> (i % 2 * 4) & 15;
        negative |= uint32_t(nibble >> 3) << i;
        put_digits(grid + 8 * (block[i] | (nibble & 7) << 8), codes + 8 * i);
    }
    std::memcpy(header + 2 * row, &d, 2);
    put_word(header + kHalves, row, pack_fields(scales, 8, 4));
    put_word(header + kHalves + kWords, row, pack_fields(scales + 8, 8, 4));
    put_word(header + kHalves + 2 * kWords, row, negative);
}

// -- ternary and one bit ----------------------------------------------------------------------------------------------
// Digit n, 0 to 2, of the base-3 fraction that a byte holds, the most significant first.
inline uint8_t digit_of(uint8_t byte, int n) {
    constexpr int kPowers[] = {1, 3, 9, 27, 81};
    return uint8_t(byte * kPowers[n]) * 3 >> 8;
}

// The first digits of bytes [first, end), then their second digits, and so on.
inline uint8_t* put_section(const uint8_t* block, int first, int end, int digits, uint8_t* codes) {
    for (int n = 0; n < digits; n++) {
        for (int i = first; i < end; i++) *codes++ = digit_of(block[i], n);
    }
    return codes;
}

inline void read_tq1_0(const uint8_t* block, int, int row, uint8_t* header, uint8_t* codes, const int8_t*) {
    put_half(header, row, block + 52);
    codes = put_section(block, 0, 32, 5, codes);
    codes = put_section(block, 32, 48, 5, codes);
    put_section(block, 48, 52, 4, codes);
}

inline void read_ptq1_0(const uint8_t* block, int, int row, uint8_t* header, uint8_t* codes, const int8_t*) {
    put_half(header, row, block + 26);
    codes = put_section(block, 0, 16, 5, codes);
    codes = put_section(block, 16, 24, 5, codes);
    put_section(block, 24, 26, 4, codes);
}

inline void read_tq2_0(const uint8_t* block, int, int row, uint8_t* header, uint8_t* codes, const int8_t*) {
    put_half(header, row, block + 64);
    for (int i = 0; i < 256; i++) codes[i] = block[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
}

// Q2_0 and PQ2_0: four neighbors in a byte
template <int cols>
inline void read_q2_0(const uint8_t* block, int, int row, uint8_t* header, uint8_t* codes, const int8_t*) {
    put_half(header, row, block);
    for (int i = 0; i < cols; i++) codes[i] = block[2 + i / 4] >> (i % 4 * 2) & 3;
}

inline void read_q1_0(const uint8_t* block, int, int row, uint8_t* header, uint8_t* codes, const int8_t*) {
    put_half(header, row, block);
    for (int i = 0; i < 128; i++) codes[i] = block[2 + i / 8] >> (i % 8) & 1;
}

}  // namespace pocketllm
