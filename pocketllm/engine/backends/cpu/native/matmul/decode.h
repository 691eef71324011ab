// Blocks of 32 columns of a group as floats: each value has the bits that the file's decoder gives it.
#pragma once

#include "kernels.h"
#include "matmul/weights/every.h"

namespace pocketllm::POCKETLLM_ISA {

template <typename W, int t>
inline void decode_column(Bytes codes, Floats d, Floats m, float* out) {
    const Ints code = W::kWide && kSignedWide ? signed_code_at<t>(codes) : code_at<t>(codes);
    const Floats value = W::value(W::number(sub_ints(code, all_ints(W::kOffset))), d);
    store(out, W::kMin ? add(value, m) : value);
}

// Block `block` of a group (its first unit at `group`): out [32 columns][16 rows].
template <typename W>
void decode_block(const uint8_t* group, int block, int, float* out) {
    constexpr Layout kLayout = W::kLayout;
    constexpr int kUnitBlocks = kLayout.unit_cols / 32;
    const uint8_t* unit = group + unit_bytes(kLayout) * (block / kUnitBlocks);
    const int b = block % kUnitBlocks;
    for (int part = 0; part < kGroupRows / kLanes; part++) {
        Bytes codes[kSteps];
        Scales scales;
        W::codes(unit, unit + kLayout.header_bytes + 64 * kLayout.bits * b, b, part, codes);
        W::scales(unit, b, part, scales);
        for (int s = 0; s < kSteps; s++) {
            const int at = 4 * s / W::kScaleCols;
            const Floats d = scales.d[at], m = W::kMin ? scales.m[at] : zero();
            float* to = out + kLanes * part + kGroupRows * 4 * s;
            decode_column<W, 0>(codes[s], d, m, to);
            decode_column<W, 1>(codes[s], d, m, to + kGroupRows);
            decode_column<W, 2>(codes[s], d, m, to + 2 * kGroupRows);
            decode_column<W, 3>(codes[s], d, m, to + 3 * kGroupRows);
        }
    }
}

template <int32_t format>
inline Floats load_float_format(const uint8_t* p) {
    if (format == kF16) return load_half(p);
    if (format == kBF16) return load_bfloat(p);
    return load(reinterpret_cast<const float*>(p));
}

// The same of a float format: `cols` of the block's columns are there, the others become zeros.
template <int32_t format>
void decode_floats(const uint8_t* group, int block, int cols, float* out) {
    constexpr int kBytes = layout_of(format).bits / 8;
    const uint8_t* values = group + size_t(kBytes) * kGroupRows * 32 * block;
    for (int i = 0; i < kGroupRows * cols; i += kLanes) store(out + i, load_float_format<format>(values + kBytes * i));
    for (int i = kGroupRows * cols; i < kGroupRows * 32; i += kLanes) store(out + i, zero());
}

using DecodeBlock = void (*)(const uint8_t* group, int block, int cols, float* out);

// Null for what is not a format.
DecodeBlock decoder_of(int32_t format);

}  // namespace pocketllm::POCKETLLM_ISA
