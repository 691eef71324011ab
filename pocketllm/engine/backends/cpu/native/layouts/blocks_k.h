// Superblocks of 256 columns with small integer scales under one float16. Headers, 16 rows side by side in each part:
//
//   Q4_K Q5_K  d | dmin | low nibbles of 8 scales | low nibbles of 8 minimums | upper two bits of scales, then minimums
//   Q2_K       d | dmin | scales 0-7 | scales 8-15 | minimums 0-7 | minimums 8-15                   (nibbles in words)
//   Q3_K       d | low nibbles of scales 0-7 | … of scales 8-15 | upper two bits of 16 scales
//   Q6_K       d | scales 0-3 | 4-7 | 8-11 | 12-15                                                  (int8 in words)
//   IQ4_XS     d | upper two bits of 8 scales (16-bit words) | low nibbles of 8 scales
//
// d and dmin are float16; words are 32 bits, the first field lowest. The values lie in the file as `quant/*.py` says.
#pragma once

#include "layouts/blocks.h"

namespace pocketllm {

// The 6-bit scales and minimums of Q4_K and Q5_K, from the block's bytes 4-15.
inline void put_six_bit_pairs(const uint8_t* packed, int row, uint8_t* words) {
    uint8_t low[8], low_min[8], upper[16];
    for (int j = 0; j < 8; j++) {
        const int scale = j < 4 ? packed[j] & 63 : (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4;
        const int minimum = j < 4 ? packed[j + 4] & 63 : (packed[j + 4] >> 4) | (packed[j] >> 6) << 4;
        low[j] = scale & 15;
        low_min[j] = minimum & 15;
        upper[j] = scale >> 4;
        upper[8 + j] = minimum >> 4;
    }
    put_word(words, row, pack_fields(low, 8, 4));
    put_word(words + kWords, row, pack_fields(low_min, 8, 4));
    put_word(words + 2 * kWords, row, pack_fields(upper, 16, 2));
}

// 256 nibbles: each 32 bytes hold 64 values, the low nibbles first.
inline void split_nibbles_of_64(const uint8_t* packed, uint8_t* codes) {
    for (int i = 0; i < 256; i++) {
        const uint8_t byte = packed[i / 64 * 32 + i % 32];
        codes[i] = i % 64 < 32 ? byte & 15 : byte >> 4;
    }
}

// 256 two-bit values: each 32 bytes hold 128 values, bits 0-1 values 0-31, bits 2-3 values 32-63, and so on.
inline void split_crumbs_of_128(const uint8_t* packed, uint8_t* codes) {
    for (int i = 0; i < 256; i++) codes[i] = packed[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
}

inline void read_q4_k(const uint8_t* block, int, int row, uint8_t* header, uint8_t* codes, const int8_t*) {
    put_half(header, row, block);
    put_half(header + kHalves, row, block + 2);
    put_six_bit_pairs(block + 4, row, header + 2 * kHalves);
    split_nibbles_of_64(block + 16, codes);
}

inline void read_q5_k(const uint8_t* block, int, int row, uint8_t* header, uint8_t* codes, const int8_t*) {
    put_half(header, row, block);
    put_half(header + kHalves, row, block + 2);
    put_six_bit_pairs(block + 4, row, header + 2 * kHalves);
    split_nibbles_of_64(block + 48, codes);
    for (int i = 0; i < 256; i++) codes[i] |= (block[16 + i % 32] >> (i / 32) & 1) << 4;
}

inline void read_q2_k(const uint8_t* block, int, int row, uint8_t* header, uint8_t* codes, const int8_t*) {
    put_half(header, row, block + 80);
    put_half(header + kHalves, row, block + 82);
    uint8_t minimums[16];
    for (int i = 0; i < 16; i++) minimums[i] = block[i] >> 4;
    uint8_t* words = header + 2 * kHalves;
    for (int half = 0; half < 2; half++) {
        put_word(words + kWords * half, row, pack_fields(block + 8 * half, 8, 4));
        put_word(words + kWords * (2 + half), row, pack_fields(minimums + 8 * half, 8, 4));
    }
    split_crumbs_of_128(block + 16, codes);
}

inline void read_q3_k(const uint8_t* block, int, int row, uint8_t* header, uint8_t* codes, const int8_t*) {
    put_half(header, row, block + 108);
    uint8_t low[16], upper[16];
    for (int i = 0; i < 16; i++) {
        low[i] = i < 8 ? block[96 + i] & 15 : block[88 + i] >> 4;
        upper[i] = block[104 + i % 4] >> (i / 4 * 2) & 3;
    }
    uint8_t* words = header + kHalves;
    put_word(words, row, pack_fields(low, 8, 4));
    put_word(words + kWords, row, pack_fields(low + 8, 8, 4));
    put_word(words + 2 * kWords, row, pack_fields(upper, 16, 2));
    split_crumbs_of_128(block + 32, codes);
    for (int i = 0; i < 256; i++) codes[i] |= (block[i % 32] >> (i / 32) & 1) << 2;
}

inline void read_q6_k(const uint8_t* block, int, int row, uint8_t* header, uint8_t* codes, const int8_t*) {
    put_half(header, row, block + 208);
    for (int word = 0; word < 4; word++) {
        put_word(header + kHalves + kWords * word, row, word32(block + 192 + 4 * word));
    }
    for (int i = 0; i < 256; i++) {
        const int half = i / 128, part = i % 128 / 32;
        const uint8_t low = block[64 * half + 32 * (part % 2) + i % 32];
        const uint8_t upper = block[128 + 32 * half + i % 32];
        codes[i] = (part < 2 ? low & 15 : low >> 4) | (upper >> (2 * part) & 3) << 4;
    }
}

inline void read_iq4_xs(const uint8_t* block, int, int row, uint8_t* header, uint8_t* codes, const int8_t*) {
    put_half(header, row, block);
    put_half(header + kHalves, row, block + 2);
    put_word(header + 2 * kHalves, row, word32(block + 4));
    for (int i = 0; i < 8; i++) split_nibbles(block + 8 + 16 * i, codes + 32 * i);
}

}  // namespace pocketllm
