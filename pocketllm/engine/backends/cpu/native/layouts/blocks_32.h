// Formats of small blocks with a float16 scale (and minimum) each. Headers, 16 rows side by side in each part:
//
//   Q4_0 Q5_0 Q8_0 IQ4_NL   d of columns 0-31 | d of columns 32-63            (float16)
//   Q4_1 Q5_1               d | m                                             (float16)
//   MXFP4                   e of columns 0-31 | e of columns 32-63            (a byte each)
//   NVFP4                   four E4M3 scales, of 16 columns each              (a word)
//   NVFP4_SCALED            the same | the scale of those scales              (a word | float32)
//   FP8                     d of all 64                                       (float32)
#pragma once

#include "layouts/blocks.h"

namespace pocketllm {

inline void add_fifth_bits(const uint8_t* bits, uint8_t* codes) {
    const uint32_t word = word32(bits);
    for (int i = 0; i < 32; i++) codes[i] |= (word >> i & 1) << 4;
}

// Q4_0 and IQ4_NL
inline void read_q4_0(const uint8_t* block, int at, int row, uint8_t* header, uint8_t* codes, const int8_t*) {
    put_half(header + kHalves * at, row, block);
    split_nibbles(block + 2, codes);
}

inline void read_q4_1(const uint8_t* block, int, int row, uint8_t* header, uint8_t* codes, const int8_t*) {
    put_half(header, row, block);
    put_half(header + kHalves, row, block + 2);
    split_nibbles(block + 4, codes);
}

inline void read_q5_0(const uint8_t* block, int at, int row, uint8_t* header, uint8_t* codes, const int8_t*) {
    put_half(header + kHalves * at, row, block);
    split_nibbles(block + 6, codes);
    add_fifth_bits(block + 2, codes);
}

inline void read_q5_1(const uint8_t* block, int, int row, uint8_t* header, uint8_t* codes, const int8_t*) {
    put_half(header, row, block);
    put_half(header + kHalves, row, block + 2);
    split_nibbles(block + 8, codes);
    add_fifth_bits(block + 4, codes);
}

inline void read_q8_0(const uint8_t* block, int at, int row, uint8_t* header, uint8_t* codes, const int8_t*) {
    put_half(header + kHalves * at, row, block);
    for (int i = 0; i < 32; i++) codes[i] = block[2 + i] ^ 0x80;  // value + 128
}

inline void read_mxfp4(const uint8_t* block, int at, int row, uint8_t* header, uint8_t* codes, const int8_t*) {
    header[16 * at + row] = block[0];
    split_nibbles(block + 1, codes);
}

inline void read_nvfp4(const uint8_t* block, int, int row, uint8_t* header, uint8_t* codes, const int8_t*) {
    put_word(header, row, word32(block));
    for (int part = 0; part < 4; part++) {
        for (int i = 0; i < 8; i++) {
            const uint8_t packed = block[4 + 8 * part + i];
            codes[16 * part + i] = packed & 15;
            codes[16 * part + 8 + i] = packed >> 4;
        }
    }
}

inline void read_nvfp4_scaled(const uint8_t* block, int at, int row, uint8_t* header, uint8_t* codes, const int8_t*) {
    read_nvfp4(block, at, row, header, codes, nullptr);
    put_word(header + kWords, row, word32(block + 36));
}

inline void read_fp8(const uint8_t* block, int, int row, uint8_t* header, uint8_t* codes, const int8_t*) {
    put_word(header, row, word32(block + 64));
    std::memcpy(codes, block, 64);
}

}  // namespace pocketllm
