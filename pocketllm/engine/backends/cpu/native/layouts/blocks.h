// What the readers of file blocks share. A reader takes one block of a row apart:
//
//   read(block, at, row, header, codes, grid)
//     block   the block's bytes in the file
//     at      which block of its unit it is, 0 unless a unit has several
//     row     0 to 15, its row in the group
//     header  of the unit: the reader writes its row's scales
//     codes   one code for each of the block's columns, in order
//     grid    the points of a codebook of vectors
#pragma once

#include <cstdint>
#include <cstring>

#include "layouts/formats.h"

namespace pocketllm {

// A value for one of 16 rows of a header's part that begins at `part`.
inline void put_half(uint8_t* part, int row, const uint8_t* half) { std::memcpy(part + 2 * row, half, 2); }
inline void put_word(uint8_t* part, int row, uint32_t word) { std::memcpy(part + 4 * row, &word, 4); }

inline uint16_t word16(const uint8_t* p) {
    uint16_t word;
    std::memcpy(&word, p, 2);
    return word;
}
inline uint32_t word32(const uint8_t* p) {
    uint32_t word;
    std::memcpy(&word, p, 4);
    return word;
}

// `count` fields of `bits` bits, the first lowest.
inline uint32_t pack_fields(const uint8_t* values, int count, int bits) {
    uint32_t word = 0;
    for (int i = 0; i < count; i++) word |= uint32_t(values[i] & ((1u << bits) - 1)) << (bits * i);
    return word;
}

// 32 columns whose low nibbles are values 0-15 and high nibbles 16-31.
inline void split_nibbles(const uint8_t* packed, uint8_t* codes) {
    for (int i = 0; i < 16; i++) {
        codes[i] = packed[i] & 15;
        codes[i + 16] = packed[i] >> 4;
    }
}

}  // namespace pocketllm
