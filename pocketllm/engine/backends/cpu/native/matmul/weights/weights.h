// Each format as the kernels see it: scales and byte codes of 32 columns of 16 rows.
//
//   w = d · (code - kOffset) (+ m)      d and m for each row and 32 columns, or 16 where kScaleCols says so
//
// d, m and the codes are exactly the numbers of the file's format: nothing is rounded a second time.
#pragma once

#include "layouts/formats.h"
#include "matmul/weights/codes.h"

namespace pocketllm::POCKETLLM_ISA {

struct Scales {
    Floats d[2], m[2];  // of columns 0-15 and 16-31, or [0] of all 32
    Floats total;       // Σ w of the 32 columns
};

// What most formats are; each says below what is different.
template <int32_t id>
struct Weights {
    static constexpr Layout kLayout = layout_of(id);
    static constexpr int32_t kFormat = id;
    static constexpr int kScaleCols = 32;
    static constexpr bool kMin = false;
    static constexpr bool kWide = false;  // codes of 8 bits: signed where the instruction set wants it (kSignedWide)
    static constexpr int kOffset = 0;     // a power of two, or 0
    static constexpr int kLargest = (1 << kLayout.bits) - 1;  // code; 128 of signed bytes

    static void codes(const uint8_t*, const uint8_t* p, int, int part, Bytes (&w)[kSteps]) {
        unpack<kLayout.bits>(p, part, w);
    }
    // What code - kOffset stands for.
    static Floats number(Ints code) { return to_floats(code); }
    // The value as the file's decoder rounds it, before m; q is that number.
    static Floats value(Floats q, Floats d) { return mul(q, d); }

    // Parts of a header: `at` bytes from its begin, of one part's rows.
    static Floats half_at(const uint8_t* header, int at, int part) {
        return load_half(header + at + 2 * kLanes * part);
    }
    static Ints word_at(const uint8_t* header, int at, int part) { return load_ints(header + at + 4 * kLanes * part); }
    // Field `i` of `bits` bits of words that lie one after another.
    static Ints field(const uint8_t* header, int at, int i, int bits, int part) {
        const Ints word = word_at(header, at + kWords * (i * bits / 32), part);
        return bit_and(shift_right(word, i * bits % 32), all_ints((1 << bits) - 1));
    }
};

// Σ code - kOffset over steps [first, last). As many codes as a byte holds are added up as bytes.
template <typename W, int first, int last>
inline Ints sum_of_codes(const Bytes (&w)[kSteps]) {
    constexpr bool kSigned = W::kWide && kSignedWide;
    constexpr int kFit = kSigned ? 1 : kLargestByte / W::kLargest;
    constexpr int kTogether = kFit >= last - first ? last - first : kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
    Ints sum = all_ints(-W::kOffset * 4 * (last - first));
    POCKETLLM_UNROLL for (int step = first; step < last; step += kTogether) {
        Bytes together = w[step];
        POCKETLLM_UNROLL for (int i = 1; i < kTogether; i++) together = add_bytes(together, w[step + i]);
        sum = add_columns<kSigned>(sum, together);
    }
    return sum;
}

template <typename W>
inline Floats total_of(const Bytes (&w)[kSteps], const Scales& scales) {
    constexpr int kHalf = W::kScaleCols / 4;  // steps of a scale
    Floats total = zero();
    if (W::kMin) {
        for (int s = 0; s < kSteps / kHalf; s++) total = fma(scales.m[s], all(W::kScaleCols), total);
    }
    total = fma(scales.d[0], to_floats(sum_of_codes<W, 0, kHalf>(w)), total);
    if constexpr (kHalf < kSteps) total = fma(scales.d[1], to_floats(sum_of_codes<W, kHalf, kSteps>(w)), total);
    return total;
}

// Codes that pick from a table of 16 (or 8) bytes.
template <int bits>
inline void look_up_codes(const uint8_t* p, int part, const uint8_t* table, Bytes (&w)[kSteps]) {
    const Bytes entries = load_table(table);
    unpack<bits>(p, part, w);
    for (int s = 0; s < kSteps; s++) w[s] = look_up(entries, w[s]);
}

}  // namespace pocketllm::POCKETLLM_ISA
