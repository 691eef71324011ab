// How each format's matrices lie in memory once loaded.
//
// A matrix is cut into groups of 16 rows, a group into units of `unit_cols` columns, one after another:
//
//   unit   = header, codes of columns 0-31, codes of columns 32-63, …
//   header = scales of the unit, each for 16 rows side by side, as the format's file in layouts/ draws it
//   codes  = 64 · bits bytes for 16 rows · 32 columns: a plane of the low 4, 2, 1 or 8 bits, then of the upper 1 or 2
//
//   A plane of b bits holds eight steps of four columns. Step s is a vector of 64 bytes, byte 4 · row + t being column
//   4 · s + t, so that one multiply of bytes by four columns of activations serves 16 rows. Steps share vectors:
//     8 bits: vector s                                        4 bits: vector s / 2, bits 4 · (s % 2) …
//     2 bits: vector s / 4, bits 2 · (s % 4) …                1 bit:  the only vector, bit s
//
// Columns are filled up to a whole unit, and rows to a whole group, with zero scales. Float formats but FP8 are not made
// of codes: a group of them is [cols][16 rows].
#pragma once

#include <cstddef>
#include <cstdint>

namespace pocketllm {

// Values are GGUF type ids; those below 0 are of types that only safetensors become (weights/quant_types.py).
enum Format : int32_t {
    kF32 = 0, kF16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8, kQ2_K = 10, kQ3_K = 11, kQ4_K = 12,
    kQ5_K = 13, kQ6_K = 14, kIQ2_XXS = 16, kIQ2_XS = 17, kIQ3_XXS = 18, kIQ1_S = 19, kIQ4_NL = 20, kIQ3_S = 21,
    kIQ2_S = 22, kIQ4_XS = 23, kIQ1_M = 29, kBF16 = 30, kTQ1_0 = 34, kTQ2_0 = 35, kMXFP4 = 39, kNVFP4 = 40, kQ1_0 = 41,
    kQ2_0 = 42, kPQ2_0 = 142, kPTQ1_0 = 143, kFP8 = -1, kNVFP4_SCALED = -2,
};

struct Layout {
    int block_cols, block_bytes;  // of the file
    int unit_cols, header_bytes, bits;
};

constexpr int kHalves = 32;  // header bytes of one float16 for each of 16 rows
constexpr int kWords = 64;   // … of 32 bits for each of 16 rows

// Each format's layout; bits is 16 or 32 for floats and 0 for what is not a format.
constexpr Layout layout_of(int32_t format) {
    switch (format) {
        case kF32: return {1, 4, 1, 0, 32};
        case kF16: return {1, 2, 1, 0, 16};
        case kBF16: return {1, 2, 1, 0, 16};
        case kQ4_0: return {32, 18, 64, 2 * kHalves, 4};
        case kQ4_1: return {32, 20, 32, 2 * kHalves, 4};
        case kQ5_0: return {32, 22, 64, 2 * kHalves, 5};
        case kQ5_1: return {32, 24, 32, 2 * kHalves, 5};
        case kQ8_0: return {32, 34, 64, 2 * kHalves, 8};
        case kIQ4_NL: return {32, 18, 64, 2 * kHalves, 4};
        case kMXFP4: return {32, 17, 64, 32, 4};
        case kNVFP4: return {64, 36, 64, kWords, 4};
        case kNVFP4_SCALED: return {64, 40, 64, 2 * kWords, 4};
        case kFP8: return {64, 68, 64, kWords, 8};
        case kQ2_K: return {256, 84, 256, 2 * kHalves + 4 * kWords, 2};
        case kQ3_K: return {256, 110, 256, kHalves + 3 * kWords, 3};
        case kQ4_K: return {256, 144, 256, 2 * kHalves + 3 * kWords, 4};
        case kQ5_K: return {256, 176, 256, 2 * kHalves + 3 * kWords, 5};
        case kQ6_K: return {256, 210, 256, kHalves + 4 * kWords, 6};
        case kIQ4_XS: return {256, 136, 256, 2 * kHalves + kWords, 4};
        case kIQ1_S: return {256, 50, 256, kHalves + kWords, 2};
        case kIQ1_M: return {256, 56, 256, kHalves + 3 * kWords, 2};
        case kIQ2_XXS: return {256, 66, 256, kHalves + kWords, 3};
        case kIQ2_XS: return {256, 74, 256, kHalves + 2 * kWords, 3};
        case kIQ2_S: return {256, 82, 256, kHalves + 2 * kWords, 3};
        case kIQ3_XXS: return {256, 98, 256, kHalves + kWords, 4};
        case kIQ3_S: return {256, 110, 256, kHalves + kWords, 4};
        case kTQ1_0: return {256, 54, 256, kHalves, 2};
        case kTQ2_0: return {256, 66, 256, kHalves, 2};
        case kQ1_0: return {128, 18, 128, kHalves, 1};
        case kQ2_0: return {64, 18, 64, kHalves, 2};
        case kPQ2_0: return {128, 34, 128, kHalves, 2};
        case kPTQ1_0: return {128, 28, 128, kHalves, 2};
    }
    return {0, 0, 0, 0, 0};
}

// Those that rows of floats are multiplied with, whatever the activations are.
constexpr bool is_float_format(int32_t format) {
    return format == kF32 || format == kF16 || format == kBF16 || format == kFP8;
}

// 16 rows: 2 bytes for each bit of a column, floats too.
constexpr size_t unit_bytes(const Layout& layout) {
    return layout.header_bytes + size_t(2) * layout.bits * layout.unit_cols;
}

// Bytes of one group of 16 rows, a multiple of 64.
constexpr size_t group_bytes(int32_t format, int cols) {
    const Layout layout = layout_of(format);
    const size_t units = (cols + layout.unit_cols - 1) / layout.unit_cols;
    return (units * unit_bytes(layout) + 63) / 64 * 64;
}

// Rows of activations are filled up with zeros to a multiple of this: the largest unit that may be filled up itself.
constexpr int kActivationCols = 64;

}  // namespace pocketllm
